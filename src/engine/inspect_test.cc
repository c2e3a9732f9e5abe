#include "engine/inspect.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstring>
#include <fstream>
#include <limits>
#include <tuple>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

using testing::tensor;
using testing::TestTensor;

constexpr std::int64_t kHidden = 32, kIntermediate = 16;

// One layer of two ModelOpt experts: codes 2 (1.0), block scales 1.0, tensor scale 0.5, input scale 0.25.
std::vector<TestTensor> modelopt_layer() {
  std::vector<TestTensor> out;
  for (int e = 0; e < 2; ++e) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      const bool down = std::string(name) == "down_proj";
      const std::int64_t rows = down ? kHidden : kIntermediate, cols = down ? kIntermediate : kHidden;
      const std::string prefix = fmt::format("model.layers.0.mlp.experts.{}.{}.", e, name);
      const auto count = static_cast<std::size_t>(rows * cols);
      out.push_back(tensor(prefix + "weight", DType::kU8, {rows, cols / 2},
                           std::vector<std::uint8_t>(count / 2, 0x22)));
      out.push_back(tensor(prefix + "weight_scale", DType::kE4M3, {rows, cols / 16},
                           std::vector<std::uint8_t>(count / 16, 0x38)));
      out.push_back(tensor(prefix + "weight_scale_2", DType::kF32, {}, std::vector<float>{0.5f}));
      out.push_back(tensor(prefix + "input_scale", DType::kF32, {}, std::vector<float>{0.25f}));
    }
  }
  return out;
}

class InspectTest : public ::testing::Test {
 protected:
  TestTensor& at(const std::string& suffix) {
    for (TestTensor& t : tensors_) {
      if (t.name == "model.layers.0.mlp.experts." + suffix) return t;
    }
    throw std::runtime_error("no " + suffix);
  }
  void remove(const std::string& suffix) {
    const std::string name = at(suffix).name;
    std::erase_if(tensors_, [&](const TestTensor& t) { return t.name == name; });
  }
  void set(const std::string& suffix, float value) {
    std::memcpy(at(suffix).bytes.data(), &value, sizeof(value));
  }

  Inspection inspection(const InspectOptions& options = {}) {
    testing::write_safetensors(dir_ / "model.safetensors", tensors_);
    model_ = index_model(Checkpoint::open(dir_.path()));
    return inspect(model_, options);
  }
  // The finding that holds `text`; its severity, or "" where there is none.
  static std::string severity_of(const Inspection& inspection, const std::string& text) {
    for (const Finding& finding : inspection.findings) {
      if (finding.text.find(text) != std::string::npos) return std::string(to_string(finding.severity));
    }
    return "";
  }

  std::vector<TestTensor> tensors_ = modelopt_layer();
  testing::TempDir dir_;
  ModelIndex model_;
};

TEST_F(InspectTest, DescribesAHealthyLayer) {
  const Inspection found = inspection();
  ASSERT_EQ(found.layers.size(), 1u);
  const LayerInspection& layer = found.layers[0];
  EXPECT_EQ(layer.num_experts, 2);
  EXPECT_EQ(layer.hidden, kHidden);
  EXPECT_EQ(layer.intermediate, kIntermediate);
  EXPECT_EQ(layer.encodings, std::vector<std::string>{"nvfp4"});
  EXPECT_EQ(layer.matrices, 6);
  EXPECT_EQ(layer.input_scales, 6);
  EXPECT_EQ(layer.min_tensor_scale, 0.5);
  EXPECT_EQ(layer.max_tensor_scale, 0.5);
  EXPECT_EQ(layer.bits_per_weight(), 4.5);  // 4 of the code, 8 / 16 of the block scale
  EXPECT_EQ(layer.bytes, 6 * kHidden * kIntermediate * 9 / 16);
  EXPECT_EQ(found.expert_bytes, layer.bytes);
  EXPECT_EQ(layer.unequal_gate_up, 0);
  const MatrixInspection& matrix = layer.experts[1].projections[2].value();
  EXPECT_EQ(matrix.rows, kHidden);
  EXPECT_EQ(matrix.input_scale, 0.25);
  EXPECT_EQ(matrix.scales, kHidden * kIntermediate / 16);
  EXPECT_FALSE(matrix.all_zero);
  for (const Finding& finding : found.findings) EXPECT_EQ(finding.severity, Severity::kNote) << finding.text;
}

TEST_F(InspectTest, CountsFaultsOfBlockScalesAndStillReports) {
  std::string& scales = at("1.up_proj.weight_scale").bytes;
  scales[0] = static_cast<char>(0x7F);  // NaN
  scales[1] = static_cast<char>(0xFF);  // NaN too
  scales[2] = static_cast<char>(0xB8);  // -1
  scales[3] = 0;
  for (std::size_t i = 4; i < 12; ++i) scales[i] = static_cast<char>(0x7E);  // 448
  const Inspection found = inspection();
  const MatrixInspection& matrix = found.layers.at(0).experts[1].projections[1].value();
  EXPECT_EQ(matrix.nan_scales, 2);
  EXPECT_EQ(matrix.negative_scales, 1);
  EXPECT_EQ(matrix.zero_scales, 1);
  EXPECT_EQ(matrix.saturated_scales, 8);
  EXPECT_EQ(severity_of(found, "2 block scales that are not finite in expert 1 up"), "error");
  EXPECT_EQ(severity_of(found, "1 negative block scales in expert 1 up"), "error");
  EXPECT_EQ(severity_of(found, "8 saturated block scales"), "warning");
  EXPECT_EQ(found.findings.front().severity, Severity::kError);  // worst first
}

// The reader takes a scale of -0 for one of 0.
TEST_F(InspectTest, CountsAScaleOfMinusZeroAsZero) {
  at("0.up_proj.weight_scale").bytes[5] = static_cast<char>(0x80);
  const Inspection found = inspection();
  const MatrixInspection& matrix = found.layers.at(0).experts[0].projections[1].value();
  EXPECT_EQ(matrix.negative_scales, 0);
  EXPECT_EQ(matrix.zero_scales, 1);
  EXPECT_EQ(severity_of(found, "1 block scales of zero in expert 0 up"), "warning");
}

TEST_F(InspectTest, FindsNansInTheRouter) {
  constexpr float kNan = std::numeric_limits<float>::quiet_NaN(),
                  kInfinity = std::numeric_limits<float>::infinity();
  const std::string gate = "model.layers.0.mlp.gate.";
  tensors_.push_back(
      tensor(gate + "weight", DType::kF32, {2, kHidden}, std::vector<float>(2 * kHidden, 1.0f)));
  tensors_.push_back(
      tensor(gate + "e_score_correction_bias", DType::kF32, {2}, std::vector<float>{0.5f, -kInfinity}));
  EXPECT_EQ(severity_of(inspection(), "NaN"), "");
  tensors_.back() =
      tensor(gate + "e_score_correction_bias", DType::kF32, {2}, std::vector<float>{0.5f, kNan});
  EXPECT_EQ(severity_of(inspection(), "1 NaN in " + gate + "e_score_correction_bias"), "error");
}

TEST_F(InspectTest, FindsBiasesThatAreNotFinite) {
  std::vector<float> bias(kIntermediate, 1.0f);
  bias[7] = std::numeric_limits<float>::infinity();
  tensors_.push_back(
      tensor("model.layers.0.mlp.experts.1.gate_proj.bias", DType::kF32, {kIntermediate}, bias));
  EXPECT_EQ(severity_of(inspection(), "1 weights or biases that are not finite in expert 1 gate"), "error");
}

TEST_F(InspectTest, ComparesTensorScalesOfGateAndUp) {
  set("0.up_proj.weight_scale_2", 2.0f);
  const Inspection found = inspection();
  EXPECT_EQ(found.layers[0].unequal_gate_up, 1);
  EXPECT_EQ(found.layers[0].max_gate_up_ratio, 4);
  EXPECT_EQ(
      severity_of(found, "gate and up have different tensor scales in 1 of 2 experts, by up to 4 times"),
      "note");
}

TEST_F(InspectTest, FindsBadTensorAndInputScales) {
  set("0.gate_proj.weight_scale_2", std::numeric_limits<float>::quiet_NaN());
  set("1.gate_proj.weight_scale_2", 0.0f);
  set("1.down_proj.input_scale", -1.0f);
  const Inspection found = inspection();
  EXPECT_EQ(
      severity_of(found,
                  "2 tensor scales that are not finite and positive in 2 matrices, the first expert 0 gate"),
      "error");
  EXPECT_EQ(severity_of(found, "1 input scales that are not finite and positive in expert 1 down"), "error");
}

TEST_F(InspectTest, TellsAZeroMatrixFromAllOthers) {
  at("0.down_proj.weight")
      .bytes.assign(at("0.down_proj.weight").bytes.size(), static_cast<char>(0x80));  // -0 and 0
  const Inspection found = inspection();
  EXPECT_TRUE(found.layers[0].experts[0].projections[2]->all_zero);
  EXPECT_FALSE(found.layers[0].experts[1].projections[2]->all_zero);
  EXPECT_EQ(severity_of(found, "nothing but zeros: in expert 0 down"), "warning");
}

TEST_F(InspectTest, ReadsPackedTypesByteByByte) {
  TestTensor& weight = at("0.up_proj.weight");
  weight.dtype = DType::kF4;
  weight.shape[1] *= 2;
  weight.bytes[0] = 0;
  EXPECT_FALSE(inspection().layers[0].experts[0].projections[1]->all_zero);
  weight.bytes.assign(weight.bytes.size(), 0);
  EXPECT_TRUE(inspection().layers[0].experts[0].projections[1]->all_zero);
}

TEST_F(InspectTest, TakesAllInputScalesMissingForWeightOnly) {
  std::erase_if(tensors_, [](const TestTensor& t) { return t.name.ends_with("input_scale"); });
  const Inspection found = inspection();
  EXPECT_EQ(found.layers[0].input_scales, 0);
  EXPECT_EQ(severity_of(found, "no input scales"), "note");
}

// Some input scales missing is the one fault that leaves no checkpoint to inspect.
TEST_F(InspectTest, NamesTheInputScaleThatIsMissing) {
  remove("1.down_proj.input_scale");
  testing::expect_error(ErrorCode::kInvalidFile, {"experts.1.down_proj.input_scale"}, [&] { inspection(); });
}

TEST_F(InspectTest, RefusesALayerThatIsNotThere) { EXPECT_THROW(inspection({.layer = 7}), Error); }

// What is not finite among dense values is looked for only where it is asked for.
TEST(Inspect, CountsDenseValuesThatAreNotFinite) {
  std::vector<TestTensor> tensors;
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    const bool down = std::string(name) == "down_proj";
    std::vector<float> values(16 * 32, 1.0f);
    if (down)
      values[100] = std::numeric_limits<float>::infinity(),
      values[511] = std::numeric_limits<float>::quiet_NaN();
    const std::vector<std::int64_t> shape =
        down ? std::vector<std::int64_t>{32, 16} : std::vector<std::int64_t>{16, 32};
    tensors.push_back(
        tensor(fmt::format("model.layers.3.mlp.experts.0.{}.weight", name), DType::kF32, shape, values));
  }
  const testing::TempDir dir;
  testing::write_safetensors(dir / "model.safetensors", tensors);
  const ModelIndex model = index_model(Checkpoint::open(dir.path()));
  EXPECT_EQ(inspect(model).layers.at(0).experts[0].projections[2]->nonfinite_values, 0);
  const Inspection found = inspect(model, {.values = true, .layer = 3});
  EXPECT_EQ(found.layers.at(0).experts[0].projections[2]->nonfinite_values, 2);
  EXPECT_EQ(found.layers[0].bits_per_weight(), 32);
  EXPECT_EQ(found.layers[0].encodings, std::vector<std::string>{"F32"});
}

// A layer beyond the model's, for predicting several tokens, is one that can be asked for.
TEST(Inspect, DescribesALayerForPredictingSeveralTokens) {
  std::vector<TestTensor> tensors;
  for (int layer = 0; layer < 2; ++layer) {
    for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
      tensors.push_back(tensor(fmt::format("model.layers.{}.mlp.experts.0.{}.weight", layer, name),
                               DType::kF32, {16, 16}, std::vector<float>(256, 1.0f)));
    }
  }
  const testing::TempDir dir;
  testing::write_safetensors(dir / "model.safetensors", tensors);
  std::ofstream(dir / "config.json") << R"({"model_type": "qwen3_moe", "num_hidden_layers": 1})";
  const ModelIndex model = index_model(Checkpoint::open(dir.path()));
  const Inspection found = inspect(model, {.layer = 1});
  ASSERT_EQ(found.layers.size(), 1u);
  EXPECT_TRUE(found.layers[0].mtp);
}

// FP8 experts in one tensor may have one scale for all, in whichever shape.
TEST(Inspect, ReadsTheOnlyScaleOfFusedExperts) {
  for (const std::vector<std::int64_t>& shape : {std::vector<std::int64_t>{}, {1}}) {
    std::vector<TestTensor> tensors;
    for (const auto& [name, rows, cols] : {std::tuple{"gate_up_proj", 64, 16}, {"down_proj", 16, 32}}) {
      const std::string experts = "model.layers.0.mlp.experts.";
      tensors.push_back(tensor(experts + name, DType::kE4M3, {3, rows, cols},
                               std::vector<std::uint8_t>(static_cast<std::size_t>(3 * rows * cols), 0x38)));
      tensors.push_back(
          tensor(experts + name + "_weight_scale", DType::kF32, shape, std::vector<float>{0.25f}));
    }
    const testing::TempDir dir;
    testing::write_safetensors(dir / "model.safetensors", tensors);
    const ModelIndex model = index_model(Checkpoint::open(dir.path()));
    const Inspection found = inspect(model);
    for (const ExpertInspection& expert : found.layers.at(0).experts) {
      for (const auto& projection : expert.projections) {
        EXPECT_EQ(projection->scales, 1);
        EXPECT_EQ(projection->negative_scales + projection->zero_scales + projection->nan_scales, 0);
      }
    }
  }
}

}  // namespace
}  // namespace megamoe
