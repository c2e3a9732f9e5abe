#include "layer/geometries.h"

#include <string>

#include "base/check.h"

namespace megamoe {
namespace {

constexpr ActivationConfig kSilu = {};
constexpr ActivationConfig kSiluLimit10 = {.kind = Activation::kSwiGluClamped, .limit = 10.0f};
constexpr ActivationConfig kOai = {.kind = Activation::kGptOss, .limit = 7.0f, .alpha = 1.702f};
constexpr ActivationConfig kReluSquared = {.kind = Activation::kRelu2};

constexpr RouterConfig softmax() { return {.scoring = Scoring::kSoftmax}; }
constexpr RouterConfig over_chosen() { return {.scoring = Scoring::kSoftmaxOverChosen}; }
constexpr RouterConfig sigmoid(float factor, int groups = 1, int topk_groups = 1) {
  return {.scoring = Scoring::kSigmoid,
          .scaling_factor = factor,
          .num_groups = groups,
          .topk_groups = topk_groups};
}
// Llama 4 weighs the inputs of its experts, not their outputs: its rows are for sizes, not for numbers.
constexpr RouterConfig llama4() { return {.scoring = Scoring::kSigmoid, .renormalize = false}; }
// The first few layers of DeepSeek-V4 take the ids from a table instead; these are the others.
constexpr RouterConfig sqrt_softplus(float factor) {
  return {.scoring = Scoring::kSqrtSoftplus, .scaling_factor = factor};
}

}  // namespace

const std::vector<ModelGeometry>& model_geometries() {
  // {hidden, intermediate, experts, top_k, activation, router}, shared intermediate, shared gate, bias
  static const std::vector<ModelGeometry> rows = {
      {"deepseek-v3", {7168, 2048, 256, 8, kSilu, sigmoid(2.5f, 8, 4)}, 2048, false, true},
      {"deepseek-v4-flash", {4096, 2048, 256, 6, kSiluLimit10, sqrt_softplus(1.5f)}, 2048, false, true},
      {"deepseek-v4-pro", {7168, 3072, 384, 6, kSiluLimit10, sqrt_softplus(2.5f)}, 3072, false, true},
      {"kimi-k2", {7168, 2048, 384, 8, kSilu, sigmoid(2.827f)}, 2048, false, true},
      {"glm-4.5", {5120, 1536, 160, 8, kSilu, sigmoid(2.5f)}, 1536, false, true},
      {"glm-4.5-air", {4096, 1408, 128, 8, kSilu, sigmoid(1.0f)}, 1408, false, true},
      {"glm-4.7-flash", {2048, 1536, 64, 4, kSilu, sigmoid(1.8f)}, 1536, false, true},
      {"glm-5", {6144, 2048, 256, 8, kSilu, sigmoid(2.5f)}, 2048, false, true},
      {"qwen3-30b-a3b", {2048, 768, 128, 8, kSilu, softmax()}},
      {"qwen3-235b-a22b", {4096, 1536, 128, 8, kSilu, softmax()}},
      {"qwen3-coder-480b", {6144, 2560, 160, 8, kSilu, softmax()}},
      {"qwen3-next-80b", {2048, 512, 512, 10, kSilu, softmax()}, 512, true},
      {"qwen3.5-35b-a3b", {2048, 512, 256, 8, kSilu, softmax()}, 512, true},
      {"qwen3.5-122b-a10b", {3072, 1024, 256, 8, kSilu, softmax()}, 1024, true},
      {"qwen3.5-397b-a17b", {4096, 1024, 512, 10, kSilu, softmax()}, 1024, true},
      {"minimax-m2", {3072, 1536, 256, 8, kSilu, sigmoid(1.0f)}, 0, false, true},
      {"llama-4-scout", {5120, 8192, 16, 1, kSilu, llama4()}, 8192},
      {"llama-4-maverick", {5120, 8192, 128, 1, kSilu, llama4()}, 8192},
      {"mixtral-8x7b", {4096, 14336, 8, 2, kSilu, over_chosen()}},
      {"mixtral-8x22b", {6144, 16384, 8, 2, kSilu, over_chosen()}},
      {"nemotron-3-nano", {2688, 1856, 128, 6, kReluSquared, sigmoid(2.5f)}, 3712, false, true},
      // Its experts work on a latent of 1024; the shared expert (5376 wide) works on the hidden size of
      // 4096, outside the layer.
      {"nemotron-3-super", {1024, 2688, 512, 22, kReluSquared, sigmoid(5.0f)}, 0, false, true},
      {"gpt-oss-20b", {2880, 2880, 32, 4, kOai, over_chosen()}},
      {"gpt-oss-120b", {2880, 2880, 128, 4, kOai, over_chosen()}},
  };
  return rows;
}

const ModelGeometry& find_geometry(std::string_view name) {
  std::string names;
  for (const ModelGeometry& row : model_geometries()) {
    if (row.name == name) return row;
    names += names.empty() ? "" : ", ";
    names += row.name;
  }
  fail(ErrorCode::kNotFound, "there is no model geometry \"{}\"; the table has {}", name, names);
}

}  // namespace megamoe
