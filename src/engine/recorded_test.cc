#include "engine/recorded.h"

#include <gtest/gtest.h>

#include "checkpoint/test_files.h"
#include "numerics/bf16.h"

namespace megamoe {
namespace {

using testing::expect_error;
using testing::tensor;
using testing::TestTensor;

class RecordedTest : public ::testing::Test {
 protected:
  RecordedActivations open(const std::vector<TestTensor>& tensors) {
    testing::write_safetensors(dir_ / "a.safetensors", tensors);
    return RecordedActivations(dir_ / "a.safetensors");
  }
  TestTensor input(const std::string& name, std::int64_t tokens = 3, std::int64_t cols = 16) {
    std::vector<float> values;
    for (std::int64_t i = 0; i < tokens * cols; ++i) values.push_back(static_cast<float>(i));
    return tensor(name, DType::kF32, {tokens, cols}, values);
  }
  static RecordedNames names(const std::string& input_name, const std::string& output_name) {
    RecordedNames out;
    out.input = input_name;
    out.output = output_name;
    return out;
  }
  LayerConfig config_{
      .hidden = 16, .intermediate = 16, .num_experts = 4, .top_k = 2, .activation = {}, .router = {}};
  testing::TempDir dir_;
};

TEST_F(RecordedTest, FindsLayersUnderBothNamesInOrder) {
  const auto file =
      open({input("model.layers.10.mlp.input"), input("layers.2.mlp.input"), input("layers.x.mlp.input"),
            input("layers.3.mlp.output"), input("layers.-1.mlp.input"), input("layers.04.mlp.input")});
  EXPECT_EQ(file.layers(), (std::vector<int>{2, 10}));
}

TEST_F(RecordedTest, ReadsTheFirstTokensAndRoundsToBf16) {
  TestTensor x = input("layers.2.mlp.input");
  const float odd = 1.001f;  // between two BF16 numbers
  std::memcpy(x.bytes.data() + 4, &odd, 4);
  const RecordedLayer layer = open({x, input("layers.2.mlp.output")}).read(2, config_, 2);
  EXPECT_EQ(layer.tokens, 2);
  ASSERT_EQ(layer.x.size(), 32u);
  EXPECT_EQ(to_float(layer.x[1]), 1.0f);
  EXPECT_EQ(to_float(layer.x[31]), 31.0f);
  EXPECT_EQ(layer.rounded_inputs, 1);
  EXPECT_EQ(layer.output.size(), 32u);
  EXPECT_TRUE(layer.router_logits.empty());
  EXPECT_TRUE(layer.ids.empty());
}

TEST_F(RecordedTest, RefusesTwoNamesForOnePlace) {
  const auto file = open({input("layers.2.mlp.input"), input("model.layers.2.mlp.input", 2)});
  expect_error(ErrorCode::kInvalidFile, {"one of layers.2.mlp.input and model.layers.2.mlp.input, got both"},
               [&] { file.read(2, config_, 100); });
  EXPECT_EQ(file.read(2, config_, 100, names("layers.2.mlp.input", "")).tokens, 3);
}

TEST_F(RecordedTest, ReadsGivenNames) {
  const auto file = open({input("mine")});
  EXPECT_EQ(file.read(7, config_, 100, names("mine", "mine")).output.size(), 48u);
  expect_error(ErrorCode::kNotFound, {"yours"}, [&] { file.read(7, config_, 100, names("yours", "")); });
}

TEST_F(RecordedTest, RefusesWrongShapesAndTypes) {
  const auto read = [&](const std::vector<TestTensor>& tensors) { open(tensors).read(0, config_, 100); };
  const TestTensor x = input("layers.0.mlp.input");
  expect_error(ErrorCode::kNotFound, {"layers.0.mlp.input"}, [&] { read({}); });
  expect_error(ErrorCode::kInvalidFile, {"[tokens, 16]", "[3, 32]"},
               [&] { read({input("layers.0.mlp.input", 3, 32)}); });
  expect_error(ErrorCode::kInvalidFile, {"3 tokens", "[2, 16]"}, [&] {
    read({x, input("layers.0.mlp.output", 2)});
  });
  expect_error(ErrorCode::kInvalidFile, {"BF16, F16 or F32", "I8"}, [&] {
    read({tensor("layers.0.mlp.input", DType::kI8, {1, 16}, std::vector<std::int8_t>(16))});
  });
  const auto ids = [](std::int64_t id) {
    return tensor("layers.0.mlp.expert_ids", DType::kI64, {3, 2}, std::vector<std::int64_t>(6, id));
  };
  expect_error(ErrorCode::kInvalidFile, {"no expert weights"}, [&] { read({x, ids(0)}); });
  const TestTensor weights =
      tensor("layers.0.mlp.expert_weights", DType::kF32, {3, 2}, std::vector<float>(6));
  expect_error(ErrorCode::kInvalidFile, {"expert_ids", "got 9223372036854775807 for token 0, slot 0"}, [&] {
    read({x, ids(INT64_MAX), weights});
  });
  const TestTensor token_ids = tensor("layers.0.mlp.token_ids", DType::kI64, {3},
                                      std::vector<std::int64_t>{0, -5, std::int64_t{1} << 32});
  expect_error(ErrorCode::kInvalidFile, {"token_ids", "got 4294967296 for token 2"}, [&] {
    read({x, token_ids});
  });
  EXPECT_EQ(open({x, token_ids}).read(0, config_, 2).token_ids, (std::vector<std::int32_t>{0, -5}));
  const TestTensor float_ids = tensor("layers.0.mlp.expert_ids", DType::kF32, {3, 2}, std::vector<float>(6));
  expect_error(ErrorCode::kInvalidFile, {"I32 or I64"}, [&] { read({x, float_ids, weights}); });
}

}  // namespace
}  // namespace megamoe
