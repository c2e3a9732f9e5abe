// layer.h: what a mixture-of-experts layer is: its sizes, its router, its activation, its weights.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "megamoe/types.h"

namespace megamoe {

// The format in which tokens x and hidden states h meet the weights.
enum class ActivationFormat {
  kBf16,   // W4A16
  kFp8,    // W4A8: E4M3, one FP32 scale for a token and 128 columns
  kNvfp4,  // W4A4
};

// Where the NVFP4 tensor scale of x (and of h) comes from; W4A4 only.
enum class ScaleSource {
  kStatic,          // the checkpoint's input scale of the expert
  kStaticLayerMax,  // the largest of the layer's input scales
  kDynamicRow,      // amax / 2688 of each token (each expert row of h)
  kDynamicTensor,   // amax / 2688 over all tokens of the call (over each expert's rows of h)
};

// h = act(gate, up).
enum class Activation {
  kSwiGlu,         // silu(gate) * up
  kSwiGluClamped,  // gate cut to <= limit, up to [-limit, limit], then SwiGLU
  kGptOss,         // clamped alike; gate * sigmoid(alpha * gate) * (up + 1)
  kRelu2,          // relu(up)^2, no gate
};

struct ActivationConfig {
  Activation kind = Activation::kSwiGlu;
  float limit = 0.0f;    // kSwiGluClamped, kGptOss: > 0
  float alpha = 1.702f;  // kGptOss
  bool gated() const { return kind != Activation::kRelu2; }
};

// How router logits become expert ids and weights.
enum class Scoring {
  kSoftmax,            // softmax over all experts, then top-k
  kSoftmaxOverChosen,  // top-k of the logits, then softmax over those
  kSigmoid,            // DeepSeek-V3: sigmoid, optional bias for the choice alone
  kSqrtSoftplus,       // DeepSeek-V4: sqrt(softplus(logit)), optional bias for the choice alone
};

struct RouterConfig {
  Scoring scoring = Scoring::kSoftmax;
  bool renormalize = true;      // divide the chosen scores by their sum
  float scaling_factor = 1.0f;  // multiplies the weights last
  int num_groups = 1;           // DeepSeek-V3: experts in equal groups ...
  int topk_groups = 1;          // ... of which only the best few are eligible
  bool hash_routed = false;     // ids come from a table by token id; scores only give the weights
};

struct LayerConfig {
  std::int64_t hidden = 0;        // H, a multiple of 16
  std::int64_t intermediate = 0;  // I, a multiple of 16
  std::int64_t num_experts = 0;   // E
  int top_k = 0;
  ActivationConfig activation;
  RouterConfig router;
};

enum class WeightFormat { kF32, kBf16, kNvfp4 };

// One weight matrix [rows, cols], row-major, y = x * W^T. Memory belongs to LayerWeights.
struct WeightMatrix {
  WeightFormat format = WeightFormat::kNvfp4;
  std::int64_t rows = 0;
  std::int64_t cols = 0;                 // a multiple of 16
  const float* f32 = nullptr;            // kF32: [rows, cols]
  const bf16* b16 = nullptr;             // kBf16: [rows, cols]
  const std::uint8_t* codes = nullptr;   // kNvfp4: [rows, cols / 2]
  const std::uint8_t* scales = nullptr;  // kNvfp4: [rows, cols / 16] E4M3
  float tensor_scale = 0.0f;             // kNvfp4: the multiplier, > 0
};

struct ExpertWeights {
  WeightMatrix gate;                 // [I, H]; rows = 0 where the activation has no gate
  WeightMatrix up;                   // [I, H]
  WeightMatrix down;                 // [H, I]
  const float* gate_bias = nullptr;  // [I] or null
  const float* up_bias = nullptr;    // [I] or null
  const float* down_bias = nullptr;  // [H] or null
  float input_scale = 0.0f;          // static NVFP4 tensor scale of x; 0 where the checkpoint has none
  float down_input_scale = 0.0f;     // static NVFP4 tensor scale of h; 0 where the checkpoint has none
};

// The expert every token passes, beside the routed ones. Its activations are always BF16.
struct SharedExpert {
  bool present = false;
  ExpertWeights weights;  // may have another I than the routed experts
  ActivationConfig activation;
  const float* gate = nullptr;  // [H] or null: the output is scaled by sigmoid(x . gate)
};

struct LayerWeights {
  LayerConfig config;
  std::string name;                    // the layer's prefix in its checkpoint, for messages
  std::vector<ExpertWeights> experts;  // [E]
  SharedExpert shared;
  const float* router_weight = nullptr;              // [E, H] or null
  const float* router_bias = nullptr;                // [E] or null: added to the logits (gpt-oss)
  const float* selection_bias = nullptr;             // [E] or null: added to the scores for the choice alone
  const std::int32_t* hash_table = nullptr;          // [vocabulary, top_k] or null
  std::int64_t hash_rows = 0;                        // vocabulary
  std::vector<std::shared_ptr<const void>> storage;  // keeps the memory above alive
  std::vector<std::string> notes;  // what a user should know: "no input scales: weight-only", ...
};

std::string_view to_string(ActivationFormat format);  // "bf16", "fp8", "nvfp4"
std::string_view to_string(ScaleSource source);       // "static", "layer-max", "token", "tensor"
std::string_view to_string(Activation kind);          // "swiglu", "swiglu-clamped", "gpt-oss", "relu2"
std::string_view to_string(Scoring scoring);
std::string_view to_string(WeightFormat format);  // "f32", "bf16", "nvfp4"
// The inverse of to_string; throws kInvalidArgument that lists the names.
ActivationFormat parse_activation_format(std::string_view name);
ScaleSource parse_scale_source(std::string_view name);

// Throws an Error that names the first thing wrong: sizes, multiples of 16, top_k, groups, limits,
// missing matrices, tensor scales that are not finite and positive.
void validate(const LayerConfig& config);
void validate(const LayerWeights& weights);

}  // namespace megamoe
