// expert_matrix_test.cc: values by hand, and the scales that are refused.
#include "checkpoint/expert_matrix.h"

#include <cmath>
#include <limits>

#include "checkpoint/test_models.h"

namespace megamoe {
namespace {

using namespace megamoe::testing;

const std::string kUp1 = "model.layers.0.mlp.experts.1.up_proj.";

TEST(ExpertMatrix, NibbleOrder) {
  TestModel m;
  const std::vector<std::uint8_t> bytes = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    std::vector<std::uint8_t> codes;
    for (int r = 0; r < 16; ++r) codes.insert(codes.end(), bytes.begin(), bytes.end());
    const std::string module = std::string("experts.0.") + name;
    m.tensors.push_back(tensor(module + ".weight", DType::kU8, {16, 8}, codes));
    m.tensors.push_back(
        tensor(module + ".weight_scale", DType::kE4M3, {16, 1}, std::vector<std::uint8_t>(16, 0x38)));
    m.tensors.push_back(tensor(module + ".weight_scale_2", DType::kF32, {}, std::vector<float>{1}));
  }
  const OpenModel model(m);
  const std::vector<float> values = read_f32(model.matrix(0, 1));
  for (std::size_t i = 0; i < 16; ++i) {
    EXPECT_EQ(values[i], kCodeValues[i]) << i;
    EXPECT_EQ(std::signbit(values[i]), i >= 8) << i;  // -0 keeps its sign
  }
}

TEST(ExpertMatrix, BothConventionsGiveTheSameBits) {
  TestModel multiplies = nvfp4_model(add_modelopt_weight_only), divides = nvfp4_model(add_compressed);
  for (TestTensor& t : multiplies.tensors) {
    if (t.name.ends_with("weight_scale_2")) {
      t = tensor(t.name, DType::kF32, t.shape, std::vector<float>{1.0f / 3584.0f});
    }
  }
  for (TestTensor& t : divides.tensors) {
    if (t.name.ends_with("weight_global_scale")) {
      t = tensor(t.name, DType::kF32, t.shape, std::vector<float>{3584.0f});
    }
  }
  const OpenModel a(multiplies), b(divides);
  for (std::size_t e = 0; e < 3; ++e) {
    for (std::size_t p = 0; p < 3; ++p) {
      const std::vector<float> x = read_f32(a.matrix(e, p)), y = read_f32(b.matrix(e, p));
      ASSERT_EQ(x.size(), y.size());
      EXPECT_EQ(std::memcmp(x.data(), y.data(), x.size() * sizeof(float)), 0);
      EXPECT_EQ(read_nvfp4(a.matrix(e, p)).tensor_scale, read_nvfp4(b.matrix(e, p)).tensor_scale);
    }
  }
  divides.at(kUp1 + "weight_global_scale") =
      tensor(kUp1 + "weight_global_scale", DType::kF32, {1}, std::vector<float>{0.0f});
  const OpenModel dead(divides);
  expect_error(ErrorCode::kInvalidFile, {"experts.1.up_proj.weight_global_scale", "positive"},
               [&] { read_nvfp4(dead.matrix(1, 1)); });
}

TEST(ExpertMatrix, TensorScalesTellExpertsApart) {
  const OpenModel model(nvfp4_model());
  EXPECT_EQ(read_nvfp4(model.matrix(0, 0)).tensor_scale, 1.0f);
  EXPECT_EQ(read_nvfp4(model.matrix(0, 1)).tensor_scale, 0.5f);
  EXPECT_EQ(read_nvfp4(model.matrix(2, 0)).tensor_scale, 16.0f);
}

TEST(ExpertMatrix, BadBlockScales) {
  for (const auto& [byte, word] : std::vector<std::pair<char, const char*>>{
           {'\x7f', "NaN"}, {'\xff', "NaN"}, {'\xb8', "negative"}, {'\x81', "negative"}}) {
    TestModel m = nvfp4_model();
    m.at(kUp1 + "weight_scale").bytes[5 * 4 + 3] = byte;  // row 5, block 3
    const OpenModel model(m);
    const std::vector<std::string> parts = {kUp1 + "weight_scale", "row 5, block 3", word};
    expect_error(ErrorCode::kInvalidFile, parts, [&] { read_nvfp4(model.matrix(1, 1)); });
    expect_error(ErrorCode::kInvalidFile, parts, [&] { read_f32(model.matrix(1, 1)); });
    expect_error(ErrorCode::kInvalidFile, parts, [&] { view_nvfp4(model.matrix(1, 1)); });
    EXPECT_NO_THROW(read_nvfp4(model.matrix(1, 0)));
  }
  TestModel m = nvfp4_model(add_compressed_mxfp4);
  m.at(kUp1 + "weight_scale").bytes[5 * 2 + 1] = '\xff';
  const OpenModel model(m);
  const std::vector<std::string> parts = {kUp1 + "weight_scale", "row 5, block 1", "NaN"};
  expect_error(ErrorCode::kInvalidFile, parts, [&] { read_nvfp4(model.matrix(1, 1)); });
  expect_error(ErrorCode::kInvalidFile, parts, [&] { read_f32(model.matrix(1, 1)); });
}

TEST(ExpertMatrix, BadScalesOfWholeTensors) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {0.0f, -1.0f, -0.0f, std::nanf(""), kInf}) {
    for (const std::string part : {"weight_scale_2", "input_scale"}) {
      TestModel m = nvfp4_model();
      m.at(kUp1 + part) = tensor(kUp1 + part, DType::kF32, {}, std::vector<float>{bad});
      const OpenModel model(m);
      expect_error(ErrorCode::kInvalidFile, {kUp1 + part, "finite and positive"}, [&] {
        part == "input_scale" ? static_cast<void>(read_input_scale(model.matrix(1, 1)))
                              : static_cast<void>(read_f32(model.matrix(1, 1)));
      });
    }
  }
}

TEST(ExpertMatrix, Mxfp4BecomesNvfp4WithoutTouchingACode) {
  const OpenModel model(nvfp4_model(add_compressed_mxfp4));
  for (std::size_t e = 0; e < 3; ++e) {
    const Nvfp4Data up = read_nvfp4(model.matrix(e, 1));
    EXPECT_EQ(up.inexact_blocks, 0);
    EXPECT_EQ(up.codes, codes_matrix(kSmall, static_cast<std::int64_t>(e), 1));
    // Exponents run over 118..129, so the largest is 2^2 and becomes 2^8 (0x78) under 2^-6.
    EXPECT_EQ(up.tensor_scale, 0x1p-6f);
    for (std::int64_t r = 0; r < kSmall.intermediate; ++r) {
      for (std::int64_t b = 0; b < 4; ++b) {
        const int exponent = exponent_of(static_cast<std::int64_t>(e), 1, r, b / 2) - 129 + 8;
        const int byte = (exponent + 7) << 3;  // E4M3 of a power of two of at least 2^-6
        EXPECT_EQ(up.scales[static_cast<std::size_t>(r * 4 + b)], byte);
      }
    }
  }
}

TEST(ExpertMatrix, AnMxfp4PartnerSharesTheTensorScale) {
  TestModel m = nvfp4_model(add_compressed_mxfp4);
  m.at("model.layers.0.mlp.experts.1.gate_proj.weight_scale").bytes[0] = static_cast<char>(133);
  const OpenModel model(m);
  EXPECT_EQ(read_nvfp4(model.matrix(1, 0)).tensor_scale, 0x1p-2f);
  EXPECT_EQ(read_nvfp4(model.matrix(1, 1)).tensor_scale, 0x1p-6f);
  EXPECT_EQ(read_nvfp4(model.matrix(1, 1), &model.matrix(1, 0)).tensor_scale, 0x1p-2f);
  EXPECT_EQ(read_nvfp4(model.matrix(1, 0), &model.matrix(1, 1)).tensor_scale, 0x1p-2f);
}

TEST(ExpertMatrix, WhatLiesReadyIsNotCopied) {
  const OpenModel model(nvfp4_model());
  const ExpertMatrix& matrix = model.matrix(2, 2);
  const auto view = view_nvfp4(matrix);
  ASSERT_TRUE(view.has_value());
  EXPECT_EQ(static_cast<const void*>(view->codes), matrix.weight->bytes().data());
  EXPECT_EQ(static_cast<const void*>(view->scales), matrix.block_scale->bytes().data());
  EXPECT_EQ(view->tensor_scale, read_nvfp4(matrix).tensor_scale);
  EXPECT_EQ(view_bf16(matrix), nullptr);
}

TEST(ExpertMatrix, DenseTypes) {
  TestModel m;
  const std::vector<std::uint16_t> halves(256, 0x3e00);  // FP16 1.5
  m.tensors.push_back(tensor("experts.0.up_proj.weight", DType::kF16, {16, 16}, halves));
  m.tensors.push_back(
      tensor("experts.0.down_proj.weight", DType::kF32, {16, 16}, std::vector<float>(256, 0.1f)));
  const OpenModel model(m);
  EXPECT_EQ(read_f32(model.matrix(0, 1)), std::vector<float>(256, 1.5f));
  EXPECT_EQ(read_f32(model.matrix(0, 2)), std::vector<float>(256, 0.1f));
}

}  // namespace
}  // namespace megamoe
