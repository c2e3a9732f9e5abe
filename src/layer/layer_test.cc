#include "megamoe/layer.h"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <set>

#include "layer/activation.h"
#include "layer/geometries.h"
#include "megamoe/error.h"

namespace megamoe {
namespace {

// The message of the Error that `body` throws, which must have this code.
std::string message_of(ErrorCode code, const std::function<void()>& body) {
  try {
    body();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return "";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

LayerConfig small_config() {
  LayerConfig config;
  config.hidden = 32;
  config.intermediate = 48;
  config.num_experts = 8;
  config.top_k = 2;
  return config;
}

// Valid weights; their memory holds nothing of interest.
struct SmallLayer {
  SmallLayer() {
    weights.config = small_config();
    weights.name = "model.layers.7.mlp";
    weights.experts.resize(8);
    for (ExpertWeights& expert : weights.experts) {
      expert.gate = expert.up = matrix(48, 32);
      expert.down = matrix(32, 48);
    }
  }
  WeightMatrix matrix(std::int64_t rows, std::int64_t cols) const {
    WeightMatrix w;
    w.rows = rows;
    w.cols = cols;
    w.codes = w.scales = bytes.data();
    w.tensor_scale = 0.5f;
    return w;
  }
  std::vector<std::uint8_t> bytes = std::vector<std::uint8_t>(48 * 32);
  LayerWeights weights;
};

TEST(LayerNames, ComeBack) {
  for (const ActivationFormat f :
       {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    EXPECT_EQ(parse_activation_format(to_string(f)), f);
  }
  for (const ScaleSource s : {ScaleSource::kStatic, ScaleSource::kStaticLayerMax, ScaleSource::kDynamicRow,
                              ScaleSource::kDynamicTensor}) {
    EXPECT_EQ(parse_scale_source(to_string(s)), s);
  }
  EXPECT_EQ(to_string(Activation::kRelu2), "relu2");
  EXPECT_EQ(to_string(Scoring::kSqrtSoftplus), "sqrt-softplus");
  EXPECT_EQ(to_string(WeightFormat::kNvfp4), "nvfp4");
}

TEST(LayerNames, UnknownOnesListTheKnown) {
  const std::string message =
      message_of(ErrorCode::kInvalidArgument, [] { parse_activation_format("int8"); });
  for (const char* part : {"bf16", "fp8", "nvfp4", "int8"}) EXPECT_TRUE(contains(message, part)) << message;
  EXPECT_TRUE(contains(message_of(ErrorCode::kInvalidArgument, [] { parse_scale_source(""); }), "layer-max"));
}

TEST(ValidateConfig, NamesWhatIsWrong) {
  validate(small_config());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const struct {
    std::function<void(LayerConfig&)> spoil;
    const char* part;
  } cases[] = {
      {[](LayerConfig& c) { c.hidden = 0; }, "hidden size"},
      {[](LayerConfig& c) { c.hidden = 40; }, "got 40"},
      {[](LayerConfig& c) { c.intermediate = -16; }, "intermediate size"},
      {[](LayerConfig& c) { c.num_experts = 0; }, "number of experts"},
      {[](LayerConfig& c) { c.num_experts = 1LL << 31; }, "number of experts"},
      {[](LayerConfig& c) { c.top_k = 0; }, "top_k"},
      {[](LayerConfig& c) { c.top_k = 9; }, "1 to 8"},
      {[](LayerConfig& c) { c.activation.kind = Activation::kSwiGluClamped; }, "limit"},
      {[=](LayerConfig& c) {
         c.activation = {Activation::kGptOss, nan, 1.702f};
       },
       "limit"},
      {[=](LayerConfig& c) {
         c.activation = {Activation::kGptOss, 7.0f, nan};
       },
       "alpha"},
      {[](LayerConfig& c) { c.router.scaling_factor = 0.0f; }, "scaling factor"},
      {[](LayerConfig& c) { c.router.num_groups = 3; }, "3 equal groups"},
      {[](LayerConfig& c) { c.router.num_groups = 0; }, "0 equal groups"},
      {[](LayerConfig& c) { c.router = {.scoring = Scoring::kSigmoid, .num_groups = 4, .topk_groups = 5}; },
       "topk_groups"},
      {[](LayerConfig& c) { c.router = {.scoring = Scoring::kSigmoid, .num_groups = 8, .topk_groups = 1}; },
       "top_k 2"},
  };
  for (const auto& c : cases) {
    LayerConfig config = small_config();
    c.spoil(config);
    const std::string message = message_of(ErrorCode::kInvalidArgument, [&] { validate(config); });
    EXPECT_TRUE(contains(message, c.part)) << message;
  }
  LayerConfig config = small_config();
  config.router.num_groups = 2;  // with softmax
  message_of(ErrorCode::kUnsupported, [&] { validate(config); });
  config = small_config();
  config.hidden = config.intermediate = 1LL << 40;
  message_of(ErrorCode::kOutOfMemory, [&] { validate(config); });
}

TEST(ValidateWeights, NamesLayerExpertAndMatrix) {
  validate(SmallLayer().weights);
  const float inf = std::numeric_limits<float>::infinity();
  const struct {
    std::function<void(LayerWeights&)> spoil;
    const char* part;
  } cases[] = {
      {[](LayerWeights& w) { w.experts.pop_back(); }, "8 experts, got 7"},
      {[](LayerWeights& w) { w.experts[3].gate.rows = 32; }, "expert 3, gate must be [48, 32], got [32, 32]"},
      {[](LayerWeights& w) { w.experts[7].down = {}; }, "expert 7, down must be [32, 48]"},
      {[](LayerWeights& w) { w.experts[1].up.scales = nullptr; }, "expert 1, up is nvfp4 but has no data"},
      {[](LayerWeights& w) { w.experts[1].up.format = WeightFormat::kBf16; }, "bf16 but has no data"},
      {[](LayerWeights& w) { w.experts[2].up.tensor_scale = 0.0f; }, "expert 2, up needs a tensor scale"},
      {[=](LayerWeights& w) { w.experts[2].up.tensor_scale = inf; }, "got inf"},
      {[](LayerWeights& w) { w.experts[4].input_scale = -1.0f; }, "expert 4: the input scale must"},
      {[](LayerWeights& w) { w.experts[4].down_input_scale = NAN; }, "input scale of down"},
      {[](LayerWeights& w) { w.config.activation.kind = Activation::kRelu2; },
       "expert 0: the activation has no gate"},
      {[](LayerWeights& w) { w.shared.present = true; }, "shared expert"},
      {[](LayerWeights& w) { w.config.router.hash_routed = true; }, "hash-routed"},
  };
  for (const auto& c : cases) {
    SmallLayer layer;
    c.spoil(layer.weights);
    const std::string message = message_of(ErrorCode::kInvalidArgument, [&] { validate(layer.weights); });
    EXPECT_TRUE(contains(message, c.part)) << message;
  }
}

TEST(ValidateWeights, ChecksTheHashTable) {
  SmallLayer layer;
  layer.weights.config.router.hash_routed = true;
  std::vector<std::int32_t> table = {0, 7, 3, 3};
  layer.weights.hash_table = table.data();
  layer.weights.hash_rows = 2;
  validate(layer.weights);
  table[3] = 8;
  const std::string message = message_of(ErrorCode::kInvalidArgument, [&] { validate(layer.weights); });
  EXPECT_TRUE(contains(message, "row 1, slot 1 must be 0 to 7, got 8")) << message;
}

TEST(Geometries, AreValidUniqueAndFound) {
  std::set<std::string_view> names;
  for (const ModelGeometry& row : model_geometries()) {
    EXPECT_NO_THROW(validate(row.config)) << row.name;
    EXPECT_EQ(row.shared_intermediate % 16, 0) << row.name;
    EXPECT_TRUE(names.insert(row.name).second) << row.name;
    EXPECT_EQ(&find_geometry(row.name), &row);
  }
  EXPECT_EQ(find_geometry("deepseek-v3").config.router.num_groups, 8);
  EXPECT_TRUE(contains(message_of(ErrorCode::kNotFound, [] { find_geometry("gpt-5"); }), "gpt-oss-20b"));
}

TEST(Activate, CutsLetNanThroughAndKeepFiniteFinite) {
  const ActivationConfig configs[] = {{Activation::kSwiGlu, 0, 0},
                                      {Activation::kSwiGluClamped, 10, 0},
                                      {Activation::kGptOss, 7, 1.702f},
                                      {Activation::kRelu2, 0, 0}};
  for (const ActivationConfig& config : configs) {
    EXPECT_TRUE(std::isnan(activate(config, NAN, NAN).h)) << to_string(config.kind);
    EXPECT_TRUE(std::isnan(activate(config, 1.0f, NAN).h)) << to_string(config.kind);
    for (const float gate : {-3e38f, -1e4f, -100.0f, -0.0f, 0.0f, 100.0f, 3e38f}) {
      EXPECT_FALSE(std::isnan(activate(config, gate, 1.0f).h)) << to_string(config.kind) << " " << gate;
    }
  }
  EXPECT_EQ(activate({Activation::kRelu2, 0, 0}, 0.0f, -3.0f).h, 0.0f);
}

}  // namespace
}  // namespace megamoe
