#include "ref/ref_backend.h"

#include "layer/routing.h"
#include "ref/operations.h"

namespace megamoe {
namespace {

class RefBackend final : public Backend {
 public:
  std::string_view name() const override { return "ref"; }
  std::string_view description() const override { return "the reference: scalar, exact, slow"; }
  std::string_view needs() const override { return "any CPU"; }
  bool supported() const override { return true; }
  bool runs(ActivationFormat activations, WeightFormat weights) const override {
    return activations == ActivationFormat::kBf16 || weights == WeightFormat::kNvfp4;
  }
  bool keeps_order() const override { return true; }

  std::unique_ptr<PreparedLayer> prepare(const LayerWeights& weights) const override {
    return ref::prepare(weights);
  }

  void route(const float* logits, std::int64_t tokens, const LayerConfig& config, const float* selection_bias,
             const std::int32_t* hash_ids, std::int32_t* ids, float* weights) const override {
    route_tokens(logits, tokens, config, selection_bias, hash_ids, ids, weights);
  }

  void sort(const std::int32_t* ids, const float* weights, const Routing& routing) const override {
    ref::sort(ids, weights, routing);
  }
  std::int64_t quantize(const ActivationRows& x, const std::int32_t* row_map,
                        const ActivationRows& out) const override {
    return ref::quantize(x, row_map, out);
  }
  void quantize_fp8(const ActivationRows& x, const ActivationRows& out) const override {
    ref::quantize_fp8(x, out);
  }
  std::int64_t deinterleave_quantize(const ActivationRows& x, const ActivationRows& out) const override {
    return ref::deinterleave_quantize(x, out);
  }
  void row_amax(const ActivationRows& x, float* amax) const override { ref::row_amax(x, amax); }
  void deinterleave_row_amax(const ActivationRows& x, float* amax) const override {
    ref::deinterleave_row_amax(x, amax);
  }
  void combine(const float* expert_out, const Routing& routing, const float* weights, const float* shared,
               MatrixView<bf16> y) const override {
    ref::combine(expert_out, routing, weights, shared, y);
  }
};

}  // namespace

const Backend& ref_backend() {
  static const RefBackend backend;
  return backend;
}

}  // namespace megamoe
