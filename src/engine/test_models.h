// test_models.h: small models of one expert layer, in the layouts that checkpoints come in.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "checkpoint/test_files.h"
#include "numerics/bf16.h"

namespace megamoe::testing {

// 12 experts: sorted as text, 10 comes before 2.
inline constexpr std::int64_t kExperts = 12;
inline constexpr std::int64_t kHidden = 48;
inline constexpr std::int64_t kIntermediate = 32;

// Reproducible numbers in (-1, 1), other ones for each seed.
inline std::vector<bf16> random_bf16(std::uint64_t seed, std::int64_t count) {
  std::uint64_t state = seed * 0x9E3779B97F4A7C15u + 0xD1B54A32D192ED03u;
  std::vector<bf16> values;
  for (std::int64_t i = 0; i < count; ++i) {
    state = state * 6364136223846793005u + 1442695040888963407u;
    values.push_back(to_bf16(static_cast<float>(static_cast<std::int32_t>(state >> 32)) * 0x1p-31f));
  }
  return values;
}

// The weights of expert `e`: [I, H], [I, H], [H, I]. Experts differ in size, too, and so do gate and up.
inline std::vector<bf16> expert_weight(std::int64_t layer, std::int64_t e, int projection) {
  auto values =
      random_bf16(static_cast<std::uint64_t>(layer * 1000 + e * 3 + projection + 1), kHidden * kIntermediate);
  const float size = 0.01f * static_cast<float>(e + 1) * (projection == 1 ? 3.7f : 1.0f);
  for (bf16& v : values) v = to_bf16(to_float(v) * size);
  return values;
}

enum class Layout { kPerExpert, kFused, kW1W3W2 };

inline std::vector<TestTensor> expert_tensors(std::int64_t layer, Layout layout) {
  const std::vector<std::int64_t> shapes[3] = {
      {kIntermediate, kHidden}, {kIntermediate, kHidden}, {kHidden, kIntermediate}};
  std::vector<TestTensor> tensors;
  if (layout == Layout::kFused) {
    std::vector<bf16> gate_up, down;
    for (std::int64_t e = 0; e < kExperts; ++e) {
      for (int p = 0; p < 3; ++p) {
        const auto w = expert_weight(layer, e, p);
        auto& to = p == 2 ? down : gate_up;
        to.insert(to.end(), w.begin(), w.end());
      }
    }
    const std::string prefix = fmt::format("model.layers.{}.mlp.experts.", layer);
    tensors.push_back(
        tensor(prefix + "gate_up_proj", DType::kBF16, {kExperts, 2 * kIntermediate, kHidden}, gate_up));
    tensors.push_back(tensor(prefix + "down_proj", DType::kBF16, {kExperts, kHidden, kIntermediate}, down));
    return tensors;
  }
  const bool w = layout == Layout::kW1W3W2;
  const char* names[3] = {w ? "w1" : "gate_proj", w ? "w3" : "up_proj", w ? "w2" : "down_proj"};
  for (std::int64_t e = 0; e < kExperts; ++e) {
    for (int p = 0; p < 3; ++p) {
      const std::string name = fmt::format("model.layers.{}.{}.experts.{}.{}.weight", layer,
                                           w ? "block_sparse_moe" : "mlp", e, names[p]);
      tensors.push_back(tensor(name, DType::kBF16, shapes[p], expert_weight(layer, e, p)));
    }
  }
  return tensors;
}

// What is not an expert.
inline std::vector<TestTensor> plain_tensors(std::int64_t layers, Layout layout) {
  std::vector<TestTensor> tensors = {
      tensor("model.embed_tokens.weight", DType::kBF16, {5, kHidden}, random_bf16(901, 5 * kHidden)),
      tensor("lm_head.weight", DType::kBF16, {5, kHidden}, random_bf16(902, 5 * kHidden)),
      tensor("model.norm.weight", DType::kBF16, {kHidden}, random_bf16(903, kHidden))};
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    const std::string prefix = fmt::format("model.layers.{}.", layer);
    const std::string moe = layout == Layout::kW1W3W2 ? "block_sparse_moe" : "mlp";
    tensors.push_back(tensor(prefix + moe + ".gate.weight", DType::kBF16, {kExperts, kHidden},
                             random_bf16(904, kExperts * kHidden)));
    tensors.push_back(tensor(prefix + "self_attn.q_proj.weight", DType::kBF16, {kHidden, kHidden},
                             random_bf16(905, kHidden * kHidden)));
  }
  return tensors;
}

inline nlohmann::json model_config_json(std::int64_t layers, Layout layout) {
  return {{"model_type", layout == Layout::kW1W3W2 ? "mixtral" : "qwen3_moe"},
          {"hidden_size", kHidden},
          {layout == Layout::kW1W3W2 ? "intermediate_size" : "moe_intermediate_size", kIntermediate},
          {layout == Layout::kW1W3W2 ? "num_local_experts" : "num_experts", kExperts},
          {"num_experts_per_tok", 2},
          {"num_hidden_layers", layers},
          {"hidden_act", "silu"},
          {"norm_topk_prob", true}};
}

// A directory of one or two shards with an index, config.json and a tokenizer.
inline void write_model(const std::filesystem::path& directory, std::int64_t layers, Layout layout,
                        bool sharded = false) {
  std::filesystem::create_directories(directory);
  std::vector<TestTensor> all = plain_tensors(layers, layout);
  for (std::int64_t layer = 0; layer < layers; ++layer) {
    for (TestTensor& t : expert_tensors(layer, layout)) all.push_back(std::move(t));
  }
  const std::map<std::string, std::string> metadata = {{"format", "pt"}};
  if (sharded) {
    std::vector<TestTensor> shards[2];
    std::map<std::string, std::string> map;
    for (std::size_t i = 0; i < all.size(); ++i) {
      map[all[i].name] = fmt::format("model-0000{}-of-00002.safetensors", i % 2 + 1);
      shards[i % 2].push_back(all[i]);
    }
    write_safetensors(directory / "model-00001-of-00002.safetensors", shards[0], metadata);
    write_safetensors(directory / "model-00002-of-00002.safetensors", shards[1], metadata);
    write_index(directory, map);
  } else {
    write_safetensors(directory / "model.safetensors", all, metadata);
  }
  write_bytes(directory / "config.json", model_config_json(layers, layout).dump());
  write_bytes(directory / "tokenizer.json", "{\"a\": 1}");
}

}  // namespace megamoe::testing
