// hopper_layer.h: a layer's weights on one GPU, and its two GEMMs.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "backend/backend.h"
#include "cuda/device.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/packed_weights.h"
#include "cuda/sm90/tile_times.h"

namespace megamoe::sm90 {

class HopperLayer final : public PreparedLayer {
 public:
  // On the device that is current. Weights are packed when the first pass is made for operands of a type.
  // Throws kUnsupported for what this backend does not run.
  explicit HopperLayer(const LayerWeights& weights);

  const LayerConfig& config() const override { return config_; }
  int device() const { return device_; }

  // Operands in GPU memory. The tile is chosen by routing.tokens alone, with MEGAMOE_TILES as it was when the
  // layer was made, so that the same tokens give the same bits however they are routed. FP8 rows are as
  // fp8_rows.h says, in expert order, with room for rows of the worst routing. `workspace`: as many bytes as
  // the functions below say, for rows of the worst routing, free after the call; none where NVFP4 rows are
  // decoded. `in_pass`: the offsets are settled and NVFP4 rows decoded, as GroupedInput says. prepare() must
  // have been called.
  cudaError_t gemm1_on_gpu(const ActivationRows& x, bool x_is_gathered, const Routing& routing, L1Output mode,
                           const ActivationRows& out, unsigned long long* saturated, void* workspace,
                           bool in_pass, cudaStream_t stream) const;
  cudaError_t gemm2_on_gpu(const ActivationRows& h, const Routing& routing, float* out, void* workspace,
                           bool in_pass, cudaStream_t stream) const;
  // Both in one launch, where `few` says that they may be, with the same bits: as FewGemms says.
  bool few(ActivationFormat activations, const Routing& routing) const;
  struct Pairs {
    const std::int32_t* ids;
    const float* weights;
    const cuda::RowTile* row_tiles;
    const std::int32_t* num_row_tiles;
    std::uint32_t* counters;
  };
  // x_by_pair: of pairs, else of tokens.
  cudaError_t few_gemms_on_gpu(const Pairs& pairs, const ActivationRows& x, bool x_by_pair,
                               const Routing& routing, L1Output mode, const ActivationRows& h,
                               unsigned long long* saturated, float* out, const cuda::CombineParams& combine,
                               cudaStream_t stream) const;
  std::int64_t gemm1_workspace_bytes(ActivationFormat format, bool x_is_gathered,
                                     std::int64_t max_rows) const;
  std::int64_t gemm2_workspace_bytes(ActivationFormat format, std::int64_t max_rows) const;

  // Packs the weights for passes with such activations, if that has not been done yet; the shared expert's
  // for its BF16 ones.
  void prepare(ActivationFormat activations) const;

  // The shared expert as a layer of one expert, which every token goes to; null where there is none.
  const HopperLayer* shared() const { return shared_.get(); }
  const float* shared_gate() const { return shared_gate_.data(); }  // [H] on the GPU, or null

  // Operands in host memory.
  std::int64_t gemm1(const ActivationRows& x, bool x_is_gathered, const Routing& routing, L1Output mode,
                     const ActivationRows& out) const override;
  void gemm2(const ActivationRows& h, const Routing& routing, float* out) const override;
  void shared_expert(const ActivationRows& x, float* out) const override;

  std::unique_ptr<DevicePass> device_pass(const PassOptions& options) const override;

 private:
  // Both roles' weights, packed for one type of operands.
  struct Packed {
    std::once_flag once;
    PackedWeights first, second;
  };
  Packed& packed(ActivationFormat activations) const {
    return packed_[static_cast<int>(operand_type(activations))];
  }
  Gemm1 first_gemm(const ActivationRows& x, bool x_is_gathered, const Routing& routing, L1Output mode,
                   const ActivationRows& out, unsigned long long* saturated, void* workspace,
                   bool in_pass) const;
  Gemm2 second_gemm(const ActivationRows& h, const Routing& routing, float* out, void* workspace,
                    bool in_pass) const;
  TileChoice tile(LayerGemm gemm, ActivationFormat activations, std::int64_t max_rows) const;
  GroupedInput input(LayerGemm gemm, const ActivationRows& tokens, const Routing& routing,
                     void* workspace) const;

  LayerWeights weights_;  // keeps the files mapped that it points into
  int device_ = cuda::current_device();
  LayerConfig config_;
  TileTimes tile_times_ = TileTimes::of_environment();
  mutable Packed packed_[2];                                  // by OperandType
  cuda::DeviceArray<float> gate_bias_, up_bias_, down_bias_;  // [experts, I] or [experts, H], or empty
  std::unique_ptr<const HopperLayer> shared_;
  cuda::DeviceArray<float> shared_gate_;
};

}  // namespace megamoe::sm90
