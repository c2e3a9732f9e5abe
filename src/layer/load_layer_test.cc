// load_layer_test.cc: layers of every family become weights that can run, each slot filled from its own
// tensor.
#include "layer/load_layer.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/test_models.h"

namespace megamoe {
namespace {

using namespace megamoe::testing;

constexpr TestShape kShape{4, 64, 32};
const std::string kPrefix = "model.layers.0.mlp";

LayerWeights load(const OpenModel& model, std::size_t layer = 0) {
  return load_layer(model.index(), model.layer(layer));
}

bool noted(const LayerWeights& weights, const std::string& words) {
  for (const std::string& note : weights.notes) {
    if (note.find(words) != note.npos) return true;
  }
  return false;
}

const WeightMatrix& matrix_of(const ExpertWeights& expert, std::size_t p) {
  return p == 0 ? expert.gate : p == 1 ? expert.up : expert.down;
}

void expect_nvfp4(const WeightMatrix& w, const TestShape& s, std::int64_t e, std::size_t p) {
  ASSERT_EQ(w.format, WeightFormat::kNvfp4);
  EXPECT_EQ(w.rows, s.rows(p));
  EXPECT_EQ(w.cols, s.cols(p));
  const std::vector<std::uint8_t> codes = codes_matrix(s, e, p), scales = scales_matrix(s, e, p);
  EXPECT_EQ(std::memcmp(w.codes, codes.data(), codes.size()), 0);
  EXPECT_EQ(std::memcmp(w.scales, scales.data(), scales.size()), 0);
  EXPECT_EQ(w.tensor_scale, tensor_scale_of(e, p));
}

void expect_bf16(const WeightMatrix& w, const TestShape& s, std::int64_t e, std::size_t p) {
  ASSERT_EQ(w.format, WeightFormat::kBf16);
  const std::vector<std::uint16_t> bits = dense_matrix(s, e, p);
  EXPECT_EQ(std::memcmp(w.b16, bits.data(), bits.size() * 2), 0);
}

TestModel nvfp4_model() {
  TestModel m;
  m.config = qwen_config(kShape);
  add_each(m, kShape, kPrefix, kLongNames, add_modelopt);
  return m;
}

TEST(LoadLayer, TheShippedModel) {
  const ModelIndex model =
      index_model(Checkpoint::open(std::string(MEGAMOE_SOURCE_DIR) + "/examples/tiny-qwen3-moe"));
  const LayerWeights weights = load_layer(model, find_layer(model, 1));
  EXPECT_EQ(weights.config.hidden, 256);
  EXPECT_EQ(weights.config.intermediate, 128);
  EXPECT_EQ(weights.config.num_experts, 16);
  EXPECT_EQ(weights.config.top_k, 4);
  EXPECT_EQ(weights.config.router.scoring, Scoring::kSoftmax);
  EXPECT_TRUE(weights.config.router.renormalize);
  EXPECT_EQ(weights.config.activation.kind, Activation::kSwiGlu);
  ASSERT_NE(weights.router_weight, nullptr);
  const TensorRef& tensor = model.checkpoint->at("model.layers.1.mlp.experts.10.up_proj.weight");
  EXPECT_EQ(std::memcmp(weights.experts[10].up.b16, tensor.bytes().data(), tensor.bytes().size()), 0);
  EXPECT_TRUE(weights.notes.empty());
}

TEST(LoadLayer, Nvfp4PointsIntoTheFile) {
  LayerWeights weights;
  {
    const OpenModel model(nvfp4_model());
    weights = load(model);
    for (std::size_t e = 0; e < 4; ++e) {
      const TensorRef& tensor = *model.matrix(e, 1).weight;
      EXPECT_EQ(static_cast<const void*>(weights.experts[e].up.codes), tensor.bytes().data());
    }
  }
  // The model is closed and its file deleted; the weights keep what they need.
  for (std::int64_t e = 0; e < 4; ++e) {
    const ExpertWeights& expert = weights.experts[static_cast<std::size_t>(e)];
    for (std::size_t p = 0; p < 3; ++p) expect_nvfp4(matrix_of(expert, p), kShape, e, p);
    EXPECT_EQ(expert.input_scale, input_scale_value(e, 0));  // the larger of gate's and up's
    EXPECT_EQ(expert.down_input_scale, input_scale_value(e, 2));
  }
  EXPECT_TRUE(noted(weights, "different tensor scales in 4 of 4"));
  EXPECT_TRUE(noted(weights, "different input scales in 4 of 4"));
  EXPECT_FALSE(noted(weights, "no input scales"));
}

TEST(LoadLayer, TheLargerInputScaleWhicheverItIs) {
  TestModel m = nvfp4_model();
  const std::string name = kPrefix + ".experts.2.up_proj.input_scale";
  m.at(name) = tensor(name, DType::kF32, {1}, std::vector<float>{99.0f});
  EXPECT_EQ(load(OpenModel(m)).experts[2].input_scale, 99.0f);
}

TEST(LoadLayer, WeightOnlyIsNoted) {
  TestModel m;
  m.config = qwen_config(kShape);
  add_each(m, kShape, kPrefix, kLongNames, add_compressed);
  const LayerWeights weights = load(OpenModel(m));
  EXPECT_TRUE(noted(weights, "no input scales"));
  EXPECT_EQ(weights.experts[3].input_scale, 0.0f);
  EXPECT_EQ(weights.experts[3].down_input_scale, 0.0f);
  expect_nvfp4(weights.experts[3].up, kShape, 3, 1);
}

TEST(LoadLayer, BadInputScales) {
  for (const float bad : {0.0f, -1.0f, std::numeric_limits<float>::quiet_NaN()}) {
    TestModel m = nvfp4_model();
    const std::string name = kPrefix + ".experts.2.down_proj.input_scale";
    m.at(name) = tensor(name, DType::kF32, {}, std::vector<float>{bad});
    const OpenModel model(m);
    expect_error(ErrorCode::kInvalidFile, {name}, [&] { load(model); });
  }
}

TEST(LoadLayer, BadBlockScaleAndNoOthersFault) {
  TestModel m = nvfp4_model();
  m.at(kPrefix + ".experts.3.down_proj.weight_scale").bytes[7] = '\x7f';
  const OpenModel model(m);
  expect_error(ErrorCode::kInvalidFile, {"experts.3.down_proj.weight_scale", "row 3, block 1"},
               [&] { load(model); });
}

TEST(LoadLayer, OneExpertLeftUnquantised) {
  TestModel m = nvfp4_model();
  const std::string expert = kPrefix + ".experts.2.";
  std::erase_if(m.tensors, [&](const auto& t) { return t.name.starts_with(expert); });
  for (std::size_t p = 0; p < 3; ++p) add_dense(m, kShape, expert + kLongNames[p], 2, p);
  const LayerWeights weights = load(OpenModel(m));
  for (std::size_t p = 0; p < 3; ++p) expect_bf16(matrix_of(weights.experts[2], p), kShape, 2, p);
  expect_nvfp4(weights.experts[3].gate, kShape, 3, 0);
  EXPECT_EQ(weights.experts[2].input_scale, 0.0f);
}

// A model of fused BF16 experts, gate and up alternating, columns first, in gpt-oss' way.
TEST(LoadLayer, GptOss) {
  TestModel m;
  m.config = {{"model_type", "gpt_oss"}, {"hidden_size", 64},        {"intermediate_size", 32},
              {"num_local_experts", 4},  {"num_experts_per_tok", 2}, {"swiglu_limit", 7.0}};
  for (const bool down : {false, true}) {
    const std::string name = kPrefix + ".experts." + (down ? "down_proj" : "gate_up_proj");
    m.tensors.push_back(tensor(name + "_blocks", DType::kU8, {4, 64, down ? 1 : 2, 16},
                               fuse<std::uint8_t>(kShape, down, true, codes_matrix)));
    m.tensors.push_back(tensor(name + "_scales", DType::kU8, {4, 64, down ? 1 : 2},
                               fuse<std::uint8_t>(kShape, down, true, exponents_matrix)));
    std::vector<float> bias;
    for (int i = 0; i < 4 * 64; ++i) bias.push_back(static_cast<float>(i + (down ? 1000 : 0)));
    m.tensors.push_back(tensor(name + "_bias", DType::kF32, {4, 64}, bias));
  }
  m.tensors.push_back(tensor(kPrefix + ".router.bias", DType::kF32, {4}, std::vector<float>{1, 2, 3, 4}));
  const LayerWeights weights = load(OpenModel(m));
  EXPECT_EQ(weights.config.activation.kind, Activation::kGptOss);
  EXPECT_EQ(weights.config.activation.limit, 7.0f);
  EXPECT_EQ(weights.config.activation.alpha, 1.702f);
  EXPECT_EQ(weights.config.router.scoring, Scoring::kSoftmaxOverChosen);
  for (std::int64_t e = 0; e < 4; ++e) {
    const ExpertWeights& expert = weights.experts[static_cast<std::size_t>(e)];
    for (std::size_t p = 0; p < 3; ++p) {
      const std::vector<std::uint8_t> codes = codes_matrix(kShape, e, p);
      ASSERT_EQ(matrix_of(expert, p).format, WeightFormat::kNvfp4);
      EXPECT_EQ(std::memcmp(matrix_of(expert, p).codes, codes.data(), codes.size()), 0);
    }
    EXPECT_EQ(expert.gate_bias[5], static_cast<float>(e * 64 + 10));
    EXPECT_EQ(expert.up_bias[5], static_cast<float>(e * 64 + 11));
    EXPECT_EQ(expert.down_bias[5], static_cast<float>(e * 64 + 5 + 1000));
  }
  EXPECT_EQ(weights.router_bias[3], 4.0f);
  EXPECT_EQ(weights.selection_bias, nullptr);
}

template <class Id>
TestModel deepseek_v4_model(DType dtype, Id odd_id = 0) {
  TestModel m;
  m.config = {{"model_type", "deepseek_v4"},  {"num_experts_per_tok", 2}, {"num_hash_layers", 1},
              {"routed_scaling_factor", 1.5}, {"swiglu_limit", 10.0},     {"scoring_func", "sqrtsoftplus"}};
  add_each(m, kShape, "layers.0.ffn", kShortNames, add_deepseek_v4);
  add_each(m, kShape, "layers.1.ffn", kShortNames, add_deepseek_v4);
  for (std::size_t p = 0; p < 3; ++p) {
    add_dense(m, {1, 64, 48}, std::string("layers.0.ffn.shared_experts.") + kShortNames[p], 7, p);
  }
  m.tensors.push_back(
      tensor("layers.0.ffn.gate.tid2eid", dtype, {3, 2}, std::vector<Id>{0, 1, 2, 3, odd_id, 2}));
  m.tensors.push_back(tensor("layers.1.ffn.gate.bias", DType::kF32, {4}, std::vector<float>{1, 2, 3, 4}));
  return m;
}

TEST(LoadLayer, DeepSeekV4) {
  for (const bool wide : {true, false}) {
    const OpenModel model(wide ? deepseek_v4_model<std::int64_t>(DType::kI64)
                               : deepseek_v4_model<std::int32_t>(DType::kI32));
    const LayerWeights first = load(model, 0), second = load(model, 1);
    EXPECT_TRUE(first.config.router.hash_routed);
    EXPECT_FALSE(second.config.router.hash_routed);
    EXPECT_EQ(first.hash_rows, 3);
    EXPECT_EQ(first.hash_table[3], 3);
    EXPECT_EQ(first.config.router.scoring, Scoring::kSqrtSoftplus);
    EXPECT_EQ(first.config.router.scaling_factor, 1.5f);
    EXPECT_EQ(first.config.activation.kind, Activation::kSwiGluClamped);
    EXPECT_EQ(first.config.activation.limit, 10.0f);
    EXPECT_TRUE(first.shared.present);
    EXPECT_EQ(first.shared.activation.kind, Activation::kSwiGlu);
    expect_bf16(first.shared.weights.down, {1, 64, 48}, 7, 2);
    EXPECT_EQ(second.selection_bias[2], 3.0f);
    EXPECT_FALSE(second.shared.present);
  }
  for (const std::int64_t bad : {std::int64_t{-1}, std::int64_t{4}, std::int64_t{1} << 32}) {
    const OpenModel model(deepseek_v4_model<std::int64_t>(DType::kI64, bad));
    expect_error(ErrorCode::kInvalidFile, {"tid2eid", "token 2, slot 0", std::to_string(bad)},
                 [&] { load(model); });
  }
  TestModel without = deepseek_v4_model<std::int64_t>(DType::kI64);
  without.erase("layers.0.ffn.gate.tid2eid");
  const OpenModel model(without);
  expect_error(ErrorCode::kInvalidFile, {"layer 0", "table"}, [&] { load(model); });
}

TEST(LoadLayer, ANanInTheRouterIsRefused) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (const std::string name :
       {"layers.1.ffn.gate.bias", "layers.1.ffn.gate.weight", "layers.0.ffn.shared_expert_gate.weight"}) {
    TestModel m = deepseek_v4_model<std::int64_t>(DType::kI64);
    m.erase("layers.1.ffn.gate.bias");
    const bool bias = name.ends_with("bias"), shared = name.starts_with("layers.0");
    const std::int64_t rows = shared ? 1 : 4;
    const std::vector<std::int64_t> shape =
        bias ? std::vector<std::int64_t>{rows} : std::vector<std::int64_t>{rows, kShape.hidden};
    std::vector<float> values(static_cast<std::size_t>(bias ? rows : rows * kShape.hidden), 1.0f);
    m.tensors.push_back(tensor(name, DType::kF32, shape, values));
    load(OpenModel(m), shared ? 0 : 1);
    values.back() = nan;
    m.tensors.back() = tensor(name, DType::kF32, shape, values);
    const OpenModel model(m);
    expect_error(ErrorCode::kInvalidFile, {name, "1 NaN"}, [&] { load(model, shared ? 0 : 1); });
  }
}

// 29 binary orders within one matrix are more than E4M3 scales span.
TEST(LoadLayer, Mxfp4BeyondTheCastIsKeptExactly) {
  TestModel m = deepseek_v4_model<std::int64_t>(DType::kI64);
  m.at("layers.1.ffn.experts.2.w3.scale").bytes[0] = static_cast<char>(100);
  const LayerWeights weights = load(OpenModel(m), 1);
  const WeightMatrix& up = weights.experts[2].up;
  ASSERT_EQ(up.format, WeightFormat::kF32);
  for (std::int64_t c = 0; c < 32; ++c) {
    EXPECT_EQ(up.f32[c], std::ldexp(kCodeValues[code_of(2, 1, 0, c)], 100 - 127));
  }
  EXPECT_EQ(up.f32[32], mxfp4_expected(2, 1, 0, 32));
  EXPECT_TRUE(noted(weights, "1 MXFP4 matrices"));
  EXPECT_EQ(weights.experts[2].gate.format, WeightFormat::kNvfp4);
}

TEST(LoadLayer, ExpertsWithoutAGate) {
  TestModel m;
  m.config = {{"model_type", "nemotron_h"},
              {"mlp_hidden_act", "relu2"},
              {"num_experts_per_tok", 2},
              {"hidden_act", "silu"},
              {"n_group", 1},
              {"topk_group", 1}};
  add_each(m, kShape, "backbone.layers.1.mixer", kLongNames, add_dense, 1);
  const LayerWeights weights = load(OpenModel(m));
  EXPECT_EQ(weights.config.activation.kind, Activation::kRelu2);
  EXPECT_EQ(weights.config.router.scoring, Scoring::kSigmoid);
  EXPECT_EQ(weights.experts[3].gate.rows, 0);
  expect_bf16(weights.experts[3].up, kShape, 3, 1);
  m.config["mlp_hidden_act"] = "silu";
  const OpenModel gateless(m);
  expect_error(ErrorCode::kUnsupported, {"swiglu", "gate", "backbone.layers.1.mixer"},
               [&] { load(gateless); });
}

TEST(LoadLayer, SharedExpertWithItsGate) {
  TestModel m = nvfp4_model();
  for (std::size_t p = 0; p < 3; ++p) {
    add_modelopt(m, {1, 64, 48}, kPrefix + ".shared_expert." + kLongNames[p], 1, p);
  }
  std::vector<std::uint16_t> gate;
  for (int i = 0; i < 64; ++i) gate.push_back(bf16_bits(static_cast<float>(i)));
  m.tensors.push_back(tensor(kPrefix + ".shared_expert_gate.weight", DType::kBF16, {1, 64}, gate));
  const LayerWeights weights = load(OpenModel(m));
  ASSERT_TRUE(weights.shared.present);
  expect_nvfp4(weights.shared.weights.up, {1, 64, 48}, 1, 1);
  ASSERT_NE(weights.shared.gate, nullptr);
  EXPECT_EQ(weights.shared.gate[63], 63.0f);
}

TEST(LoadLayer, TheConfigTellsRouterAndActivation) {
  TestModel m = nvfp4_model();
  m.config["scoring_func"] = "sigmoid";
  m.config["norm_topk_prob"] = false;
  m.config["n_group"] = 2;
  m.config["topk_group"] = 1;
  m.config["routed_scaling_factor"] = 2.5;
  m.config["swiglu_limit"] = 3.0;
  const OpenModel model(m);
  const LayerConfig config = layer_config(model.index(), model.layer());
  EXPECT_EQ(config.router.scoring, Scoring::kSigmoid);
  EXPECT_FALSE(config.router.renormalize);
  EXPECT_EQ(config.router.num_groups, 2);
  EXPECT_EQ(config.router.scaling_factor, 2.5f);
  EXPECT_EQ(config.activation.kind, Activation::kSwiGluClamped);
  EXPECT_EQ(config.activation.limit, 3.0f);
}

TEST(LoadLayer, WhatCannotRunIsRefused) {
  const auto refuse = [](const char* key, const nlohmann::json& value, ErrorCode code,
                         const std::vector<std::string>& parts) {
    TestModel m = nvfp4_model();
    m.config[key] = value;
    const OpenModel model(m);
    expect_error(code, parts, [&] { load(model); });
  };
  refuse("scoring_func", "tea leaves", ErrorCode::kUnsupported, {"tea leaves"});
  refuse("hidden_act", "gelu", ErrorCode::kUnsupported, {"gelu"});
  refuse("swiglu_limits", {1, 2}, ErrorCode::kUnsupported, {"swiglu_limits"});
  refuse("model_type", "llama4_text", ErrorCode::kUnsupported, {"llama4_text"});
  refuse("num_experts_per_tok", nullptr, ErrorCode::kInvalidFile, {"num_experts_per_tok"});
  refuse("num_experts_per_tok", 5, ErrorCode::kInvalidArgument, {"5", "4"});
}

}  // namespace
}  // namespace megamoe
