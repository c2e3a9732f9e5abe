#include "engine/verify.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

using testing::tensor;
using testing::TestTensor;

// An F32 layer of `experts` experts, H 32 and I 16; every weight is `value`, but those of expert 1 up.
std::vector<TestTensor> dense_layer(int experts, float value, float value_of_1_up) {
  std::vector<TestTensor> out;
  for (int e = 0; e < experts; ++e) {
    for (const std::string name : {"gate_proj", "up_proj", "down_proj"}) {
      const std::vector<std::int64_t> shape =
          name == "down_proj" ? std::vector<std::int64_t>{32, 16} : std::vector<std::int64_t>{16, 32};
      out.push_back(tensor(fmt::format("model.layers.0.mlp.experts.{}.{}.weight", e, name), DType::kF32,
                           shape,
                           std::vector<float>(512, e == 1 && name == "up_proj" ? value_of_1_up : value)));
    }
  }
  out.push_back(tensor("model.norm.weight", DType::kF32, {2}, std::vector<float>{1, 2}));
  return out;
}

class VerifyTest : public ::testing::Test {
 protected:
  ModelIndex open(const std::string& name, const std::vector<TestTensor>& tensors) {
    std::filesystem::create_directory(dir_ / name);
    testing::write_safetensors(dir_ / name / "model.safetensors", tensors);
    return index_model(Checkpoint::open(dir_ / name));
  }
  testing::TempDir dir_;
};

TEST_F(VerifyTest, MeasuresAKnownError) {
  std::vector<TestTensor> changed = dense_layer(2, 1.0f, 1.0f);
  const float other = 3.0f;  // expert 1 up: one of 512 elements is off by 2
  std::memcpy(changed[4].bytes.data() + 77 * 4, &other, 4);
  const Verification found = verify(open("q", changed), open("s", dense_layer(2, 1.0f, 1.0f)));
  EXPECT_TRUE(found.mismatches.empty());
  EXPECT_EQ(found.others_equal, 1);
  ASSERT_EQ(found.layers.size(), 1u);
  ASSERT_EQ(found.layers[0].matrices.size(), 6u);
  for (const MatrixVerification& matrix : found.layers[0].matrices) {
    const bool off = matrix.expert == 1 && matrix.projection == Projection::kUp;
    EXPECT_EQ(matrix.error.exact(), !off);
    EXPECT_FALSE(matrix.fold_error.has_value());
    if (!off) continue;
    EXPECT_DOUBLE_EQ(matrix.error.relative, std::sqrt(4.0 / 512));
    EXPECT_DOUBLE_EQ(matrix.error.snr_db, 10 * std::log10(128.0));
    EXPECT_EQ(matrix.error.worst, 2);
    EXPECT_EQ(matrix.error.worst_at / matrix.cols, 2);  // 77 = 2 * 32 + 13
    EXPECT_EQ(matrix.error.worst_at % matrix.cols, 13);
  }
  const LayerSummary summary = summarize(found).at(0);
  EXPECT_EQ(summary.worst_name, "expert 1 up");
  EXPECT_DOUBLE_EQ(summary.least_snr_db, 10 * std::log10(128.0));
  EXPECT_TRUE(std::isinf(summary.median_snr_db));
}

TEST_F(VerifyTest, MatchesAcrossFamiliesAndMeasuresFolding) {
  // Codes 2 (1.0) under block scales 0x3A = 1.25 and tensor scale 0.5, against 0.625 in F32: nothing differs.
  // Folded, 1.25 / 8 is an E4M3 number, so folding adds nothing either.
  std::vector<TestTensor> quantized;
  for (int e = 0; e < 2; ++e) {
    for (const std::string name : {"gate_proj", "up_proj", "down_proj"}) {
      const std::string prefix = fmt::format("model.layers.0.mlp.experts.{}.{}.", e, name);
      const std::int64_t rows = name == "down_proj" ? 32 : 16, cols = 512 / rows;
      quantized.push_back(
          tensor(prefix + "weight", DType::kU8, {rows, cols / 2}, std::vector<std::uint8_t>(256, 0x22)));
      // Expert 0 down gets codes 3 (1.5) instead: 1.5 * 1.25 = 1.875 has five bits, and E4M3 only four.
      if (e == 0 && name == "down_proj") quantized.back().bytes.assign(256, 0x33);
      quantized.push_back(tensor(prefix + "weight_scale", DType::kE4M3, {rows, cols / 16},
                                 std::vector<std::uint8_t>(32, 0x3A)));
      quantized.push_back(tensor(prefix + "weight_scale_2", DType::kF32, {}, std::vector<float>{0.5f}));
    }
  }
  const Verification found = verify(open("q", quantized), open("s", dense_layer(2, 0.625f, 0.625f)));
  EXPECT_EQ(found.mismatches, std::vector<std::string>{"model.norm.weight: only in the source"});
  ASSERT_EQ(found.layers.at(0).matrices.size(), 6u);
  for (const MatrixVerification& matrix : found.layers[0].matrices) {
    const bool changed = matrix.expert == 0 && matrix.projection == Projection::kDown;
    EXPECT_DOUBLE_EQ(matrix.error.relative, changed ? 0.5 : 0.0);  // 0.9375 in place of 0.625
    // 1.875 / 8 = 0.234375 = 0.1111b * 2^-2 fits E4M3's four bits, so this is exact as well.
    EXPECT_EQ(matrix.fold_error, 0.0);
  }
}

TEST_F(VerifyTest, ANanInTheRouterIsNoMatch) {
  std::vector<TestTensor> tensors = dense_layer(2, 1.0f, 1.0f);
  const std::string bias = "model.layers.0.mlp.gate.e_score_correction_bias";
  tensors.push_back(
      tensor(bias, DType::kF32, {2}, std::vector<float>{0, std::numeric_limits<float>::quiet_NaN()}));
  const Verification found = verify(open("q", tensors), open("s", tensors));
  EXPECT_EQ(found.mismatches, std::vector<std::string>{bias + ": 1 NaN"});
}

TEST_F(VerifyTest, ANanInABiasIsNoMatch) {
  std::vector<TestTensor> tensors = dense_layer(2, 1.0f, 1.0f);
  std::vector<float> values(16, 1.0f);
  const std::string name = "model.layers.0.mlp.experts.0.up_proj.bias";
  tensors.push_back(tensor(name, DType::kF32, {16}, values));
  values[3] = 2.0f;
  std::vector<TestTensor> others = tensors;
  others.back() = tensor(name, DType::kF32, {16}, values);
  const ModelIndex source = open("s", tensors);
  EXPECT_TRUE(verify(open("same", tensors), source).mismatches.empty());
  EXPECT_EQ(verify(open("other", others), source).mismatches,
            std::vector<std::string>{"layer 0, expert 0, up: the biases differ"});
  values[3] = std::numeric_limits<float>::quiet_NaN();
  others.back() = tensor(name, DType::kF32, {16}, values);
  const ModelIndex nan = open("nan", others);
  EXPECT_EQ(verify(nan, nan).mismatches,
            std::vector<std::string>{"layer 0, expert 0, up: the bias holds a NaN"});
}

TEST_F(VerifyTest, NamesWhatDoesNotMatch) {
  const ModelIndex source = open("s", dense_layer(3, 1.0f, 1.0f));
  std::vector<TestTensor> fewer = dense_layer(2, 1.0f, 1.0f);
  fewer.back() = tensor("model.norm.weight", DType::kF32, {2}, std::vector<float>{1, 3});
  const Verification found = verify(open("q", fewer), source);
  ASSERT_EQ(found.mismatches.size(), 2u);
  EXPECT_EQ(found.mismatches[0], "layer 0: expected 3 experts as in the source, got 2");
  EXPECT_EQ(found.mismatches[1], "model.norm.weight: other bytes than in the source");
  // What would route tokens otherwise is not there in the source.
  std::vector<TestTensor> biased = dense_layer(3, 1.0f, 1.0f);
  biased.push_back(tensor("model.layers.0.mlp.gate.e_score_correction_bias", DType::kF32, {3},
                          std::vector<float>{1, 2, 3}));
  EXPECT_EQ(verify(open("b", biased), source).mismatches,
            std::vector<std::string>{"model.layers.0.mlp.gate.e_score_correction_bias: not in the source"});
}

TEST_F(VerifyTest, PutsWhatIsNotANumberBelowEveryNumber) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Verification found =
      verify(open("q", dense_layer(2, 1.0f, nan)), open("s", dense_layer(2, 1.0f, 1.0f)));
  const LayerSummary summary = summarize(found).at(0);
  EXPECT_TRUE(std::isnan(summary.least_snr_db));
  EXPECT_EQ(summary.worst_name, "expert 1 up");
}

}  // namespace
}  // namespace megamoe
