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

}  // namespace
}  // namespace megamoe
