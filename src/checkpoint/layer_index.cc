// layer_index.cc: experts one by one or all at once, the shared expert, the router, and the checks on them.
#include "checkpoint/layer_index.h"

#include <algorithm>
#include <set>
#include <utility>

#include "base/check.h"
#include "checkpoint/tensor_names.h"

namespace megamoe {
namespace {

constexpr std::size_t kGate = 0, kUp = 1, kDown = 2, kGateUp = 3;

// A size of the layer, first set by one tensor (or the config) and then held against all others.
class Size {
 public:
  explicit Size(const char* what) : what_(what) {}
  void set(std::int64_t value, const std::string& by) {
    if (value == 0) return;
    if (value_ == 0) {
      value_ = value;
      by_ = by;
    } else if (value_ != value) {
      fail(ErrorCode::kInvalidFile, "{} makes the {} {}, but {} makes it {}", by, what_, value, by_, value_);
    }
  }
  std::int64_t get() const { return value_; }

 private:
  const char* what_;
  std::int64_t value_ = 0;
  std::string by_;
};

class LayerBuilder {
 public:
  LayerBuilder(const Checkpoint& checkpoint, const std::string& prefix, const LayerTensors& tensors,
               const ModelConfig& config, const ModelIndexOptions& options, std::vector<std::string>& notes)
      : checkpoint_(checkpoint), tensors_(tensors), config_(config), options_(options), notes_(notes) {
    const LayerNumber number = parse_layer_number(prefix);
    info_.layer = number.number;
    info_.mtp = number.mtp;
    info_.prefix = prefix;
    hidden_.set(config.hidden, "config.json");
    intermediate_.set(config.intermediate, "config.json");
    experts_.set(config.num_experts, "config.json");
  }

  MoeLayerInfo build() {
    const bool fused = std::any_of(tensors_.all_experts.begin(), tensors_.all_experts.end(),
                                   [](const MatrixParts& parts) { return parts.any(); });
    if (fused && !tensors_.experts.empty()) {
      fail(ErrorCode::kInvalidFile, "{} has experts one by one and all at once", info_.prefix);
    }
    fused ? add_all_experts() : add_single_experts();
    info_.hidden = hidden_.get();
    info_.intermediate = intermediate_.get();
    choose_family();
    add_shared();
    check_against_config();
    check_input_scales();
    add_router();
    return std::move(info_);
  }

 private:
  // ---- experts ----

  void add_single_experts() {
    const auto& experts = tensors_.experts;
    const std::int64_t last = experts.rbegin()->first;
    info_.num_experts = std::max(last + 1, config_.num_experts);
    if (config_.num_experts != 0 && last >= config_.num_experts) {
      fail(ErrorCode::kInvalidFile, "{}: there is an expert {}, but config.json tells of {} experts",
           info_.prefix, last, config_.num_experts);
    }
    info_.gated = std::any_of(experts.begin(), experts.end(),
                              [](const auto& entry) { return entry.second[kGate].any(); });
    if (static_cast<std::int64_t>(experts.size()) != info_.num_experts) {
      std::int64_t missing = 0;
      for (const auto& [expert, parts] : experts) {
        if (expert != missing) break;
        ++missing;
      }
      fail(ErrorCode::kInvalidFile, "{}: expert {} of {} has no tensors", info_.prefix, missing,
           info_.num_experts);
    }
    info_.experts.resize(static_cast<std::size_t>(info_.num_experts));
    for (const auto& [expert, parts] : experts) {
      for (std::size_t p : {kGate, kUp, kDown}) {
        if (p == kGate && !info_.gated) continue;
        if (!parts[p].any()) {
          fail(ErrorCode::kInvalidFile, "{}: expert {} has no {} projection ({})", info_.prefix, expert,
               to_string(kProjections[p]), expected_module(expert, p));
        }
        const MatrixReading reading = matrix_readings(parts[p], false).front();
        set_sizes(parts[p], reading, p);
        fill(info_.experts[static_cast<std::size_t>(expert)][p],
             make_matrix(parts[p], reading, expert, reading.stored_rows, 0, 1));
        note_family(reading.family, parts[p].module);
      }
    }
  }

  // What the missing projection would be called, after its siblings.
  std::string expected_module(std::int64_t expert, std::size_t p) const {
    static constexpr std::array<const char*, 3> kLong = {"gate_proj", "up_proj", "down_proj"};
    static constexpr std::array<const char*, 3> kShort = {"w1", "w3", "w2"};
    const auto& parts = tensors_.experts.at(expert);
    const bool is_short = std::any_of(parts.begin(), parts.end(), [](const MatrixParts& m) {
      return m.module.ends_with(".w1") || m.module.ends_with(".w2") || m.module.ends_with(".w3");
    });
    return join_names(info_.prefix, fmt::format("experts.{}.{}", expert, (is_short ? kShort : kLong)[p]));
  }

  void add_all_experts() {
    const auto& all = tensors_.all_experts;
    const bool together = all[kGateUp].any();
    if (together && (all[kGate].any() || all[kUp].any())) {
      fail(ErrorCode::kInvalidFile, "{}: gate and up are there both together and apart", info_.prefix);
    }
    info_.gated = together || all[kGate].any();
    for (std::size_t p : {kUp, kDown}) {
      if (!all[p].any() && !(p == kUp && together)) {
        fail(ErrorCode::kInvalidFile, "{}: the experts have no {} projection", info_.prefix,
             to_string(kProjections[p]));
      }
    }
    const std::map<std::size_t, MatrixReading> chosen = choose_readings();
    for (const auto& [p, reading] : chosen) set_sizes(all[p], reading, p);
    info_.num_experts = experts_.get();
    info_.experts.resize(static_cast<std::size_t>(info_.num_experts));
    for (const auto& [p, reading] : chosen) {
      note_family(reading.family, all[p].module);
      for (std::int64_t e = 0; e < info_.num_experts; ++e) {
        auto& slots = info_.experts[static_cast<std::size_t>(e)];
        if (p != kGateUp) {
          fill(slots[p], make_matrix(all[p], reading, e, reading.stored_rows, 0, 1));
          continue;
        }
        // gpt-oss alternates the rows of gate and up; all others put gate before up.
        const bool alternate = config_.gpt_oss || reading.family == Family::kGptOss;
        const std::int64_t rows = reading.stored_rows / 2;
        fill(slots[kGate], make_matrix(all[p], reading, e, rows, 0, alternate ? 2 : 1));
        fill(slots[kUp], make_matrix(all[p], reading, e, rows, alternate ? 1 : rows, alternate ? 2 : 1));
      }
    }
  }

  // One reading for each tensor, all in one order of rows and columns, so that their sizes agree.
  std::map<std::size_t, MatrixReading> choose_readings() const {
    std::map<std::size_t, std::vector<MatrixReading>> readings;
    for (std::size_t p = 0; p < kNumNamedProjections; ++p) {
      if (tensors_.all_experts[p].any()) readings[p] = matrix_readings(tensors_.all_experts[p], true);
    }
    std::vector<std::map<std::size_t, MatrixReading>> fitting;
    bool square = false;  // told apart by the down projection alone, which is too little to go by
    for (const bool transposed : {false, true}) {
      std::map<std::size_t, MatrixReading> candidate;
      for (const auto& [p, list] : readings) {
        for (const MatrixReading& reading : list) {
          if (reading.transposed == transposed) candidate.emplace(p, reading);
        }
        if (list.size() > 1 && p != kDown) square = square || list[0].stored_rows == list[0].cols;
      }
      // Encodings that fix the order may differ from one another only by mistake; dense ones follow.
      if (candidate.size() == readings.size() && sizes_agree(candidate)) fitting.push_back(candidate);
    }
    const TensorRef& example =
        weight_tensor(tensors_.all_experts[tensors_.all_experts[kGateUp].any() ? kGateUp : kUp]);
    if (fitting.empty()) {
      fail(ErrorCode::kInvalidFile, "{}: no order of rows and columns makes it fit the down projection{}",
           named(example),
           config_.hidden != 0 ? fmt::format(" and the hidden size {} of config.json", config_.hidden) : "");
    }
    const bool asked = !options_.fused_layout.empty();
    if (!asked && (fitting.size() > 1 || square)) {
      fail(ErrorCode::kInvalidFile,
           "{} can be read rows first ([experts, rows, columns]) or columns first; its shape does not tell, "
           "so "
           "--fused-layout must say rows-first or cols-first",
           named(example));
    }
    if (!asked) return fitting.front();
    const bool wanted = options_.fused_layout == "cols-first";
    for (const auto& candidate : fitting) {
      if (candidate.begin()->second.transposed == wanted) return candidate;
    }
    fail(ErrorCode::kInvalidArgument, "{} cannot be read {} as --fused-layout asks", named(example),
         options_.fused_layout);
  }

  bool sizes_agree(const std::map<std::size_t, MatrixReading>& readings) const {
    const MatrixReading& down = readings.at(kDown);
    if (config_.hidden != 0 && down.stored_rows != config_.hidden) return false;
    for (const auto& [p, reading] : readings) {
      if (p == kDown) continue;
      const std::int64_t halves = p == kGateUp ? 2 : 1;
      if (reading.cols != down.stored_rows || reading.stored_rows % halves != 0 ||
          reading.stored_rows / halves != down.cols) {
        return false;
      }
    }
    return true;
  }

  void set_sizes(const MatrixParts& parts, const MatrixReading& reading, std::size_t p) {
    const std::string& by = parts.module;
    if (reading.num_experts != 0) experts_.set(reading.num_experts, by);
    if (p == kDown) {
      hidden_.set(reading.stored_rows, by);
      intermediate_.set(reading.cols, by);
    } else {
      hidden_.set(reading.cols, by);
      intermediate_.set(p == kGateUp ? reading.stored_rows / 2 : reading.stored_rows, by);
    }
  }

  static void fill(std::optional<ExpertMatrix>& slot, const ExpertMatrix& matrix) {
    MEGAMOE_CHECK(!slot.has_value());
    slot = matrix;
  }

  void note_family(Family family, const std::string& module) { families_.emplace(family, module); }

  // A layer belongs to the family of its quantised experts; some may have been left unquantised.
  void choose_family() {
    families_.erase(Family::kPlain);
    if (families_.size() > 1) {
      fail(ErrorCode::kInvalidFile, "{} is named as {} does, but {} as {} does", families_.begin()->second,
           to_string(families_.begin()->first), families_.rbegin()->second,
           to_string(families_.rbegin()->first));
    }
    if (!families_.empty()) info_.family = families_.begin()->first;
  }

  // ---- shared expert ----

  void add_shared() {
    const auto& shared = tensors_.shared;
    if (std::none_of(shared.begin(), shared.end(), [](const auto& parts) { return parts.any(); })) {
      if (config_.num_shared_experts > 0) {
        notes_.push_back(fmt::format("{}: config.json tells of {} shared experts, none is there",
                                     info_.prefix, config_.num_shared_experts));
      }
      return;
    }
    Size intermediate("shared expert's intermediate size");
    for (std::size_t p : {kGate, kUp, kDown}) {
      if (!shared[p].any()) {
        if (p == kGate && !info_.gated) continue;
        fail(ErrorCode::kInvalidFile, "{}: the shared expert has no {} projection", info_.prefix,
             to_string(kProjections[p]));
      }
      const MatrixReading reading = matrix_readings(shared[p], false).front();
      Size hidden("hidden size");
      // Beside experts in a latent space the shared one works on the whole.
      if (config_.router_hidden == config_.hidden) hidden.set(info_.hidden, info_.prefix);
      hidden.set(p == kDown ? reading.stored_rows : reading.cols, shared[p].module);
      intermediate.set(p == kDown ? reading.cols : reading.stored_rows, shared[p].module);
      info_.shared[p] = make_matrix(shared[p], reading, 0, reading.stored_rows, 0, 1);
    }
    for (const char* name : {"shared_expert_gate.weight", "shared_experts_gate.weight"}) {
      if (info_.shared_gate == nullptr) info_.shared_gate = find(name, {{1, info_.hidden}, {info_.hidden}});
    }
  }

  // ---- router ----

  // The tensor of this name under the layer's prefix, with one of these shapes; null where there is none.
  const TensorRef* find(std::string_view name, std::vector<std::vector<std::int64_t>> shapes) const {
    const TensorRef* tensor = checkpoint_.find(join_names(info_.prefix, name));
    if (tensor == nullptr) return nullptr;
    if (std::find(shapes.begin(), shapes.end(), tensor->info->shape) == shapes.end()) {
      fail(ErrorCode::kInvalidFile, "{}: expected the shape [{}]", named(*tensor),
           fmt::join(shapes.front(), ", "));
    }
    if (!is_float(tensor->info->dtype)) {
      fail(ErrorCode::kUnsupported, "{}: expected F32, F16 or BF16", named(*tensor));
    }
    return tensor;
  }

  const TensorRef* first_of(std::initializer_list<const char*> names, std::vector<std::int64_t> shape) const {
    const TensorRef* found = nullptr;
    for (const char* name : names) {
      const TensorRef* tensor = find(name, {shape});
      if (tensor != nullptr && found != nullptr) {
        fail(ErrorCode::kInvalidFile, "{} and {} claim the same place", found->info->name,
             tensor->info->name);
      }
      if (tensor != nullptr) found = tensor;
    }
    return found;
  }

  void add_router() {
    const std::int64_t experts = info_.num_experts;
    const std::int64_t hidden = config_.router_hidden != 0 ? config_.router_hidden : info_.hidden;
    info_.router_weight = first_of({"gate.weight", "router.weight"}, {experts, hidden});
    info_.selection_bias = first_of({"gate.e_score_correction_bias", "e_score_correction_bias"}, {experts});
    // DeepSeek's own names call the bias of the choice "gate.bias"; elsewhere a bias is one of the logits.
    const bool choice =
        info_.prefix.ends_with("ffn") || config_.scoring == "sqrtsoftplus" || config_.scoring == "sigmoid";
    const TensorRef* gate_bias = first_of({"gate.bias"}, {experts});
    if (gate_bias != nullptr && choice && info_.selection_bias != nullptr) {
      fail(ErrorCode::kInvalidFile, "{} and {} claim the same place", gate_bias->info->name,
           info_.selection_bias->info->name);
    }
    if (gate_bias != nullptr) (choice ? info_.selection_bias : info_.router_bias) = gate_bias;
    if (const TensorRef* bias = first_of({"router.bias"}, {experts})) {
      if (info_.router_bias != nullptr) {
        fail(ErrorCode::kInvalidFile, "{} and {} claim the same place", info_.router_bias->info->name,
             bias->info->name);
      }
      info_.router_bias = bias;
    }
    info_.hash_table = checkpoint_.find(join_names(info_.prefix, "gate.tid2eid"));
    if (info_.hash_table != nullptr) check_hash_table();
  }

  void check_hash_table() const {
    const TensorInfo& table = *info_.hash_table->info;
    if ((table.dtype != DType::kI64 && table.dtype != DType::kI32) || table.shape.size() != 2 ||
        (config_.top_k != 0 && table.shape[1] != config_.top_k)) {
      fail(ErrorCode::kInvalidFile, "{}: expected I64 or I32 [vocabulary, {}]", named(*info_.hash_table),
           config_.top_k != 0 ? std::to_string(config_.top_k) : "experts per token");
    }
  }

  // ---- held against the config ----

  static QuantSchemes scheme_of(Encoding encoding) {
    switch (encoding) {
      case Encoding::kDense: return kSchemeDense;
      case Encoding::kNvfp4: return kSchemeNvfp4;
      case Encoding::kMxfp4: return kSchemeMxfp4;
      case Encoding::kFp8Block:
      case Encoding::kFp8Tensor: return kSchemeFp8;
    }
    return 0;
  }

  void check_matrix(const MatrixParts& parts, const ExpertMatrix& matrix) const {
    const QuantConfig& quantization = config_.quantization;
    if (matrix.encoding == Encoding::kFp8Block && quantization.block_known &&
        (quantization.block_rows != 128 || quantization.block_cols != 128)) {
      fail(ErrorCode::kUnsupported, "{}: FP8 blocks of {}x{} are not supported, only 128x128",
           matrix.weight->info->name, quantization.block_rows, quantization.block_cols);
    }
    const QuantSchemes is = scheme_of(matrix.encoding);
    const QuantSchemes allowed = quantization.allowed(parts.module);
    if ((allowed & is) != 0) return;
    fail(ErrorCode::kInvalidFile, "{} is {}, but {} {} ({}), which makes it {}", named(*matrix.weight),
         to_string_schemes(is), quantization.source,
         quantization.excludes(parts.module) ? "excludes it" : "labels it", quantization.label,
         to_string_schemes(allowed));
  }

  void check_against_config() const {
    if (config_.quantization.present) {
      for (const auto& [expert, parts] : tensors_.experts) {
        for (std::size_t p : {kGate, kUp, kDown}) {
          const auto& matrix = info_.experts[static_cast<std::size_t>(expert)][p];
          if (matrix) check_matrix(parts[p], *matrix);
        }
      }
      for (std::size_t p = 0; p < kNumNamedProjections; ++p) {
        const MatrixParts& parts = tensors_.all_experts[p];
        if (parts.any()) check_matrix(parts, *info_.experts.front()[p == kGateUp ? kUp : p]);
        if (tensors_.shared[p].any() && p != kGateUp) check_matrix(tensors_.shared[p], *info_.shared[p]);
      }
    } else if (config_.present && info_.family != Family::kPlain) {
      notes_.push_back(fmt::format("{} holds {} experts, but no config tells of quantisation", info_.prefix,
                                   to_string(info_.experts.front()[kDown]->encoding)));
    }
  }

  // Either every NVFP4 matrix of the layer has an input scale or none has.
  void check_input_scales() {
    const ExpertMatrix* with = nullptr;
    for (const auto& slots : info_.experts) {
      for (const auto& matrix : slots) {
        if (matrix && matrix->input_scale != nullptr) with = &*matrix;
      }
    }
    bool nvfp4 = false;
    for (std::size_t e = 0; e < info_.experts.size(); ++e) {
      for (std::size_t p : {kGate, kUp, kDown}) {
        auto& matrix = info_.experts[e][p];
        if (!matrix || matrix->encoding != Encoding::kNvfp4) continue;
        nvfp4 = true;
        if (with != nullptr && matrix->input_scale == nullptr) {
          fail(ErrorCode::kInvalidFile, "layer {}: expert {} has no {} input scale ({}), though {} is there",
               info_.layer, e, to_string(kProjections[p]), expected_input_scale(*matrix),
               with->input_scale->info->name);
        }
        if (config_.quantization.fp8_input_scales)
          matrix->unused_input_scale = std::exchange(matrix->input_scale, nullptr);
      }
    }
    if (nvfp4 && with == nullptr) {
      notes_.push_back(
          fmt::format("{}: no input scales, weight-only (W4A16) or dynamic activation scales", info_.prefix));
    } else if (config_.quantization.fp8_input_scales && nvfp4) {
      notes_.push_back(
          fmt::format("{}: its input scales are for FP8 activations and are not used", info_.prefix));
    }
  }

  std::string expected_input_scale(const ExpertMatrix& matrix) const {
    std::string name = matrix.weight->info->name;
    for (std::string_view ending : {".weight_packed", ".weight"}) {
      if (name.ends_with(ending)) {
        name.resize(name.size() - ending.size());
        return name + (matrix.reciprocal ? ".input_global_scale" : ".input_scale");
      }
    }
    return name + "_input_scale";
  }

  const Checkpoint& checkpoint_;
  const LayerTensors& tensors_;
  const ModelConfig& config_;
  const ModelIndexOptions& options_;
  std::vector<std::string>& notes_;
  MoeLayerInfo info_;
  Size hidden_{"hidden size"};
  Size intermediate_{"intermediate size"};
  Size experts_{"number of experts"};
  std::map<Family, std::string> families_;
};

}  // namespace

MoeLayerInfo build_layer(const Checkpoint& checkpoint, const std::string& prefix, const LayerTensors& tensors,
                         const ModelConfig& config, const ModelIndexOptions& options,
                         std::vector<std::string>& notes) {
  return LayerBuilder(checkpoint, prefix, tensors, config, options, notes).build();
}

}  // namespace megamoe
