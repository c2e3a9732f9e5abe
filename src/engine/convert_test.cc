#include "engine/convert.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>

#include "checkpoint/expert_matrix.h"
#include "engine/input_scales.h"
#include "engine/quantize_checkpoint.h"
#include "engine/test_models.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::expect_error;
using testing::kExperts;
using testing::kHidden;
using testing::kIntermediate;
using testing::Layout;
using testing::read_bytes;
using testing::read_json;
using testing::TempDir;
using testing::tensor;
using testing::TestTensor;
using testing::write_model;

std::string bytes_of(const TensorRef& tensor) {
  const auto bytes = tensor.bytes();
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

float float_of(const TensorRef& tensor) {
  float value;
  EXPECT_EQ(tensor.info->bytes(), 4);
  std::memcpy(&value, tensor.bytes().data(), 4);
  return value;
}

std::int64_t ulps_apart(float a, float b) {
  return std::abs(static_cast<std::int64_t>(std::bit_cast<std::int32_t>(a)) -
                  static_cast<std::int64_t>(std::bit_cast<std::int32_t>(b)));
}

ConvertOptions to(Family family) {
  ConvertOptions options;
  options.to = family;
  return options;
}

// A ModelOpt file with static scales, from quantize.
void write_modelopt(const TempDir& dir, const fs::path& name) {
  write_model(dir / "dense", 1, Layout::kPerExpert, true);
  InputScales scales;
  for (int e = 0; e < kExperts; ++e) {
    const float s = 0.013f * static_cast<float>(e + 1);
    scales.layers[0].push_back({1, {2688.0f * s, s}, {2688.0f * s / 7.0f, s / 7.0f}});
  }
  write_input_scales(dir / "scales.json", scales);
  QuantizeCheckpointOptions options;
  options.activations = ActivationScales::kStatic;
  options.scales = dir / "scales.json";
  options.gate_up_scale = GateUpScale::kSeparate;
  quantize_checkpoint(dir / "dense", dir / name, options);
}

TEST(Convert, ModelOptToCompressedTensorsAndBack) {
  const TempDir dir;
  write_modelopt(dir, "mo");
  const RewriteReport report = convert_checkpoint(dir / "mo", dir / "ct", to(Family::kCompressedTensors));
  EXPECT_EQ(report.quantized_linears, 3 * kExperts);
  EXPECT_EQ(report.consumed_tensors, 4 * 3 * kExperts);
  EXPECT_EQ(report.inexact_blocks, 0);
  ASSERT_EQ(report.notes.empty(), false);  // gate and up differ
  convert_checkpoint(dir / "ct", dir / "back", to(Family::kModelOpt));

  const auto mo = Checkpoint::open(dir / "mo"), ct = Checkpoint::open(dir / "ct"),
             back = Checkpoint::open(dir / "back");
  EXPECT_EQ(mo->tensors().size(), ct->tensors().size());
  EXPECT_EQ(mo->tensors().size(), back->tensors().size());
  std::int64_t scalars = 0;
  for (const TensorRef& before : mo->tensors()) {
    const std::string& name = before.info->name;
    const TensorRef& after = back->at(name);
    EXPECT_EQ(describe(*after.info), describe(*before.info));
    if (name.ends_with("_scale_2") || name.ends_with("input_scale")) {
      EXPECT_LE(ulps_apart(float_of(before), float_of(after)), 1) << name;
      const bool input = name.ends_with("input_scale");
      const std::string module = name.substr(0, name.rfind('.'));
      const TensorRef& inverse = ct->at(module + (input ? ".input_global_scale" : ".weight_global_scale"));
      EXPECT_EQ(float_of(inverse), 1.0f / float_of(before)) << name;
      EXPECT_EQ(describe(*inverse.info), "F32 [1]");
      ++scalars;
    } else {
      EXPECT_EQ(bytes_of(after), bytes_of(before)) << name;
      const bool codes = before.info->dtype == DType::kU8;
      EXPECT_EQ(bytes_of(ct->at(codes ? name + "_packed" : name)), bytes_of(before)) << name;
    }
  }
  EXPECT_EQ(scalars, 2 * 3 * kExperts);

  const json config = read_json(dir / "ct/config.json")["quantization_config"];
  EXPECT_EQ(config["quant_method"], "compressed-tensors");
  EXPECT_EQ(config["config_groups"]["group_0"]["input_activations"]["dynamic"], "local");
  EXPECT_FALSE(fs::exists(dir / "ct/hf_quant_config.json"));
  EXPECT_EQ(read_json(dir / "back/config.json"), read_json(dir / "mo/config.json"));
  EXPECT_EQ(read_json(dir / "back/hf_quant_config.json"), read_json(dir / "mo/hf_quant_config.json"));
  for (const char* name : {"ct", "back"}) {
    const ModelIndex model = index_model(Checkpoint::open(dir / name));
    EXPECT_EQ(model.layers[0].num_experts, kExperts);
  }
}

TEST(Convert, KeepsSayingWeightOnlyOrDynamic) {
  for (const auto activations : {ActivationScales::kNone, ActivationScales::kDynamic}) {
    const TempDir dir;
    write_model(dir / "src", 1, Layout::kPerExpert);
    QuantizeCheckpointOptions options;
    options.activations = activations;
    quantize_checkpoint(dir / "src", dir / "mo", options);
    convert_checkpoint(dir / "mo", dir / "ct", to(Family::kCompressedTensors));
    convert_checkpoint(dir / "ct", dir / "back", to(Family::kModelOpt));
    EXPECT_EQ(read_json(dir / "back/config.json"), read_json(dir / "mo/config.json"));
    const json group = read_json(dir / "ct/config.json")["quantization_config"]["config_groups"]["group_0"];
    EXPECT_EQ(group["input_activations"].is_null(), activations == ActivationScales::kNone);
  }
}

TEST(Convert, LinearsOutsideTheExpertsComeAlong) {
  const TempDir dir;
  write_model(dir / "dense", 1, Layout::kPerExpert);
  quantize_checkpoint(dir / "dense", dir / "mo", {});
  std::vector<TestTensor> tensors;
  const auto mo = Checkpoint::open(dir / "mo");
  const std::string q = "model.layers.0.self_attn.q_proj";
  for (const TensorRef& t : mo->tensors()) {
    if (t.info->name != q + ".weight") {
      tensors.push_back({t.info->name, t.info->dtype, t.info->shape, bytes_of(t)});
    }
  }
  tensors.push_back(tensor(q + ".weight", DType::kU8, {kHidden, kHidden / 2},
                           std::vector<std::uint8_t>(kHidden * kHidden / 2, 0x21)));
  tensors.push_back(tensor(q + ".weight_scale", DType::kE4M3, {kHidden, kHidden / 16},
                           std::vector<std::uint8_t>(kHidden * kHidden / 16, 0x38)));
  tensors.push_back(tensor(q + ".weight_scale_2", DType::kF32, {}, std::vector<float>{0.25f}));
  fs::create_directory(dir / "all");
  testing::write_safetensors(dir / "all/model.safetensors", tensors);
  json config = read_json(dir / "mo/config.json");
  config["quantization_config"]["ignore"] = {"lm_head", "model.layers.0.mlp.gate"};
  testing::write_bytes(dir / "all/config.json", config.dump());

  const RewriteReport report = convert_checkpoint(dir / "all", dir / "ct", to(Family::kCompressedTensors));
  EXPECT_EQ(report.quantized_linears, 3 * kExperts + 1);
  const auto ct = Checkpoint::open(dir / "ct");
  EXPECT_EQ(float_of(ct->at(q + ".weight_global_scale")), 4.0f);
  EXPECT_EQ(ct->at(q + ".weight_packed").info->shape, (std::vector<std::int64_t>{kHidden, kHidden / 2}));
  EXPECT_EQ(ct->find(q + ".weight"), nullptr);
  const json ignored = read_json(dir / "ct/config.json")["quantization_config"]["ignore"];
  EXPECT_EQ(ignored, json({"lm_head", "model.layers.0.mlp.gate"}));
}

TEST(Convert, AScaleWithoutANumberIsRefused) {
  const TempDir dir;
  write_model(dir / "dense", 1, Layout::kPerExpert);
  quantize_checkpoint(dir / "dense", dir / "mo", {});
  std::vector<TestTensor> tensors;
  const auto mo = Checkpoint::open(dir / "mo");
  for (const TensorRef& t : mo->tensors()) {
    tensors.push_back({t.info->name, t.info->dtype, t.info->shape, bytes_of(t)});
  }
  tensors.push_back(tensor("head.weight", DType::kU8, {16, 8}, std::vector<std::uint8_t>(128, 0x21)));
  tensors.push_back(tensor("head.weight_scale", DType::kE4M3, {16, 1}, std::vector<std::uint8_t>(16, 0x38)));
  tensors.push_back(tensor("head.weight_scale_2", DType::kF32, {0}, std::vector<float>{}));
  fs::create_directory(dir / "all");
  testing::write_safetensors(dir / "all/model.safetensors", tensors);
  fs::copy_file(dir / "mo/config.json", dir / "all/config.json");
  expect_error(ErrorCode::kInvalidFile, {"head.weight_scale_2", "got none"},
               [&] { convert_checkpoint(dir / "all", dir / "ct", to(Family::kCompressedTensors)); });
}

TEST(Convert, NothingToConvertIsAnError) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  expect_error(ErrorCode::kInvalidArgument, {"quantised instead"},
               [&] { convert_checkpoint(dir / "src", dir / "x", to(Family::kModelOpt)); });
  quantize_checkpoint(dir / "src", dir / "mo", {});
  expect_error(ErrorCode::kInvalidArgument, {"another family than modelopt"},
               [&] { convert_checkpoint(dir / "mo", dir / "x", to(Family::kModelOpt)); });
  expect_error(ErrorCode::kInvalidArgument, {"not as gpt-oss"},
               [&] { convert_checkpoint(dir / "mo", dir / "x", to(Family::kGptOss)); });
  EXPECT_FALSE(fs::exists(dir / "x"));
}

// DeepSeek-V4's layout, H = 64, I = 32, 3 experts. Exponents of w1 lie 2 below those of w3. The first block
// of expert 1's w2 lies 18 below the rest: too far for E4M3.
struct Mxfp4Model {
  static constexpr std::int64_t kH = 64, kI = 32, kE = 3;
  static std::uint8_t exponent(std::int64_t e, int w, std::int64_t block) {
    const int base = 120 + static_cast<int>(e) - (w == 1 ? 2 : 0);
    return static_cast<std::uint8_t>(w == 2 && e == 1 && block == 0 ? base - 18 : base - block % 3);
  }
  static std::vector<TestTensor> tensors() {
    std::vector<TestTensor> all;
    for (std::int64_t e = 0; e < kE; ++e) {
      for (int w = 1; w <= 3; ++w) {
        const std::int64_t rows = w == 2 ? kH : kI, cols = w == 2 ? kI : kH;
        std::vector<std::uint8_t> codes, scales;
        for (std::int64_t i = 0; i < rows * cols / 2; ++i) {
          codes.push_back(static_cast<std::uint8_t>(i * 37 + e * 11 + w));
        }
        for (std::int64_t i = 0; i < rows * cols / 32; ++i) scales.push_back(exponent(e, w, i));
        const std::string module = fmt::format("layers.0.ffn.experts.{}.w{}", e, w);
        all.push_back(tensor(module + ".weight", DType::kI8, {rows, cols / 2}, codes));
        all.push_back(tensor(module + ".scale", DType::kE8M0, {rows, cols / 32}, scales));
      }
    }
    all.push_back(
        tensor("layers.0.ffn.gate.weight", DType::kBF16, {kE, kH}, testing::random_bf16(1, kE * kH)));
    return all;
  }
};

TEST(Convert, Mxfp4IsCastWithoutTouchingACode) {
  using M = Mxfp4Model;
  for (const auto gate_up : {GateUpScale::kShared, GateUpScale::kSeparate}) {
    for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
      const TempDir dir;
      testing::write_safetensors(dir / "src.safetensors", M::tensors());
      ConvertOptions options = to(family);
      options.gate_up_scale = gate_up;
      const RewriteReport report =
          convert_checkpoint(dir / "src.safetensors", dir / "out.safetensors", options);
      EXPECT_EQ(report.quantized_linears, 3 * M::kE);
      EXPECT_EQ(report.consumed_tensors, 6 * M::kE);
      EXPECT_EQ(report.inexact_blocks, 1);
      const ModelIndex before = index_model(Checkpoint::open(dir / "src.safetensors"));
      const ModelIndex after = index_model(Checkpoint::open(dir / "out.safetensors"));
      for (std::size_t e = 0; e < M::kE; ++e) {
        for (std::size_t p = 0; p < 3; ++p) {
          const ExpertMatrix& m = *after.layers[0].experts[e][p];
          const std::vector<float> expected = read_f32(*before.layers[0].experts[e][p]), got = read_f32(m);
          ASSERT_EQ(got.size(), expected.size());
          const bool inexact = e == 1 && p == 2;  // its first block may have lost something
          EXPECT_TRUE(
              std::equal(got.begin() + (inexact ? 32 : 0), got.end(), expected.begin() + (inexact ? 32 : 0)))
              << e << " " << p;
        }
        const float gate = read_nvfp4(*after.layers[0].experts[e][0]).tensor_scale;
        const float up = read_nvfp4(*after.layers[0].experts[e][1]).tensor_scale;
        EXPECT_EQ(up, std::exp2(static_cast<float>(e) - 15.0f));  // 120 + e - 127 - 8
        EXPECT_EQ(gate, gate_up == GateUpScale::kShared ? up : up / 4.0f);
      }
    }
  }
}

// gpt-oss: blocks and scales of all experts, gate and up in alternating rows, biases.
TEST(Convert, GptOssIsSplitIntoLinears) {
  constexpr std::int64_t kE = 12, kH = 64, kI = 32;
  std::vector<TestTensor> tensors;
  const std::string prefix = "model.layers.0.mlp.";
  const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
    std::vector<std::uint8_t> codes, scales;
    for (std::int64_t i = 0; i < kE * rows * cols / 2; ++i)
      codes.push_back(static_cast<std::uint8_t>(i % 251));
    for (std::int64_t i = 0; i < kE * rows * cols / 32; ++i) {
      scales.push_back(static_cast<std::uint8_t>(110 + i % 7));
    }
    tensors.push_back(
        tensor(prefix + "experts." + name + "_blocks", DType::kU8, {kE, rows, cols / 32, 16}, codes));
    tensors.push_back(
        tensor(prefix + "experts." + name + "_scales", DType::kU8, {kE, rows, cols / 32}, scales));
    tensors.push_back(tensor(prefix + "experts." + name + "_bias", DType::kBF16, {kE, rows},
                             testing::random_bf16(static_cast<std::uint64_t>(rows), kE * rows)));
  };
  add("gate_up_proj", 2 * kI, kH);
  add("down_proj", kH, kI);
  tensors.push_back(
      tensor(prefix + "router.weight", DType::kBF16, {kE, kH}, testing::random_bf16(3, kE * kH)));
  tensors.push_back(tensor(prefix + "router.bias", DType::kBF16, {kE}, testing::random_bf16(4, kE)));
  const TempDir dir;
  fs::create_directory(dir / "src");
  testing::write_safetensors(dir / "src/model.safetensors", tensors);
  const json config = {
      {"model_type", "gpt_oss"},
      {"hidden_size", kH},
      {"intermediate_size", kI},
      {"num_local_experts", kE},
      {"num_experts_per_tok", 4},
      {"num_hidden_layers", 1},
      {"quantization_config",
       {{"quant_method", "mxfp4"}, {"modules_to_not_convert", {"model.layers.*.mlp.router"}}}}};
  testing::write_bytes(dir / "src/config.json", config.dump());

  for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
    const fs::path out = dir / to_string(family);
    const RewriteReport report = convert_checkpoint(dir / "src", out, to(family));
    EXPECT_EQ(report.inexact_blocks, 0);
    EXPECT_EQ(report.consumed_tensors, 6);
    EXPECT_EQ(report.written_tensors, 2 + kE * 3 * 4);
    const ModelIndex before = index_model(Checkpoint::open(dir / "src"));
    const ModelIndex after = index_model(Checkpoint::open(out));
    for (std::size_t e = 0; e < kE; ++e) {
      for (std::size_t p = 0; p < 3; ++p) {
        const ExpertMatrix &a = *before.layers[0].experts[e][p], &b = *after.layers[0].experts[e][p];
        EXPECT_EQ(read_f32(a), read_f32(b)) << e << " " << p;
        EXPECT_EQ(read_bias(a), read_bias(b)) << e << " " << p;
        EXPECT_EQ(read_bias(b).size(), static_cast<std::size_t>(b.rows));
      }
    }
  }
}

// Fused ModelOpt tensors under `prefix`, of which down is plain where `plain_down` is set.
std::vector<TestTensor> fused_modelopt(const std::string& prefix, bool plain_down) {
  constexpr std::int64_t kE = 2, kH = 64, kI = 48;
  std::vector<TestTensor> tensors;
  const auto add = [&](const std::string& name, std::int64_t rows, std::int64_t cols) {
    const auto count = static_cast<std::size_t>(kE * rows * cols);
    tensors.push_back(
        tensor(name, DType::kU8, {kE, rows, cols / 2}, std::vector<std::uint8_t>(count / 2, 0x21)));
    tensors.push_back(tensor(name + "_weight_scale", DType::kE4M3, {kE, rows, cols / 16},
                             std::vector<std::uint8_t>(count / 16, 0x38)));
    tensors.push_back(tensor(name + "_weight_scale_2", DType::kF32, {}, std::vector<float>{0.5f}));
  };
  add(prefix + "experts.gate_up_proj", 2 * kI, kH);
  if (plain_down) {
    tensors.push_back(tensor(prefix + "experts.down_proj", DType::kBF16, {kE, kH, kI},
                             testing::random_bf16(1, kE * kH * kI)));
  } else {
    add(prefix + "experts.down_proj", kH, kI);
  }
  return tensors;
}

TEST(Convert, FusedTensorsWithoutAPrefixKeepNone) {
  const TempDir dir;
  for (const std::string prefix : {"", "model.layers.0.mlp."}) {
    testing::write_safetensors(dir / "src.safetensors", fused_modelopt(prefix, false));
    ConvertOptions options = to(Family::kCompressedTensors);
    options.overwrite = true;
    convert_checkpoint(dir / "src.safetensors", dir / "out.safetensors", options);
    const ModelIndex before = index_model(Checkpoint::open(dir / "src.safetensors"));
    const ModelIndex after = index_model(Checkpoint::open(dir / "out.safetensors"));
    EXPECT_NE(after.checkpoint->find(prefix + "experts.1.up_proj.weight_packed"), nullptr);
    ASSERT_EQ(after.layers.size(), 1u);
    EXPECT_EQ(after.layers[0].prefix, before.layers[0].prefix);
    for (std::size_t p = 0; p < 3; ++p) {
      EXPECT_EQ(read_f32(*after.layers[0].experts[1][p]), read_f32(*before.layers[0].experts[1][p]));
    }
  }
}

// One split into linears and the other left whole: no reader takes both in one layer.
TEST(Convert, FusedTensorsOfWhichOneIsPlainAreRefused) {
  const TempDir dir;
  testing::write_safetensors(dir / "src.safetensors", fused_modelopt("layers.0.", true));
  expect_error(ErrorCode::kUnsupported,
               {"layers.0.experts.down_proj is dense", "layers.0.experts.gate_up_proj is FP4"}, [&] {
                 convert_checkpoint(dir / "src.safetensors", dir / "out", to(Family::kCompressedTensors));
               });
  EXPECT_FALSE(fs::exists(dir / "out") || fs::exists(dir / "out.partial"));
}

}  // namespace
}  // namespace megamoe
