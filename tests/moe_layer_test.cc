// moe_layer_test.cc: what a layer refuses before it runs, and that a pass asks for no memory.
#include "megamoe/moe_layer.h"

#include <atomic>
#include <cstdlib>
#include <limits>
#include <new>
#include <string>

#include "base/aligned_buffer.h"
#include "base/parallel.h"
#include "checkpoint/test_files.h"
#include "engine/backends.h"
#include "tests/harness.h"

namespace {
std::atomic<std::int64_t> g_allocations{0};
}  // namespace

// Counts what this program takes by `new`, as every container does. Not inlined: the compiler would
// see a `delete` of what malloc gave, and warn.
[[gnu::noinline]] void* operator new(std::size_t bytes) {
  ++g_allocations;
  if (void* memory = std::malloc(bytes == 0 ? 1 : bytes)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace megamoe::testing {
namespace {

constexpr std::int64_t kTokens = 17;

class MoeLayerTest : public ::testing::Test {
 protected:
  MatrixView<const bf16> x() const { return {input_.x.data(), kTokens, 48}; }
  MatrixView<const std::int32_t> ids() const { return {input_.ids.data(), kTokens, 3}; }
  MatrixView<const float> weights() const { return {input_.weights.data(), kTokens, 3}; }
  MatrixView<bf16> y() { return {y_.data(), kTokens, 48}; }
  MoeLayer layer(const MoeLayerOptions& options = {}) const { return {owner_->weights, options}; }

  LayerConfig config_ = make_config(48, 80, 5, 3);
  std::unique_ptr<TestLayer> owner_ = random_layer(config_, WeightFormat::kNvfp4, 1);
  Input input_ = random_input(config_, kTokens, 2);
  std::vector<bf16> y_ = std::vector<bf16>(kTokens * 48);
};

TEST_F(MoeLayerTest, RefusesShapesThatDoNotFit) {
  const MoeLayer moe = layer();
  const auto refused = [&](const std::vector<std::string>& parts, auto action) {
    expect_error(ErrorCode::kInvalidArgument, parts, action);
  };
  refused({"x", "[17, 48]", "[17, 32]"},
          [&] { moe.forward(MatrixView<const bf16>(input_.x.data(), kTokens, 32), ids(), weights(), y()); });
  refused({"x", "48", "row stride of 47"}, [&] {
    moe.forward({input_.x.data(), kTokens, 48, 47}, ids(), weights(), y());
  });
  refused({"x", "null"}, [&] { moe.forward({nullptr, kTokens, 48}, ids(), weights(), y()); });
  refused({"ids", "[17, 3]", "[16, 3]"}, [&] {
    moe.forward(x(), {input_.ids.data(), kTokens - 1, 3}, weights(), y());
  });
  refused({"logits", "[17, 5]", "[17, 4]"}, [&] {
    std::vector<float> logits(kTokens * 5);
    moe.router_logits(x(), {logits.data(), kTokens, 4});
  });
}

TEST_F(MoeLayerTest, RefusesNumbersOfTokensThatCannotBe) {
  const MoeLayer moe = layer();
  AlignedBuffer<std::byte> workspace(moe.workspace_bytes(kTokens));
  const auto forward = [&](std::int64_t tokens) {
    moe.forward({input_.x.data(), tokens, 48}, {input_.ids.data(), tokens, 3},
                {input_.weights.data(), tokens, 3}, {y_.data(), tokens, 48}, workspace);
  };
  expect_error(ErrorCode::kInvalidArgument, {"x", "0 rows or more", "-1"}, [&] { forward(-1); });
  // Rows are numbered in 32 bits.
  expect_error(ErrorCode::kUnsupported, {"2147483647 tokens", "2147483648"}, [&] { forward(1LL << 31); });
  expect_error(ErrorCode::kInvalidArgument, {"-1"}, [&] { moe.workspace_bytes(-1); });
  expect_error(ErrorCode::kOutOfMemory, {},
               [&] { moe.workspace_bytes(std::numeric_limits<std::int64_t>::max()); });
}

TEST_F(MoeLayerTest, RefusesAWorkspaceThatIsTooSmallOrAskew) {
  const MoeLayer moe = layer();
  const std::int64_t bytes = moe.workspace_bytes(kTokens);
  AlignedBuffer<std::byte> memory(bytes + 1);
  const auto forward = [&](std::int64_t from, std::int64_t size) {
    moe.forward(x(), ids(), weights(), y(), {memory.data() + from, static_cast<std::size_t>(size)});
  };
  expect_error(ErrorCode::kInvalidArgument, {"17 tokens", std::to_string(bytes), std::to_string(bytes - 1)},
               [&] { forward(0, bytes - 1); });
  expect_error(ErrorCode::kInvalidArgument, {"multiple of 64"}, [&] { forward(1, bytes); });
}

TEST_F(MoeLayerTest, RefusesExpertIdsOutOfRange) {
  const MoeLayer moe = layer();
  for (const std::int32_t id : {5, -2, std::numeric_limits<std::int32_t>::max()}) {
    input_.ids[4 * 3 + 1] = id;
    expect_error(ErrorCode::kInvalidArgument, {std::to_string(id), "token 4", "slot 1", "0 to 4"},
                 [&] { moe.forward(x(), ids(), weights(), y()); });
  }
}

TEST_F(MoeLayerTest, OnlyAGpuTakesAStream) {
  const MoeLayer moe = layer({.backend = "cpu"});
  EXPECT_FALSE(moe.on_gpu());
  expect_error(ErrorCode::kUnsupported, {"stream", "GPU", "'cpu'"},
               [&] { moe.stream_workspace_bytes(kTokens); });
  expect_error(ErrorCode::kUnsupported, {"stream", "GPU", "'cpu'"},
               [&] { moe.forward_on_stream(x(), ids(), weights(), y(), {}, nullptr); });
}

TEST_F(MoeLayerTest, RefusesFormatsThatTheBackendDoesNotRun) {
  owner_ = random_layer(config_, WeightFormat::kBf16, 1);
  for (const char* backend : {"ref", "cpu"}) {
    expect_error(ErrorCode::kUnsupported,
                 {backend, "nvfp4 activations", "bf16 weights", "expert 0", "use bf16"},
                 [&] { layer({.backend = backend, .activations = ActivationFormat::kNvfp4}); });
  }
  EXPECT_NO_THROW(layer());  // the best backend that runs it, not the best that there is
}

TEST_F(MoeLayerTest, RefusesScalesThatItsActivationsDoNotHave) {
  expect_error(ErrorCode::kInvalidArgument, {"nvfp4", "bf16"},
               [&] { layer({.backend = "cpu", .x_scale = ScaleSource::kDynamicRow, .h_scale = {}}); });
  expect_error(ErrorCode::kInvalidArgument, {"nvfp4", "fp8"}, [&] {
    layer({.backend = "cpu",
           .activations = ActivationFormat::kFp8,
           .x_scale = {},
           .h_scale = ScaleSource::kDynamicRow});
  });
}

TEST_F(MoeLayerTest, APassAllocatesNothingOnceThreadsHaveTheirScratch) {
  for (ExpertWeights& expert : owner_->weights.experts) expert.input_scale = expert.down_input_scale = 0.003f;
  for (const ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    const MoeLayer moe = layer({.backend = "cpu", .activations = format, .x_scale = {}, .h_scale = {}});
    AlignedBuffer<std::byte> workspace(moe.workspace_bytes(kTokens));
    // Each thread makes its scratch memory in the first pass that it has a part in, which need not be the
    // first one.
    std::int64_t allocations = 1;
    for (int pass = 0; pass <= num_threads() && allocations > 0; ++pass) {
      const std::int64_t before = g_allocations;
      moe.forward(x(), ids(), weights(), y(), workspace);
      if (pass > 0) allocations = g_allocations - before;
    }
    EXPECT_EQ(allocations, 0) << to_string(format);
  }
}

}  // namespace
}  // namespace megamoe::testing
