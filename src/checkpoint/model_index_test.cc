// model_index_test.cc: every family of names is recognised, and what does not add up is refused by name.
#include "checkpoint/model_index.h"

#include "checkpoint/expert_matrix.h"
#include "checkpoint/test_models.h"

namespace megamoe {
namespace {

using namespace megamoe::testing;
using Expected = float (*)(std::int64_t, std::size_t, std::int64_t, std::int64_t);

// Every value of every expert of layer `i`.
void expect_values(const OpenModel& model, const TestShape& s, Expected expected, std::size_t i = 0,
                   std::size_t first = 0) {
  ASSERT_EQ(model.layer(i).experts.size(), static_cast<std::size_t>(s.experts));
  std::int64_t wrong = 0;
  for (std::int64_t e = 0; e < s.experts; ++e) {
    for (std::size_t p = first; p < 3; ++p) {
      const std::vector<float> values = read_f32(model.matrix(static_cast<std::size_t>(e), p, i));
      ASSERT_EQ(values.size(), static_cast<std::size_t>(s.rows(p) * s.cols(p)));
      for (std::int64_t r = 0; r < s.rows(p); ++r) {
        for (std::int64_t c = 0; c < s.cols(p); ++c) {
          wrong += values[static_cast<std::size_t>(r * s.cols(p) + c)] != expected(e, p, r, c);
        }
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

void expect_counts(const OpenModel& model, std::int64_t expert_tensors, std::size_t others) {
  EXPECT_EQ(model.index().expert_tensors, expert_tensors);
  EXPECT_EQ(model.index().others.size(), others);
}

TestModel plain_model(const TestShape& s, const std::string& prefix = "model.layers.0.mlp",
                      const std::array<const char*, 3>& names = kLongNames) {
  TestModel model;
  model.config = qwen_config(s);
  add_each(model, s, prefix, names, add_dense);
  return model;
}

TEST(ModelIndex, TheShippedModel) {
  const ModelIndex model =
      index_model(Checkpoint::open(std::string(MEGAMOE_SOURCE_DIR) + "/examples/tiny-qwen3-moe"));
  EXPECT_EQ(model.model_type, "qwen3_moe");
  ASSERT_EQ(model.layers.size(), 2u);
  for (std::size_t l = 0; l < 2; ++l) {
    const MoeLayerInfo& layer = model.layers[l];
    EXPECT_EQ(layer.layer, static_cast<int>(l));
    EXPECT_EQ(layer.num_experts, 16);
    EXPECT_EQ(layer.hidden, 256);
    EXPECT_EQ(layer.intermediate, 128);
    EXPECT_TRUE(layer.gated);
    EXPECT_EQ(layer.family, Family::kPlain);
    ASSERT_NE(layer.router_weight, nullptr);
  }
  EXPECT_EQ(model.config.top_k, 4);
  EXPECT_EQ(model.expert_tensors, 2 * 16 * 3);
  EXPECT_EQ(model.expert_tensors + static_cast<std::int64_t>(model.others.size()),
            static_cast<std::int64_t>(model.checkpoint->tensors().size()));
  EXPECT_TRUE(model.notes.empty());
}

// Twelve experts: 10 must come after 9, not after 1.
constexpr TestShape kTwelve{12, 64, 48};

TEST(ModelIndex, PlainPerExpert) {
  TestModel m = plain_model(kTwelve);
  m.tensors.push_back(tensor("model.norm.weight", DType::kBF16, {1}, std::vector<std::uint16_t>{0}));
  const OpenModel model(m);
  expect_values(model, kTwelve, dense_value);
  expect_counts(model, 36, 1);
  EXPECT_EQ(matrix_name(model.layer(), 11, Projection::kUp), "model.layers.0.mlp.experts.11.up");
}

TEST(ModelIndex, PlainMixtralNames) {
  const OpenModel model(plain_model(kTwelve, "model.layers.0.block_sparse_moe", kShortNames));
  expect_values(model, kTwelve, dense_value);
}

TEST(ModelIndex, PlainWithoutGate) {
  TestModel m;
  m.config = {{"model_type", "nemotron_h"}, {"mlp_hidden_act", "relu2"}};
  add_each(m, kTwelve, "backbone.layers.1.mixer", kLongNames, add_dense, 1);
  const OpenModel model(m);
  EXPECT_FALSE(model.layer().gated);
  EXPECT_FALSE(model.layer().experts[0][0].has_value());
  EXPECT_EQ(model.layer().layer, 1);
  expect_values(model, kTwelve, dense_value, 0, 1);
}

TestModel fused_model(const TestShape& s, bool transposed, bool alternate = false) {
  TestModel m;
  m.config = qwen_config(s);
  auto gate_up = fuse<std::uint16_t>(s, false, alternate, dense_matrix);
  auto down = fuse<std::uint16_t>(s, true, alternate, dense_matrix);
  std::vector<std::int64_t> gate_up_shape = {s.experts, 2 * s.intermediate, s.hidden};
  std::vector<std::int64_t> down_shape = {s.experts, s.hidden, s.intermediate};
  if (transposed) {
    gate_up = transpose(gate_up, s.experts, 2 * s.intermediate, s.hidden);
    down = transpose(down, s.experts, s.hidden, s.intermediate);
    std::swap(gate_up_shape[1], gate_up_shape[2]);
    std::swap(down_shape[1], down_shape[2]);
  }
  m.tensors.push_back(
      tensor("model.layers.0.mlp.experts.gate_up_proj", DType::kBF16, gate_up_shape, gate_up));
  m.tensors.push_back(tensor("model.layers.0.mlp.experts.down_proj", DType::kBF16, down_shape, down));
  return m;
}

TEST(ModelIndex, FusedBothOrders) {
  for (const bool transposed : {false, true}) {
    TestModel m = fused_model(kTwelve, transposed);
    {
      const OpenModel model(m);
      EXPECT_EQ(model.matrix(3, 0).transposed, transposed);
      expect_values(model, kTwelve, dense_value);
      expect_counts(model, 2, 0);
    }
    m.config = nullptr;  // the shapes of the two tensors are enough
    expect_values(OpenModel(m), kTwelve, dense_value);
  }
}

TEST(ModelIndex, FusedSquareNeedsToBeTold) {
  constexpr TestShape kSquare{12, 64, 32};  // H = 2 I
  for (const bool transposed : {false, true}) {
    const TestModel m = fused_model(kSquare, transposed);
    expect_error(ErrorCode::kInvalidFile, {"experts.gate_up_proj", "[12, 64, 64]", "--fused-layout"},
                 [&] { OpenModel model(m); });
    const char* right = transposed ? "cols-first" : "rows-first";
    const char* wrong = transposed ? "rows-first" : "cols-first";
    expect_values(OpenModel(m, {right}), kSquare, dense_value);
    expect_error(ErrorCode::kInvalidArgument, {wrong}, [&] { OpenModel model(m, {wrong}); });
    expect_error(ErrorCode::kInvalidArgument, {"rows-first", "diagonal"},
                 [&] { OpenModel model(m, {"diagonal"}); });
  }
}

TEST(ModelIndex, FusedGptOssAlternates) {
  TestModel m = fused_model(kTwelve, true, true);
  m.config["model_type"] = "gpt_oss";
  expect_values(OpenModel(m), kTwelve, dense_value);
}

TEST(ModelIndex, ModelOptPerExpert) {
  TestModel m;
  m.config = qwen_config(kTwelve);
  m.hf_quant_config = {{"quantization", {{"quant_algo", "NVFP4"}, {"exclude_modules", {"lm_head"}}}}};
  add_each(m, kTwelve, "model.layers.0.mlp", kLongNames, add_modelopt);
  const OpenModel model(m);
  EXPECT_EQ(model.layer().family, Family::kModelOpt);
  EXPECT_EQ(model.matrix(0, 0).encoding, Encoding::kNvfp4);
  expect_values(model, kTwelve, nvfp4_expected);
  expect_counts(model, 12 * 3 * 4, 0);
  EXPECT_EQ(read_input_scale(model.matrix(4, 2)), 0.625f);
  EXPECT_TRUE(model.index().notes.empty());
}

TEST(ModelIndex, ModelOptWeightOnly) {
  TestModel m;
  m.config = qwen_config(kTwelve);
  m.hf_quant_config = {{"quantization", {{"quant_algo", "W4A16_NVFP4"}}}};
  add_each(m, kTwelve, "model.layers.0.mlp", kLongNames, add_modelopt_weight_only);
  const OpenModel model(m);
  EXPECT_EQ(read_input_scale(model.matrix(4, 2)), 0.0f);
  ASSERT_EQ(model.index().notes.size(), 1u);
  EXPECT_NE(model.index().notes[0].find("weight-only"), std::string::npos);
}

TEST(ModelIndex, CompressedTensors) {
  TestModel m;
  m.config = qwen_config(kTwelve);
  m.config["quantization_config"] = {
      {"quant_method", "compressed-tensors"},
      {"format", "nvfp4-pack-quantized"},
      {"ignore", {"lm_head", "re:.*mlp.gate$"}},
      {"config_groups",
       {{"group_0",
         {{"targets", {"Linear"}},
          {"weights", {{"num_bits", 4}, {"type", "float"}, {"group_size", 16}}},
          {"input_activations", nullptr}}}}}};
  add_each(m, kTwelve, "model.layers.0.mlp", kLongNames, add_compressed);
  const OpenModel model(m);
  EXPECT_EQ(model.layer().family, Family::kCompressedTensors);
  EXPECT_TRUE(model.index().config.quantization.weight_only);
  expect_values(model, kTwelve, nvfp4_expected);
}

TEST(ModelIndex, DeepSeekV4AndItsMtp) {
  constexpr TestShape kV4{3, 64, 32};
  TestModel m;
  m.config = {{"model_type", "deepseek_v4"},
              {"hidden_size", 64},
              {"moe_intermediate_size", 32},
              {"n_routed_experts", 3},
              {"num_experts_per_tok", 2},
              {"num_hidden_layers", 2},
              {"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}}}};
  add_each(m, kV4, "layers.1.ffn", kShortNames, add_deepseek_v4);
  add_each(m, kV4, "mtp.0.ffn", kShortNames, add_deepseek_v4);
  m.tensors.push_back(tensor("layers.1.ffn.gate.bias", DType::kF32, {3}, std::vector<float>{1, 2, 3}));
  {
    const OpenModel model(m);
    ASSERT_EQ(model.index().layers.size(), 2u);
    EXPECT_EQ(model.layer(0).family, Family::kDeepSeekV4);
    EXPECT_EQ(model.layer(0).layer, 1);
    EXPECT_EQ(model.layer(1).layer, 2);
    EXPECT_TRUE(model.layer(1).mtp);
    EXPECT_NE(model.layer(0).selection_bias, nullptr);
    EXPECT_EQ(model.layer(0).router_bias, nullptr);
    expect_values(model, kV4, mxfp4_expected, 0);
    expect_values(model, kV4, mxfp4_expected, 1);
  }
  // NVIDIA's NVFP4 of it leaves the MTP layer as it was, and excludes it by name.
  std::erase_if(m.tensors, [](const TestTensor& t) { return t.name.starts_with("layers.1.ffn.experts"); });
  add_each(m, kV4, "layers.1.ffn", kShortNames, add_modelopt);
  auto& quantization = m.config["quantization_config"];
  quantization["quant_algo"] = "MIXED_PRECISION";
  quantization["ignore"] = {"*.attn.*", "*.ffn.shared_experts.*", "head", "mtp.*"};
  quantization["quantized_layers"]["layers.1.ffn.experts"] = {{"quant_algo", "NVFP4"}, {"group_size", 16}};
  const OpenModel model(m);
  EXPECT_EQ(model.layer(0).family, Family::kModelOpt);
  EXPECT_EQ(model.layer(1).family, Family::kDeepSeekV4);
  expect_values(model, kV4, nvfp4_expected, 0);
  expect_values(model, kV4, mxfp4_expected, 1);
}

TEST(ModelIndex, CompressedTensorsMxfp4) {
  constexpr TestShape kShape{3, 64, 32};
  TestModel m;
  m.config = qwen_config(kShape);
  m.config["quantization_config"] = {{"quant_method", "compressed-tensors"},
                                     {"format", "mxfp4-pack-quantized"}};
  add_each(m, kShape, "model.layers.0.mlp", kLongNames, add_compressed_mxfp4);
  const OpenModel model(m);
  EXPECT_EQ(model.matrix(0, 0).encoding, Encoding::kMxfp4);
  expect_values(model, kShape, mxfp4_expected);
}

TEST(ModelIndex, ModelOptFusedAndTransposed) {
  for (const bool transposed : {true, false}) {
    TestModel m;
    m.config = qwen_config(kTwelve);
    const std::string base = "model.layers.0.mlp.experts.";
    for (const bool down : {false, true}) {
      const std::string name = base + (down ? "down_proj" : "gate_up_proj");
      const std::int64_t rows = down ? kTwelve.hidden : 2 * kTwelve.intermediate;
      const std::int64_t cols = down ? kTwelve.intermediate : kTwelve.hidden;
      auto codes = fuse<std::uint8_t>(kTwelve, down, false, codes_matrix);
      auto scales = fuse<std::uint8_t>(kTwelve, down, false, scales_matrix);
      std::vector<std::int64_t> codes_shape = {12, rows, cols / 2}, scales_shape = {12, rows, cols / 16};
      if (transposed) {
        codes = transpose(codes, 12, rows, cols / 2);
        scales = transpose(scales, 12, rows, cols / 16);
        std::swap(codes_shape[1], codes_shape[2]);
        std::swap(scales_shape[1], scales_shape[2]);
      }
      m.tensors.push_back(tensor(name, DType::kU8, codes_shape, codes));
      m.tensors.push_back(tensor(name + "_weight_scale", DType::kE4M3, scales_shape, scales));
      m.tensors.push_back(tensor(name + "_weight_scale_2", DType::kF32, {}, std::vector<float>{1.0f}));
      m.tensors.push_back(tensor(name + "_input_scale", DType::kF32, {}, std::vector<float>{0.5f}));
    }
    const OpenModel model(m);
    EXPECT_EQ(model.layer().family, Family::kModelOpt);
    expect_values(model, kTwelve, [](std::int64_t e, std::size_t p, std::int64_t r, std::int64_t c) {
      return kCodeValues[code_of(e, p, r, c)] * scale_of(e, p, r, c / 16).value;
    });
    expect_counts(model, 8, 0);
    EXPECT_EQ(view_nvfp4(model.matrix(1, 1)).has_value(), !transposed);
    const Nvfp4Data data = read_nvfp4(model.matrix(11, 1));
    EXPECT_EQ(data.codes, codes_matrix(kTwelve, 11, 1));
    EXPECT_EQ(data.scales, scales_matrix(kTwelve, 11, 1));
    EXPECT_EQ(read_input_scale(model.matrix(11, 1)), 0.5f);
  }
}

float bias_value(std::int64_t e, std::size_t p, std::int64_t r) {
  return static_cast<float>(e * 8 + static_cast<std::int64_t>(p) + r % 5);
}

TEST(ModelIndex, GptOssByBothNames) {
  constexpr TestShape kShape{3, 64, 32};
  for (const bool original : {false, true}) {
    TestModel m;
    m.config = {{"hidden_size", 64}, {"intermediate_size", 32}, {"swiglu_limit", 7.0}};
    if (original) {
      m.config.update({{"num_experts", 3}, {"experts_per_token", 2}});
    } else {
      m.config.update(
          {{"model_type", "gpt_oss"},
           {"num_local_experts", 3},
           {"num_experts_per_tok", 2},
           {"quantization_config", {{"quant_method", "mxfp4"}, {"modules_to_not_convert", {"lm_head"}}}}});
    }
    for (const bool down : {false, true}) {
      const std::string base =
          original ? std::string("block.0.mlp.mlp") + (down ? "2" : "1")
                   : std::string("model.layers.0.mlp.experts.") + (down ? "down_proj" : "gate_up_proj");
      const std::int64_t rows = 64, blocks = (down ? 32 : 64) / 32;
      m.tensors.push_back(tensor(base + (original ? "_weight.blocks" : "_blocks"), DType::kU8,
                                 {3, rows, blocks, 16},
                                 fuse<std::uint8_t>(kShape, down, true, codes_matrix)));
      m.tensors.push_back(tensor(base + (original ? "_weight.scales" : "_scales"), DType::kU8,
                                 {3, rows, blocks},
                                 fuse<std::uint8_t>(kShape, down, true, exponents_matrix)));
      std::vector<std::uint16_t> bias;
      for (std::int64_t e = 0; e < 3; ++e) {
        for (std::int64_t r = 0; r < rows; ++r) {
          bias.push_back(
              bf16_bits(down ? bias_value(e, 2, r) : bias_value(e, static_cast<std::size_t>(r % 2), r / 2)));
        }
      }
      m.tensors.push_back(tensor(base + "_bias", DType::kBF16, {3, rows}, bias));
    }
    const std::string router = original ? "block.0.mlp.gate" : "model.layers.0.mlp.router";
    m.tensors.push_back(
        tensor(router + ".weight", DType::kBF16, {3, 64}, std::vector<std::uint16_t>(192, 0x3f80)));
    m.tensors.push_back(tensor(router + ".bias", DType::kBF16, {3}, std::vector<std::uint16_t>(3, 0x3f80)));
    const OpenModel model(m);
    EXPECT_EQ(model.layer().family, Family::kGptOss);
    EXPECT_TRUE(model.index().config.gpt_oss);
    EXPECT_NE(model.layer().router_bias, nullptr);
    EXPECT_EQ(model.layer().selection_bias, nullptr);
    expect_values(model, kShape, mxfp4_expected);
    for (std::size_t e = 0; e < 3; ++e) {
      for (std::size_t p = 0; p < 3; ++p) {
        const std::vector<float> bias = read_bias(model.matrix(e, p));
        ASSERT_EQ(bias.size(), static_cast<std::size_t>(kShape.rows(p)));
        for (std::size_t r = 0; r < bias.size(); ++r) {
          EXPECT_EQ(bias[r], bias_value(static_cast<std::int64_t>(e), p, static_cast<std::int64_t>(r)));
        }
      }
    }
  }
}

// E4M3 codes of small integers times scales, with blocks that are cut off at both edges.
TEST(ModelIndex, Fp8BlocksRowsAndTensors) {
  constexpr TestShape kShape{3, 144, 160};
  constexpr std::array<std::uint8_t, 4> kCodes = {0x38, 0x40, 0xb8, 0x30};  // 1, 2, -1, 0.5
  constexpr std::array<float, 4> kValues = {1, 2, -1, 0.5f};
  enum Kind { kInv, kE8M0, kScalar, kRows };
  for (const Kind kind : {kInv, kE8M0, kScalar, kRows}) {
    TestModel m;
    m.config = qwen_config(kShape);
    m.config["quantization_config"] = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
    const auto block_scale = [](std::int64_t e, std::size_t p, std::int64_t rb, std::int64_t cb) {
      return std::ldexp(1.0f, static_cast<int>(e + static_cast<std::int64_t>(p) * 3 + rb * 2 + cb));
    };
    for (std::int64_t e = 0; e < 3; ++e) {
      for (std::size_t p = 0; p < 3; ++p) {
        const std::string name = "model.layers.0.mlp.experts." + std::to_string(e) + "." + kLongNames[p];
        const std::int64_t rows = kShape.rows(p), cols = kShape.cols(p);
        std::vector<std::uint8_t> codes;
        for (std::int64_t i = 0; i < rows * cols; ++i)
          codes.push_back(kCodes[static_cast<std::size_t>((i + e) % 4)]);
        m.tensors.push_back(tensor(name + ".weight", DType::kE4M3, {rows, cols}, codes));
        std::vector<float> scales;
        std::vector<std::uint8_t> exponents;
        for (std::int64_t rb = 0; rb < 2; ++rb) {
          for (std::int64_t cb = 0; cb < 2; ++cb) {
            scales.push_back(block_scale(e, p, rb, cb));
            exponents.push_back(static_cast<std::uint8_t>(127 + std::ilogb(scales.back())));
          }
        }
        if (kind == kInv)
          m.tensors.push_back(tensor(name + ".weight_scale_inv", DType::kF32, {2, 2}, scales));
        if (kind == kE8M0) m.tensors.push_back(tensor(name + ".scale", DType::kE8M0, {2, 2}, exponents));
        if (kind == kScalar) {
          m.tensors.push_back(tensor(name + ".weight_scale", DType::kF32, {}, std::vector<float>{scales[0]}));
        }
        if (kind == kRows) {
          std::vector<float> rows_scale;
          for (std::int64_t r = 0; r < rows; ++r) rows_scale.push_back(block_scale(e, p, r % 7, 0));
          m.tensors.push_back(tensor(name + ".weight_scale", DType::kF32, {rows, 1}, rows_scale));
        }
      }
    }
    const OpenModel model(m);
    EXPECT_EQ(model.matrix(0, 0).encoding, kind <= kE8M0 ? Encoding::kFp8Block : Encoding::kFp8Tensor);
    std::int64_t wrong = 0;
    for (std::size_t e = 0; e < 3; ++e) {
      for (std::size_t p = 0; p < 3; ++p) {
        const std::vector<float> values = read_f32(model.matrix(e, p));
        const auto expert = static_cast<std::int64_t>(e);
        for (std::int64_t r = 0; r < kShape.rows(p); ++r) {
          for (std::int64_t c = 0; c < kShape.cols(p); ++c) {
            const std::int64_t i = r * kShape.cols(p) + c;
            const float scale = kind == kScalar ? block_scale(expert, p, 0, 0)
                                : kind == kRows ? block_scale(expert, p, r % 7, 0)
                                                : block_scale(expert, p, r / 128, c / 128);
            wrong += values[static_cast<std::size_t>(i)] !=
                     kValues[static_cast<std::size_t>((i + expert) % 4)] * scale;
          }
        }
      }
    }
    EXPECT_EQ(wrong, 0) << "kind " << kind;
  }
}

// ---- what is refused ----

const std::string kExpert2 = "model.layers.0.mlp.experts.2.";

void expect_refused(const TestModel& m, const std::vector<std::string>& parts,
                    ErrorCode code = ErrorCode::kInvalidFile) {
  expect_error(code, parts, [&] { OpenModel model(m); });
}

TEST(ModelIndexRefuses, MissingParts) {
  {
    TestModel m = plain_model(kTwelve);
    std::erase_if(m.tensors, [](const auto& t) { return t.name.find(".experts.5.") != t.name.npos; });
    expect_refused(m, {"model.layers.0.mlp", "expert 5", "12"});
  }
  {
    TestModel m = plain_model(kTwelve);
    std::erase_if(m.tensors, [](const auto& t) { return t.name.find(".experts.11.") != t.name.npos; });
    expect_refused(m, {"expert 11 of 12"});
  }
  const std::vector<std::pair<std::string, std::vector<std::string>>> cases = {
      {"up_proj.weight", {"experts.2.up_proj", "no weight"}},
      {"up_proj.weight_scale", {"experts.2.up_proj.weight", "no block scale"}},
      {"up_proj.weight_scale_2", {"experts.2.up_proj.weight", "experts.2.up_proj.weight_scale_2", "missing"}},
      {"down_proj.input_scale", {"layer 0", "expert 2", "experts.2.down_proj.input_scale"}},
      {"gate_proj.input_scale", {"layer 0", "expert 2", "experts.2.gate_proj.input_scale"}},
  };
  for (const auto& [name, parts] : cases) {
    TestModel m = nvfp4_model();
    m.erase(kExpert2 + name);
    expect_refused(m, parts);
  }
  TestModel m = plain_model(kSmall);
  m.erase(kExpert2 + "up_proj.weight");
  expect_refused(m, {"expert 2", "up projection", "experts.2.up_proj"});
  TestModel fused = fused_model(kTwelve, false);
  fused.erase("model.layers.0.mlp.experts.down_proj");
  expect_refused(fused, {"down projection"});
}

TEST(ModelIndexRefuses, WhatItDoesNotKnow) {
  const auto extra = [](const std::string& name) {
    return tensor(name, DType::kF32, {1}, std::vector<float>{1});
  };
  for (const char* name :
       {"gate_proj.colour", "gate_proj", "side_proj.weight", "gate_proj.weight.more", ""}) {
    TestModel m = nvfp4_model();
    m.tensors.push_back(extra(kExpert2 + name));
    expect_refused(m, {kExpert2 + name});
  }
  for (const char* name :
       {"experts.02.up_proj.weight", "experts.99999.up_proj.weight", "experts.7", "experts",
        "experts.99999999999999999999.up_proj.weight", "experts.-1.up_proj.weight"}) {
    TestModel m = nvfp4_model();
    m.tensors.push_back(extra(std::string("model.layers.0.mlp.") + name));
    expect_refused(m, {name});
  }
  for (const char* name :
       {"up_proj.pre_quant_scale", "up_proj.svdquant_lora_a", "up_proj.weight_zero_point"}) {
    TestModel m = nvfp4_model();
    m.tensors.push_back(extra(kExpert2 + name));
    expect_refused(m, {kExpert2 + name, "not supported"}, ErrorCode::kUnsupported);
  }
  TestModel odd = nvfp4_model();
  odd.tensors.push_back(extra("model\nlayers.experts.0.up_proj.weight"));
  expect_refused(odd, {"plain text"});
  TestModel dense;
  dense.config = qwen_config(kSmall);
  dense.tensors.push_back(extra("model.norm.weight"));
  expect_refused(dense, {"config.json", "4 experts"});
}

TEST(ModelIndexRefuses, SlotsFilledTwice) {
  TestModel both = plain_model(kSmall);
  add_dense(both, kSmall, kExpert2 + "w1", 2, 0);
  expect_refused(both, {"experts.2.gate_proj", "experts.2.w1"});
  TestModel fused = fused_model(kTwelve, false);
  add_each(fused, kTwelve, "model.layers.0.mlp", kLongNames, add_dense);
  expect_refused(fused, {"one by one", "all at once"});
  TestModel packed = nvfp4_model();
  packed.tensors.push_back(
      tensor(kExpert2 + "up_proj.weight_packed", DType::kU8, {32, 32}, codes_matrix(kSmall, 2, 1)));
  expect_refused(packed, {"experts.2.up_proj.weight ", "experts.2.up_proj.weight_packed"});
  TestModel scales = nvfp4_model();
  scales.tensors.push_back(
      tensor(kExpert2 + "up_proj.weight_global_scale", DType::kF32, {1}, std::vector<float>{1}));
  expect_refused(scales, {"weight_scale_2", "weight_global_scale"});
}

TEST(ModelIndexRefuses, ShapesAndTypesThatDoNotFit) {
  TestModel m = nvfp4_model();
  m.at(kExpert2 + "up_proj.weight_scale").shape = {4, 32};
  expect_refused(m, {"experts.2.up_proj.weight ", "experts.2.up_proj.weight_scale", "U8 [32, 32]", "16"});
  m = nvfp4_model();
  m.at(kExpert2 + "up_proj.weight_scale_2") =
      tensor(kExpert2 + "up_proj.weight_scale_2", DType::kF32, {2}, std::vector<float>{1, 1});
  expect_refused(m, {"experts.2.up_proj.weight_scale_2", "[2]"});
  m = nvfp4_model();
  m.at(kExpert2 + "up_proj.weight_scale").dtype = DType::kI8;
  expect_refused(m, {"experts.2.up_proj.weight_scale", "I8"});
  m = nvfp4_model();
  for (const char* part : {"weight_scale", "weight_scale_2", "input_scale"})
    m.erase(kExpert2 + "up_proj." + part);
  m.at(kExpert2 + "up_proj.weight") =
      tensor(kExpert2 + "up_proj.weight", DType::kI32, {32, 8}, std::vector<std::int32_t>(256, 0));
  expect_refused(m, {"experts.2.up_proj.weight", "I32"}, ErrorCode::kUnsupported);
  m = plain_model(kSmall);
  m.at(kExpert2 + "up_proj.weight").shape = {64, 32};
  expect_refused(m, {"experts.2.up_proj", "64", "32"});
  m = plain_model(kSmall);
  m.at(kExpert2 + "up_proj.weight").shape = {2, 16, 64};
  expect_refused(m, {"experts.2.up_proj.weight", "[2, 16, 64]", "2 dimensions"});
  m = plain_model(kSmall);
  m.tensors.push_back(tensor(kExpert2 + "up_proj.weight_scale", DType::kF32, {}, std::vector<float>{1}));
  expect_refused(m, {"experts.2.up_proj.weight ", "unquantised", "experts.2.up_proj.weight_scale"});
  m = TestModel();
  for (const char* name : {"gate_up_proj", "down_proj"}) {
    const std::string prefix = std::string("model.layers.0.mlp.experts.") + name;
    m.tensors.push_back(tensor(prefix + "_blocks", DType::kU8, {}, std::vector<std::uint8_t>{0}));
    m.tensors.push_back(tensor(prefix + "_scales", DType::kU8, {}, std::vector<std::uint8_t>{0}));
  }
  expect_refused(m, {"_blocks", "4 dimensions"});
}

TEST(ModelIndexRefuses, SizesAgainstTheConfig) {
  const std::vector<std::pair<const char*, int>> cases = {
      {"hidden_size", 128}, {"moe_intermediate_size", 64}, {"num_experts", 5}, {"num_experts", 3}};
  for (const auto& [key, value] : cases) {
    TestModel m = plain_model(kSmall);
    m.config[key] = value;
    expect_refused(m, {std::to_string(value)});
    TestModel fused = fused_model({4, 64, 48}, false);
    fused.config[key] = value;
    expect_refused(fused, {"model.layers.0.mlp.experts.", "config.json"});
  }
  // Prediction layers are numbered on behind the others: the sum must fit.
  TestModel m = plain_model(kSmall, "mtp.1.mlp");
  m.config["num_hidden_layers"] = 2147483647;
  expect_refused(m, {"num_hidden_layers", "2147483647"});
}

TEST(ModelIndexRefuses, LabelsThatAreWrong) {
  TestModel m = plain_model(kSmall);
  m.hf_quant_config = {{"quantization", {{"quant_algo", "NVFP4"}, {"exclude_modules", {"lm_head"}}}}};
  expect_refused(m, {"experts.0.gate_proj.weight", "BF16", "hf_quant_config.json", "NVFP4"});
  m = nvfp4_model();
  m.hf_quant_config = {
      {"quantization", {{"quant_algo", "NVFP4"}, {"exclude_modules", {"model.layers.0.*"}}}}};
  expect_refused(m, {"experts.0.gate_proj.weight", "NVFP4", "excludes"});
  m = nvfp4_model();
  m.config["quantization_config"] = {{"quant_method", "fp8"}};
  expect_refused(m, {"NVFP4", "config.json", "FP8"});
}

// Three layers: NVFP4, left alone, FP8; the second group's pattern also fits the first layer.
TEST(ModelIndex, MixedPrecisionWithOverlappingPatterns) {
  TestModel m;
  m.config = qwen_config(kSmall);
  m.config["quantization_config"] = {
      {"quant_method", "compressed-tensors"},
      {"format", "mixed-precision"},
      {"ignore", {"model.layers.1.*"}},
      {"config_groups",
       {{"group_0", {{"targets", {"re:.*layers\\.[01]\\..*experts.*"}}, {"format", "nvfp4-pack-quantized"}}},
        {"group_1", {{"targets", {"re:model\\.layers\\.\\d+\\.mlp.*"}}, {"format", "float-quantized"}}}}}};
  add_each(m, kSmall, "model.layers.0.mlp", kLongNames, add_compressed);
  add_each(m, kSmall, "model.layers.1.mlp", kLongNames, add_dense);
  add_each(
      m, kSmall, "model.layers.2.mlp", kLongNames,
      [](TestModel& model, const TestShape& s, const std::string& name, std::int64_t, std::size_t p) {
        model.tensors.push_back(
            tensor(name + ".weight", DType::kE4M3, {s.rows(p), s.cols(p)},
                   std::vector<std::uint8_t>(static_cast<std::size_t>(s.rows(p) * s.cols(p)), 0x38)));
        model.tensors.push_back(tensor(name + ".weight_scale", DType::kF32, {}, std::vector<float>{0.5f}));
      });
  {
    const OpenModel model(m);
    expect_values(model, kSmall, nvfp4_expected, 0);
    expect_values(model, kSmall, dense_value, 1);
    expect_values(
        model, kSmall, [](std::int64_t, std::size_t, std::int64_t, std::int64_t) { return 0.5f; }, 2);
  }
  m.config["quantization_config"]["ignore"] = nlohmann::json::array();
  expect_refused(m, {"model.layers.1.mlp.experts.0.gate_proj.weight", "NVFP4 or FP8"});
}

TEST(ModelIndex, OneExpertLeftUnquantised) {
  TestModel m = nvfp4_model();
  m.hf_quant_config = {
      {"quantization", {{"quant_algo", "NVFP4"}, {"exclude_modules", {"model.layers.0.mlp.experts.2"}}}}};
  std::erase_if(m.tensors, [](const auto& t) { return t.name.starts_with(kExpert2); });
  for (std::size_t p = 0; p < 3; ++p) add_dense(m, kSmall, kExpert2 + kLongNames[p], 2, p);
  const OpenModel model(m);
  EXPECT_EQ(model.layer().family, Family::kModelOpt);
  EXPECT_EQ(model.matrix(2, 1).encoding, Encoding::kDense);
  EXPECT_EQ(read_f32(model.matrix(2, 1)).front(), dense_value(2, 1, 0, 0));
  EXPECT_EQ(model.matrix(1, 1).encoding, Encoding::kNvfp4);
}

TEST(ModelIndex, SharedExpertAndRouterOfManyNames) {
  TestModel m = plain_model(kSmall, "model.layers.3.mlp");
  for (std::size_t p = 0; p < 3; ++p) {
    add_dense(m, {1, 64, 48}, std::string("model.layers.3.mlp.shared_expert.") + kLongNames[p], 0, p);
  }
  m.tensors.push_back(tensor("model.layers.3.mlp.shared_expert_gate.weight", DType::kBF16, {1, 64},
                             std::vector<std::uint16_t>(64, 0x3f80)));
  m.tensors.push_back(
      tensor("model.layers.3.mlp.gate.weight", DType::kF32, {4, 64}, std::vector<float>(256, 1)));
  m.tensors.push_back(
      tensor("model.layers.3.mlp.gate.e_score_correction_bias", DType::kF32, {4}, std::vector<float>(4, 1)));
  // A dense layer's MLP is none of our business.
  add_dense(m, {1, 64, 48}, "model.layers.0.mlp.up_proj", 0, 1);
  {
    const OpenModel model(m);
    EXPECT_EQ(model.layer().layer, 3);
    EXPECT_NE(model.layer().router_weight, nullptr);
    EXPECT_NE(model.layer().selection_bias, nullptr);
    EXPECT_NE(model.layer().shared_gate, nullptr);
    ASSERT_TRUE(model.layer().shared[2].has_value());
    EXPECT_EQ(model.layer().shared[2]->cols, 48);
    expect_counts(model, 12, 7);
    expect_error(ErrorCode::kNotFound, {"layer 4", "3"}, [&] { find_layer(model.index(), 4); });
    EXPECT_EQ(&find_layer(model.index(), 3), &model.layer());
  }
  m.at("model.layers.3.mlp.gate.weight").shape = {64, 4};
  expect_refused(m, {"model.layers.3.mlp.gate.weight", "[4, 64]"});
}

TEST(ModelIndex, WithoutExpertsThereIsNothingToFind) {
  TestModel m;
  m.tensors.push_back(tensor("w", DType::kF32, {1}, std::vector<float>{1}));
  const OpenModel model(m);
  EXPECT_TRUE(model.index().layers.empty());
  expect_error(ErrorCode::kNotFound, {"no expert layers"}, [&] { find_layer(model.index(), 0); });
}

}  // namespace
}  // namespace megamoe
