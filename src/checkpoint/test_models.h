// test_models.h: small models of known values in the naming of every family, for tests.
//
// The values come from formulas over (expert, projection, row, column), written down here with tables of
// literals; nothing of the library decodes or encodes them.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "checkpoint/model_index.h"
#include "checkpoint/test_files.h"

namespace megamoe::testing {

struct TestModel {
  std::vector<TestTensor> tensors;
  nlohmann::json config;           // null: no config.json
  nlohmann::json hf_quant_config;  // null: no such file

  TestTensor& at(const std::string& name) {
    for (TestTensor& t : tensors) {
      if (t.name == name) return t;
    }
    throw std::runtime_error("the test model has no " + name);
  }
  void erase(const std::string& name) {
    at(name);
    std::erase_if(tensors, [&](const TestTensor& t) { return t.name == name; });
  }
};

// A model on disk and its index.
class OpenModel {
 public:
  explicit OpenModel(const TestModel& model, const ModelIndexOptions& options = {}) {
    write_safetensors(dir_ / "model.safetensors", model.tensors);
    if (!model.config.is_null()) write_bytes(dir_ / "config.json", model.config.dump());
    if (!model.hf_quant_config.is_null()) {
      write_bytes(dir_ / "hf_quant_config.json", model.hf_quant_config.dump());
    }
    index_ = index_model(Checkpoint::open(dir_.path()), options);
  }
  const ModelIndex& index() const { return index_; }
  const MoeLayerInfo& layer(std::size_t i = 0) const { return index_.layers.at(i); }
  const ExpertMatrix& matrix(std::size_t expert, std::size_t projection, std::size_t i = 0) const {
    return layer(i).experts.at(expert).at(projection).value();
  }

 private:
  TempDir dir_;
  ModelIndex index_;
};

inline constexpr std::array<float, 16> kCodeValues = {0, .5f,  1,  1.5f,  2,  3,  4,  6,
                                                      0, -.5f, -1, -1.5f, -2, -3, -4, -6};
struct ScaleValue {
  std::uint8_t byte;
  float value;
};
inline constexpr std::array<ScaleValue, 7> kScaleValues = {
    {{0x38, 1.0f}, {0x30, 0.5f}, {0x40, 2.0f}, {0x01, 0x1p-9f}, {0x7e, 448.0f}, {0x00, 0.0f}, {0x3c, 1.5f}}};

// Gate and up are [I, H], down is [H, I].
struct TestShape {
  std::int64_t experts = 3, hidden = 64, intermediate = 32;
  std::int64_t rows(std::size_t p) const { return p == 2 ? hidden : intermediate; }
  std::int64_t cols(std::size_t p) const { return p == 2 ? intermediate : hidden; }
};

// An integer of at most 7 bits: exact in BF16, FP16 and E4M3-free of rounding where used.
inline float dense_value(std::int64_t e, std::size_t p, std::int64_t r, std::int64_t c) {
  return static_cast<float>((e * 31 + static_cast<std::int64_t>(p) * 17 + r * 5 + c * 3) % 127 - 63);
}
inline std::uint16_t bf16_bits(float x) {  // for values that BF16 holds
  return static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(x) >> 16);
}
inline std::uint8_t code_of(std::int64_t e, std::size_t p, std::int64_t r, std::int64_t c) {
  return static_cast<std::uint8_t>((e * 3 + static_cast<std::int64_t>(p) * 5 + r * 7 + c * 11 + c / 16) % 16);
}
inline ScaleValue scale_of(std::int64_t e, std::size_t p, std::int64_t r, std::int64_t block) {
  return kScaleValues[static_cast<std::size_t>((e * 2 + static_cast<std::int64_t>(p) + r * 3 + block) % 7)];
}
inline float tensor_scale_of(std::int64_t e, std::size_t p) {  // powers of two: exact both ways
  return std::ldexp(1.0f, static_cast<int>(e % 3) * 2 - static_cast<int>(p));
}
inline float nvfp4_expected(std::int64_t e, std::size_t p, std::int64_t r, std::int64_t c) {
  return kCodeValues[code_of(e, p, r, c)] * scale_of(e, p, r, c / 16).value * tensor_scale_of(e, p);
}
inline std::uint8_t exponent_of(std::int64_t e, std::size_t p, std::int64_t r, std::int64_t block) {
  return static_cast<std::uint8_t>(118 + (e + static_cast<std::int64_t>(p) * 2 + r + block * 3) % 12);
}
inline float mxfp4_expected(std::int64_t e, std::size_t p, std::int64_t r, std::int64_t c) {
  return std::ldexp(kCodeValues[code_of(e, p, r, c)], exponent_of(e, p, r, c / 32) - 127);
}

inline std::vector<std::uint16_t> dense_matrix(const TestShape& s, std::int64_t e, std::size_t p) {
  std::vector<std::uint16_t> out;
  for (std::int64_t r = 0; r < s.rows(p); ++r) {
    for (std::int64_t c = 0; c < s.cols(p); ++c) out.push_back(bf16_bits(dense_value(e, p, r, c)));
  }
  return out;
}
inline std::vector<std::uint8_t> codes_matrix(const TestShape& s, std::int64_t e, std::size_t p) {
  std::vector<std::uint8_t> out;
  for (std::int64_t r = 0; r < s.rows(p); ++r) {
    for (std::int64_t c = 0; c < s.cols(p); c += 2) {
      out.push_back(static_cast<std::uint8_t>(code_of(e, p, r, c) | code_of(e, p, r, c + 1) << 4));
    }
  }
  return out;
}
inline std::vector<std::uint8_t> scales_matrix(const TestShape& s, std::int64_t e, std::size_t p) {
  std::vector<std::uint8_t> out;
  for (std::int64_t r = 0; r < s.rows(p); ++r) {
    for (std::int64_t b = 0; b < s.cols(p) / 16; ++b) out.push_back(scale_of(e, p, r, b).byte);
  }
  return out;
}
inline std::vector<std::uint8_t> exponents_matrix(const TestShape& s, std::int64_t e, std::size_t p) {
  std::vector<std::uint8_t> out;
  for (std::int64_t r = 0; r < s.rows(p); ++r) {
    for (std::int64_t b = 0; b < s.cols(p) / 32; ++b) out.push_back(exponent_of(e, p, r, b));
  }
  return out;
}

inline nlohmann::json qwen_config(const TestShape& s, int top_k = 2) {
  return {
      {"model_type", "qwen3_moe"}, {"hidden_size", s.hidden},      {"moe_intermediate_size", s.intermediate},
      {"num_experts", s.experts},  {"num_experts_per_tok", top_k}, {"norm_topk_prob", true},
      {"hidden_act", "silu"}};
}

inline constexpr std::array<const char*, 3> kLongNames = {"gate_proj", "up_proj", "down_proj"};
inline constexpr std::array<const char*, 3> kShortNames = {"w1", "w3", "w2"};

using AddMatrix = void (*)(TestModel&, const TestShape&, const std::string& name, std::int64_t e,
                           std::size_t p);
// Calls `add` for each projection of each expert, named prefix.experts.E.NAME.
inline void add_each(TestModel& model, const TestShape& s, const std::string& prefix,
                     const std::array<const char*, 3>& names, AddMatrix add, std::size_t first = 0) {
  for (std::int64_t e = 0; e < s.experts; ++e) {
    for (std::size_t p = first; p < 3; ++p) {
      add(model, s, prefix + ".experts." + std::to_string(e) + "." + names[p], e, p);
    }
  }
}

inline void add_dense(TestModel& m, const TestShape& s, const std::string& name, std::int64_t e,
                      std::size_t p) {
  m.tensors.push_back(tensor(name + ".weight", DType::kBF16, {s.rows(p), s.cols(p)}, dense_matrix(s, e, p)));
}
inline void add_modelopt_weight_only(TestModel& m, const TestShape& s, const std::string& name,
                                     std::int64_t e, std::size_t p) {
  m.tensors.push_back(
      tensor(name + ".weight", DType::kU8, {s.rows(p), s.cols(p) / 2}, codes_matrix(s, e, p)));
  m.tensors.push_back(
      tensor(name + ".weight_scale", DType::kE4M3, {s.rows(p), s.cols(p) / 16}, scales_matrix(s, e, p)));
  m.tensors.push_back(
      tensor(name + ".weight_scale_2", DType::kF32, {}, std::vector<float>{tensor_scale_of(e, p)}));
}
// Input scales: 0.5, 0.25, 0.125 for gate, up and down, times expert + 1.
inline float input_scale_value(std::int64_t e, std::size_t p) {
  return std::ldexp(static_cast<float>(e + 1), -1 - static_cast<int>(p));
}
inline void add_modelopt(TestModel& m, const TestShape& s, const std::string& name, std::int64_t e,
                         std::size_t p) {
  add_modelopt_weight_only(m, s, name, e, p);
  m.tensors.push_back(
      tensor(name + ".input_scale", DType::kF32, {}, std::vector<float>{input_scale_value(e, p)}));
}
inline void add_compressed(TestModel& m, const TestShape& s, const std::string& name, std::int64_t e,
                           std::size_t p) {
  m.tensors.push_back(
      tensor(name + ".weight_packed", DType::kU8, {s.rows(p), s.cols(p) / 2}, codes_matrix(s, e, p)));
  m.tensors.push_back(
      tensor(name + ".weight_scale", DType::kE4M3, {s.rows(p), s.cols(p) / 16}, scales_matrix(s, e, p)));
  m.tensors.push_back(tensor(name + ".weight_global_scale", DType::kF32, {1},
                             std::vector<float>{1.0f / tensor_scale_of(e, p)}));
}
inline void add_compressed_mxfp4(TestModel& m, const TestShape& s, const std::string& name, std::int64_t e,
                                 std::size_t p) {
  m.tensors.push_back(
      tensor(name + ".weight_packed", DType::kU8, {s.rows(p), s.cols(p) / 2}, codes_matrix(s, e, p)));
  m.tensors.push_back(
      tensor(name + ".weight_scale", DType::kU8, {s.rows(p), s.cols(p) / 32}, exponents_matrix(s, e, p)));
}
inline void add_deepseek_v4(TestModel& m, const TestShape& s, const std::string& name, std::int64_t e,
                            std::size_t p) {
  m.tensors.push_back(
      tensor(name + ".weight", DType::kI8, {s.rows(p), s.cols(p) / 2}, codes_matrix(s, e, p)));
  m.tensors.push_back(
      tensor(name + ".scale", DType::kE8M0, {s.rows(p), s.cols(p) / 32}, exponents_matrix(s, e, p)));
}

inline constexpr TestShape kSmall{4, 64, 32};

inline TestModel nvfp4_model(AddMatrix add = add_modelopt) {
  TestModel m;
  m.config = qwen_config(kSmall);
  add_each(m, kSmall, "model.layers.0.mlp", kLongNames, add);
  return m;
}

// [E, 2I, N] of gate and up from a matrix function, gate first or alternating; down: [E, H, N].
template <class T, class Make>
std::vector<T> fuse(const TestShape& s, bool down, bool alternate, Make make) {
  std::vector<T> out;
  for (std::int64_t e = 0; e < s.experts; ++e) {
    if (down) {
      const std::vector<T> m = make(s, e, std::size_t{2});
      out.insert(out.end(), m.begin(), m.end());
      continue;
    }
    const std::vector<T> gate = make(s, e, std::size_t{0}), up = make(s, e, std::size_t{1});
    const std::size_t width = gate.size() / static_cast<std::size_t>(s.intermediate);
    for (std::size_t r = 0; r < 2 * static_cast<std::size_t>(s.intermediate); ++r) {
      const auto half = static_cast<std::size_t>(s.intermediate);
      const std::vector<T>& from = alternate ? (r % 2 == 0 ? gate : up) : (r < half ? gate : up);
      const std::size_t row = alternate ? r / 2 : r % half;
      for (std::size_t c = 0; c < width; ++c) out.push_back(from[row * width + c]);
    }
  }
  return out;
}

// [E, a, b] -> [E, b, a].
template <class T>
std::vector<T> transpose(const std::vector<T>& in, std::int64_t experts, std::int64_t a, std::int64_t b) {
  std::vector<T> out(in.size());
  for (std::int64_t e = 0; e < experts; ++e) {
    for (std::int64_t i = 0; i < a; ++i) {
      for (std::int64_t j = 0; j < b; ++j) {
        out[static_cast<std::size_t>((e * b + j) * a + i)] =
            in[static_cast<std::size_t>((e * a + i) * b + j)];
      }
    }
  }
  return out;
}

}  // namespace megamoe::testing
