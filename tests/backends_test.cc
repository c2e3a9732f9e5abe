// backends_test.cc: the list of backends, the choice among them, and whole layers through the public API.
#include <algorithm>
#include <set>
#include <string>

#include "base/test_variable.h"
#include "engine/backends.h"
#include "megamoe/error.h"
#include "megamoe/moe_layer.h"
#include "tests/compare.h"

namespace megamoe::testing {
namespace {

TEST(Backends, AreListedOnceAndDescribed) {
  std::set<std::string> names;
  for (const BackendInfo& info : list_backends()) {
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_FALSE(info.description.empty());
    EXPECT_FALSE(info.needs.empty());
  }
  EXPECT_TRUE(names.count("ref") == 1 && names.count("cpu") == 1);
  EXPECT_EQ(all_backends().back()->name(), "ref");
}

TEST(Backends, AnUnknownNameListsTheKnown) {
  try {
    find_backend("tpu");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kNotFound);
    EXPECT_NE(std::string(error.what()).find("ref"), std::string::npos) << error.what();
  }
}

class WhichBackend : public Conformance {};
MEGAMOE_FOR_EVERY_BACKEND(WhichBackend);

TEST_P(WhichBackend, IsTheOneAskedFor) {
  EXPECT_EQ(&find_backend(backend().name()), &backend());
  const std::string name(backend().name());
  const ForcedVariable forced("MEGAMOE_BACKEND", name);
  EXPECT_EQ(&find_backend(""), &backend());
  EXPECT_EQ(&find_backend("auto"), &backend());
  const auto layer = random_layer(make_config(16, 16, 1, 1), WeightFormat::kNvfp4, 1);
  EXPECT_EQ(MoeLayer(layer->weights, {}).backend(), name);
  MoeLayerOptions options;
  options.backend = name;
  EXPECT_EQ(MoeLayer(layer->weights, options).backend(), name);
}

TEST_P(WhichBackend, LayerThroughThePublicApiEqualsTheOperations) {
  const LayerConfig config = make_config(48, 80, 5, 3);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 1);
  for (ExpertWeights& expert : layer->weights.experts) expert.input_scale = expert.down_input_scale = 0.003f;
  const Input input = random_input(config, 17, 2);
  const MatrixView<const bf16> x(input.x.data(), 17, 48);
  const MatrixView<const std::int32_t> ids(input.ids.data(), 17, 3);
  const MatrixView<const float> weights(input.weights.data(), 17, 3);
  for (const ActivationFormat format : formats()) {
    const RunResult want = run(backend(), layer->weights, input,
                               {.format = format,
                                .x_scale = 0.003f,
                                .gathered = format == ActivationFormat::kNvfp4,
                                .h_scale = 0.003f});
    for (const auto l1 :
         {MoeLayerOptions::L1::kFused, MoeLayerOptions::L1::kCompact, MoeLayerOptions::L1::kInterleaved}) {
      if (l1 == MoeLayerOptions::L1::kInterleaved && format != ActivationFormat::kNvfp4) continue;
      MoeLayerOptions options;
      options.backend = backend().name();
      options.activations = format;
      options.l1 = l1;
      const MoeLayer moe(layer->weights, options);
      // Workspaces of every content, exactly as large as asked for; y with room between its rows.
      for (const int poison : {0x7F, 0xFF, 0x00}) {
        const std::int64_t bytes = moe.workspace_bytes(17);
        std::vector<std::byte> memory(static_cast<std::size_t>(bytes) + 128, std::byte(poison));
        const auto address = reinterpret_cast<std::uintptr_t>(memory.data());
        std::byte* start = memory.data() + (64 - address % 64) % 64;
        std::fill(start + bytes, memory.data() + memory.size(), std::byte{0x5A});
        std::vector<bf16> y(17 * 64, bf16{0x7FC0});
        moe.forward(x, ids, weights, MatrixView<bf16>(y.data(), 17, 48, 64),
                    std::span<std::byte>(start, static_cast<std::size_t>(bytes)));
        for (std::size_t i = 0; i < y.size(); ++i) {
          const bf16 expected = i % 64 < 48 ? want.y[i / 64 * 48 + i % 64] : bf16{0x7FC0};
          ASSERT_TRUE(same(y[i], expected)) << to_string(format) << ", element " << i;
        }
        EXPECT_TRUE(std::all_of(start + bytes, memory.data() + memory.size(),
                                [](std::byte b) { return b == std::byte{0x5A}; }));
      }
    }
  }
}

// Whatever the scales: only h's own columns count for a dynamic one, not those of the gate beside them.
TEST_P(WhichBackend, AllWaysToHAgreeUnderEveryTensorScale) {
  const LayerConfig config = make_config(48, 80, 5, 3);
  const auto layer = random_layer(config, WeightFormat::kNvfp4, 1);
  for (ExpertWeights& expert : layer->weights.experts) {
    expert.input_scale = expert.down_input_scale = 0.003f;
    for (std::int64_t i = 0; i < 80 * 48 / 16; i += 3) {  // silu(gate) far above h
      const_cast<std::uint8_t*>(expert.gate.scales)[i] = 0x78;
    }
  }
  const Input input = random_input(config, 17, 2);
  for (const ScaleSource h_scale : {ScaleSource::kStatic, ScaleSource::kStaticLayerMax,
                                    ScaleSource::kDynamicRow, ScaleSource::kDynamicTensor}) {
    std::vector<std::vector<bf16>> results;
    std::vector<std::int64_t> saturated;
    for (const auto l1 :
         {MoeLayerOptions::L1::kFused, MoeLayerOptions::L1::kCompact, MoeLayerOptions::L1::kInterleaved}) {
      MoeLayerOptions options;
      options.backend = backend().name();
      options.activations = ActivationFormat::kNvfp4;
      options.h_scale = h_scale;
      options.l1 = l1;
      results.emplace_back(17 * 48, bf16{0x7FC0});
      saturated.push_back(MoeLayer(layer->weights, options)
                              .forward({input.x.data(), 17, 48}, {input.ids.data(), 17, 3},
                                       {input.weights.data(), 17, 3}, {results.back().data(), 17, 48}));
    }
    EXPECT_TRUE(all_same(results[0], results[1])) << to_string(h_scale);
    EXPECT_TRUE(all_same(results[0], results[2])) << to_string(h_scale);
    EXPECT_EQ(saturated[0], saturated[1]) << to_string(h_scale);
    EXPECT_EQ(saturated[0], saturated[2]) << to_string(h_scale);
  }
}

}  // namespace
}  // namespace megamoe::testing
