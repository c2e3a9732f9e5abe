// pass_test.cc: the whole layer on one GPU stream, held against the same backend's steps on host memory, bit
// for bit.
#include <algorithm>
#include <functional>
#include <optional>
#include <string>
#include <thread>

#include "base/file.h"
#include "base/test_variable.h"
#include "checkpoint/test_files.h"
#include "cuda/gpu_test.h"
#include "cuda/sm90/tile_times.h"
#include "engine/backends.h"
#include "megamoe/moe_layer.h"
#include "tests/harness.h"

namespace megamoe::testing {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;
using cuda::Output;
using cuda::same_bytes;
using cuda::Stream;
using L1 = MoeLayerOptions::L1;

constexpr bf16 kBetweenRows{0x7FC0};

enum class Shared { kNone, kPlain, kGated };
struct LayerKind {
  const char* name;
  ActivationConfig activation;
  bool bias;
  Shared shared;
};
constexpr LayerKind kKinds[] = {
    {"swiglu", {}, false, Shared::kNone},
    {"clamped", {.kind = Activation::kSwiGluClamped, .limit = 1.5f}, false, Shared::kGated},
    {"gpt-oss", {.kind = Activation::kGptOss, .limit = 2.0f}, true, Shared::kNone},
    {"relu2", {.kind = Activation::kRelu2}, true, Shared::kPlain}};

// Widths of several chunks of 64 columns, none of them whole at the end.
LayerConfig small_config(const LayerKind& kind) { return make_config(144, 80, 5, 3, kind.activation); }

// Static scales of x and h differ by expert; the first ones are so small that blocks saturate. The shared
// expert is wider than the others.
std::unique_ptr<TestLayer> make_layer(const LayerConfig& config, const LayerKind& kind) {
  auto layer = random_layer(config, WeightFormat::kNvfp4, 1, kind.bias);
  if (kind.shared != Shared::kNone) {
    SharedExpert& shared = layer->weights.shared;
    Random random(2);
    const std::int64_t hidden = config.hidden, intermediate = config.intermediate + 48;
    shared.present = true;
    shared.activation.kind = config.activation.gated() ? Activation::kSwiGlu : Activation::kRelu2;
    if (config.activation.gated())
      shared.weights.gate = layer->random(WeightFormat::kNvfp4, intermediate, hidden, random);
    shared.weights.up = layer->random(WeightFormat::kNvfp4, intermediate, hidden, random);
    shared.weights.down = layer->random(WeightFormat::kNvfp4, hidden, intermediate, random);
    std::vector<float> gate(static_cast<std::size_t>(hidden));
    for (float& g : gate) g = random.bell() * 0.1f;
    if (kind.shared == Shared::kGated) shared.gate = layer->floats(gate);
  }
  float factor = 1.0f;
  for (ExpertWeights& expert : layer->weights.experts) {
    expert.input_scale = 0.0004f * factor;
    expert.down_input_scale = 0.00007f * factor;
    factor += 1.0f;
  }
  return layer;
}

MoeLayerOptions bf16_options() {
  MoeLayerOptions options;
  options.backend = "hopper";
  return options;
}

MoeLayerOptions nvfp4_options(ScaleSource x, ScaleSource h, L1 l1 = L1::kFused) {
  MoeLayerOptions options = bf16_options();
  options.activations = ActivationFormat::kNvfp4;
  options.x_scale = x;
  options.h_scale = h;
  options.l1 = l1;
  return options;
}

MoeLayerOptions fp8_options(L1 l1 = L1::kFused) {
  MoeLayerOptions options = bf16_options();
  options.activations = ActivationFormat::kFp8;
  options.l1 = l1;
  return options;
}

std::string describe(const MoeLayerOptions& o) {
  if (o.activations != ActivationFormat::kNvfp4) {
    return std::string(to_string(o.activations)) + (o.l1 == L1::kFused ? "" : " compact");
  }
  return "nvfp4, x " + std::string(to_string(*o.x_scale)) + ", h " + std::string(to_string(*o.h_scale)) +
         (o.l1 == L1::kFused     ? " fused"
          : o.l1 == L1::kCompact ? " compact"
                                 : " interleaved");
}

// Every combination that a layer takes.
std::vector<MoeLayerOptions> all_options(bool gated) {
  std::vector<MoeLayerOptions> all = {bf16_options(), bf16_options(), fp8_options(),
                                      fp8_options(L1::kCompact)};
  all[1].l1 = L1::kCompact;
  constexpr ScaleSource kSources[] = {ScaleSource::kStatic, ScaleSource::kStaticLayerMax,
                                      ScaleSource::kDynamicRow, ScaleSource::kDynamicTensor};
  for (const ScaleSource x : kSources) {
    for (const ScaleSource h : kSources) {
      for (const L1 l1 : {L1::kFused, L1::kCompact, L1::kInterleaved}) {
        if (l1 != L1::kInterleaved || gated) all.push_back(nvfp4_options(x, h, l1));
      }
    }
  }
  return all;
}

// One of each way through the pass.
std::vector<MoeLayerOptions> some_options() {
  return {bf16_options(), fp8_options(), nvfp4_options(ScaleSource::kStatic, ScaleSource::kStatic),
          nvfp4_options(ScaleSource::kDynamicRow, ScaleSource::kDynamicRow),
          nvfp4_options(ScaleSource::kDynamicTensor, ScaleSource::kDynamicTensor, L1::kInterleaved)};
}

// Routings by turns: random, all to one expert, mostly nobody, duplicates, every weight 0.
Input routed_input(const LayerConfig& config, std::int64_t tokens, std::uint64_t turn) {
  Input input = random_input(config, tokens, 1000 + turn);
  for (std::size_t i = 0; i < input.ids.size(); ++i) {
    const std::size_t token = i / static_cast<std::size_t>(config.top_k);
    switch (turn % 5) {
      case 1: input.ids[i] = static_cast<std::int32_t>(config.num_experts - 1); break;
      case 2: input.ids[i] = i % 7 == 3 ? input.ids[i] : -1; break;
      case 3: input.ids[i] = static_cast<std::int32_t>(token % 2); break;
      case 4: input.weights[i] = i % 2 == 0 ? 0.0f : -0.0f; break;
      default: break;
    }
  }
  return input;
}

struct Outcome {
  std::vector<bf16> y;  // [tokens, H]
  unsigned long long saturated = 0;
  unsigned long long bad_id = ~0ull;
};

void expect_same(const Outcome& got, const Outcome& want) {
  EXPECT_TRUE(same_bytes(got.y, want.y));
  EXPECT_EQ(got.saturated, want.saturated);
  EXPECT_EQ(got.bad_id, want.bad_id);
}

// Operands of passes over so many tokens, in GPU memory. Rows of x and y may have others' bytes between them.
class Operands {
 public:
  Operands(const MoeLayer& layer, std::int64_t tokens, std::int64_t between = 0)
      : config_(layer.config()),
        tokens_(tokens),
        stride_(config_.hidden + between),
        x_(tokens * stride_),
        ids_(tokens * config_.top_k),
        weights_(tokens * config_.top_k),
        y_(tokens * stride_),
        status_(1) {
    set_status({});
  }

  void set(const Input& input) {
    ASSERT_EQ(input.tokens, tokens_);
    std::vector<bf16> x(static_cast<std::size_t>(tokens_ * stride_), kBetweenRows);
    for (std::int64_t t = 0; t < tokens_; ++t) {
      std::copy_n(input.x.begin() + t * config_.hidden, config_.hidden, x.begin() + t * stride_);
    }
    x_.upload(x.data());
    ids_.upload(input.ids.data());
    weights_.upload(input.weights.data());
    y_.upload(std::vector<bf16>(x.size(), kBetweenRows).data());
  }
  void set_status(const StreamStatus& status) { status_.upload(&status); }

  void enqueue(const MoeLayer& layer, std::span<std::byte> workspace, cudaStream_t stream,
               bool with_status = true) const {
    layer.forward_on_stream({x_.data(), tokens_, config_.hidden, stride_},
                            {ids_.data(), tokens_, config_.top_k}, {weights_.data(), tokens_, config_.top_k},
                            {y_.data(), tokens_, config_.hidden, stride_}, workspace, stream,
                            with_status ? status_.data() : nullptr);
  }

  // What is there now.
  Outcome outcome() const {
    const StreamStatus status = status_.download()[0];
    Outcome result{{}, status.saturated, status.bad_id};
    const std::vector<bf16> y = y_.download();
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const auto row = y.begin() + t * stride_;
      result.y.insert(result.y.end(), row, row + config_.hidden);
      EXPECT_TRUE(std::all_of(row + config_.hidden, row + stride_, [](bf16 v) { return v == kBetweenRows; }))
          << "written behind row " << t;
    }
    return result;
  }

 private:
  LayerConfig config_;
  std::int64_t tokens_, stride_;
  DeviceArray<bf16> x_;
  DeviceArray<std::int32_t> ids_;
  DeviceArray<float> weights_;
  DeviceArray<bf16> y_;
  DeviceArray<StreamStatus> status_;
};

std::span<std::byte> bytes_of(void* data, std::int64_t bytes) {
  return {static_cast<std::byte*>(data), static_cast<std::size_t>(bytes)};
}

// Exactly as large as asked for, filled with `poison`, with a guard behind it that finish() looks at.
class PoisonedWorkspace {
 public:
  PoisonedWorkspace(const MoeLayer& layer, std::int64_t tokens, int poison)
      : bytes_(layer.stream_workspace_bytes(tokens)), memory_(bytes_, poison) {}
  std::span<std::byte> span() const { return bytes_of(memory_.data(), bytes_); }
  void check_guard() const { memory_.download(); }

 private:
  std::int64_t bytes_;
  Output<std::uint8_t> memory_;
};

// One pass on a stream of its own.
Outcome run_on_stream(const MoeLayer& layer, const Input& input, std::int64_t between = 0,
                      int poison = 0x7F) {
  Operands operands(layer, input.tokens, between);
  operands.set(input);
  const PoisonedWorkspace workspace(layer, input.tokens, poison);
  const Stream stream;
  operands.enqueue(layer, workspace.span(), stream.get());
  stream.synchronize();
  workspace.check_guard();
  return operands.outcome();
}

Outcome forward(const MoeLayer& layer, const Input& input) {
  const LayerConfig& c = layer.config();
  Outcome result;
  result.y.assign(input.x.size(), kBetweenRows);
  result.saturated = static_cast<unsigned long long>(layer.forward(
      {input.x.data(), input.tokens, c.hidden}, {input.ids.data(), input.tokens, c.top_k},
      {input.weights.data(), input.tokens, c.top_k}, {result.y.data(), input.tokens, c.hidden}));
  return result;
}

// The backend's operations one after the other, on host memory.
Outcome run_by_steps(MoeLayer& layer, const Input& input) {
  std::size_t stages = 0;
  layer.on_stage([&](const Stage&) { ++stages; });
  Outcome result = forward(layer, input);
  layer.on_stage({});
  EXPECT_TRUE(stages > 5 || input.tokens == 0);
  return result;
}

class PassTest : public cuda::GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped()) return;
    for (const Backend* backend : all_backends()) {
      if (backend->name() == "hopper" && backend->supported()) return;
    }
    GTEST_SKIP() << "no Hopper GPU";
  }
};

TEST_F(PassTest, EqualsTheStepsForEveryLayerAndOption) {
  unsigned long long saturated = 0;
  for (const LayerKind& kind : kKinds) {
    const LayerConfig config = small_config(kind);
    const auto layer = make_layer(config, kind);
    for (const MoeLayerOptions& options : all_options(config.activation.gated())) {
      MoeLayer moe(layer->weights, options);
      ASSERT_TRUE(moe.on_gpu());
      for (const std::int64_t tokens : {1, 3, 17, 129, 600}) {
        SCOPED_TRACE(::testing::Message()
                     << kind.name << ", " << describe(options) << ", " << tokens << " tokens");
        const Input input = random_input(config, tokens, static_cast<std::uint64_t>(tokens));
        const Outcome want = run_by_steps(moe, input);
        expect_same(run_on_stream(moe, input, tokens % 2 == 0 ? 0 : 24), want);
        saturated += want.saturated;
        if (HasFailure()) return;
      }
    }
  }
  EXPECT_GT(saturated, 0u);
}

TEST_F(PassTest, EqualsTheStepsForEveryRouting) {
  for (const LayerKind& kind : kKinds) {
    const LayerConfig config = small_config(kind);
    const auto layer = make_layer(config, kind);
    std::vector<MoeLayerOptions> all = some_options();
    if (!config.activation.gated()) all.pop_back();
    for (const MoeLayerOptions& options : all) {
      MoeLayer moe(layer->weights, options);
      for (const std::int64_t tokens : {1, 17, 129, 600}) {
        for (std::uint64_t turn = 0; turn < 5; ++turn) {
          SCOPED_TRACE(::testing::Message() << kind.name << ", " << describe(options) << ", " << tokens
                                            << " tokens, routing " << turn);
          const Input input = routed_input(config, tokens, turn);
          expect_same(run_on_stream(moe, input), run_by_steps(moe, input));
          if (HasFailure()) return;
        }
      }
    }
  }
}

// Sums long enough that another order of them would show.
TEST_F(PassTest, EqualsTheStepsForLongSums) {
  const LayerConfig config = make_config(2048, 1024, 8, 2, kKinds[1].activation);
  const auto layer = make_layer(config, kKinds[1]);
  for (const MoeLayerOptions& options : some_options()) {
    MoeLayer moe(layer->weights, options);
    for (const std::int64_t tokens : {1, 7, 30, 129, 600}) {
      SCOPED_TRACE(::testing::Message() << describe(options) << ", " << tokens << " tokens");
      const Input input = routed_input(config, tokens, tokens == 30 ? 2 : 0);
      expect_same(run_on_stream(moe, input), run_by_steps(moe, input));
    }
  }
}

// Sums of four warpgroups and of one, {8, 1} and {8, 4}, differ in their order; in enough numbers that it
// shows.
TEST_F(PassTest, TakesTheTilesThatMeasurementsSayAndThoseThatAreForced) {
  const LayerConfig config = make_config(2048, 4096, 2, 2);
  const auto layer = make_layer(config, kKinds[0]);
  const Input input = random_input(config, 8, 1);
  ASSERT_EQ(sm90::choose_tile(sm90::OperandType::kBf16, 16, 2), (sm90::TileChoice{8, 1}));
  // What the second GEMM leaves; the pass on a stream takes the same tiles.
  const auto expert_out = [&] {
    MoeLayer moe(layer->weights, bf16_options());
    std::vector<float> out;
    moe.on_stage([&](const Stage& stage) {
      const auto* data = static_cast<const float*>(stage.data);
      if (stage.name == "expert_out") out.assign(data, data + stage.shape[0] * stage.shape[1]);
    });
    const Outcome by_steps = forward(moe, input);
    expect_same(run_on_stream(moe, input), by_steps);
    return out;
  };
  const auto with_forced = [&](const sm90::TileChoice& first, const sm90::TileChoice& second) {
    const sm90::ForcedTiles forced(first, second);
    return expert_out();
  };
  const std::vector<float> usual = expert_out();
  EXPECT_EQ(with_forced({8, 1}, {8, 1}), usual);
  const std::vector<float> first = with_forced({8, 4}, {8, 1}), second = with_forced({8, 1}, {8, 4});
  EXPECT_NE(first, usual);
  EXPECT_NE(second, usual);
  EXPECT_NE(second, first);

  const TempDir folder;
  const std::filesystem::path path = folder / "tiles.txt";
  for (const auto& [line, want] : {std::pair{"bf16 first 8192 2048 2 16 8x4 1\n", &first},
                                   {"bf16 second 2048 4096 2 16 8x4 1\n", &second},
                                   {"bf16 second 2048 4096 2 17 8x4 1\n", &usual},  // not few any more
                                   {"bf16 first 8192 2048 2 32 8x4 1\n", &usual},
                                   {"nvfp4 first 8192 2048 2 16 8x4 1\n", &usual}}) {
    SCOPED_TRACE(line);
    write_file_atomically(path, line);
    const ForcedVariable forced("MEGAMOE_TILES", path.string());
    EXPECT_EQ(expert_out(), *want);
  }
}

TEST_F(PassTest, NoTokensAndNobody) {
  const LayerConfig config = small_config(kKinds[0]);
  const auto layer = make_layer(config, kKinds[0]);
  for (const MoeLayerOptions& options : some_options()) {
    SCOPED_TRACE(describe(options));
    const MoeLayer moe(layer->weights, options);
    EXPECT_GE(moe.stream_workspace_bytes(0), 0);
    moe.forward_on_stream({nullptr, 0, config.hidden}, {nullptr, 0, config.top_k}, {nullptr, 0, config.top_k},
                          {nullptr, 0, config.hidden}, bytes_of(nullptr, moe.stream_workspace_bytes(0)),
                          nullptr);
    EXPECT_TRUE(forward(moe, random_input(config, 0, 1)).y.empty());
    Input nobody = random_input(config, 17, 2);
    std::fill(nobody.ids.begin(), nobody.ids.end(), -1);
    const Outcome got = run_on_stream(moe, nobody, 8);
    EXPECT_TRUE(std::all_of(got.y.begin(), got.y.end(), [](bf16 v) { return v.bits == 0; }));
  }
}

TEST_F(PassTest, WhatTheWorkspaceHeldDoesNotMatter) {
  const LayerConfig config = small_config(kKinds[2]);
  const auto layer = make_layer(config, kKinds[2]);
  for (const MoeLayerOptions& options : some_options()) {
    const MoeLayer moe(layer->weights, options);
    for (const std::int64_t tokens : {1, 17, 129}) {
      for (const std::uint64_t turn : {0, 2}) {
        SCOPED_TRACE(::testing::Message() << describe(options) << ", " << tokens << " tokens");
        const Input input = routed_input(config, tokens, turn);
        const Outcome want = run_on_stream(moe, input, 0, 0x7F);
        expect_same(run_on_stream(moe, input, 0, 0xFF), want);
        expect_same(run_on_stream(moe, input, 0, 0x00), want);
      }
    }
  }
}

TEST_F(PassTest, RepeatsGiveTheSameBits) {
  const LayerConfig config = make_config(2048, 1024, 8, 2);
  const auto layer = make_layer(config, kKinds[1]);
  for (const MoeLayerOptions& options : some_options()) {
    const MoeLayer moe(layer->weights, options);
    for (const std::int64_t tokens : {1, 17, 129}) {
      SCOPED_TRACE(::testing::Message() << describe(options) << ", " << tokens << " tokens");
      Operands operands(moe, tokens);
      const Input input = routed_input(config, tokens, 0);
      const PoisonedWorkspace workspace(moe, tokens, 0xFF);
      const Stream stream;
      std::optional<Outcome> first;
      for (int repeat = 0; repeat < 200; ++repeat) {
        if (repeat % 50 == 0) operands.set(input);  // y is poison again
        operands.set_status({});
        operands.enqueue(moe, workspace.span(), stream.get());
        stream.synchronize();
        if (!first) first = operands.outcome();
        expect_same(operands.outcome(), *first);
        if (HasFailure()) return;
      }
    }
  }
}

// A CUDA graph of what `record` puts on the stream.
class Graph {
 public:
  Graph(cudaStream_t stream, const std::function<void()>& record) : stream_(stream) {
    cuda_check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "starting a capture");
    record();
    cuda_check(cudaStreamEndCapture(stream, &graph_), "ending a capture");
    cuda_check(cudaGraphInstantiate(&executable_, graph_, 0), "making a graph");
  }
  ~Graph() {
    cudaGraphExecDestroy(executable_);
    cudaGraphDestroy(graph_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() const { cuda_check(cudaGraphLaunch(executable_, stream_), "launching a graph"); }
  std::int64_t kernels() const {
    std::size_t count = 0;
    cuda_check(cudaGraphGetNodes(graph_, nullptr, &count), "counting a graph's nodes");
    std::vector<cudaGraphNode_t> nodes(count);
    cuda_check(cudaGraphGetNodes(graph_, nodes.data(), &count), "listing a graph's nodes");
    return std::count_if(nodes.begin(), nodes.end(), [](cudaGraphNode_t node) {
      cudaGraphNodeType type{};
      cuda_check(cudaGraphNodeGetType(node, &type), "asking what a graph's node is");
      return type == cudaGraphNodeTypeKernel;
    });
  }

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// Run on its own this is the first thing that the process does on the GPU, the loading of weights aside.
TEST_F(PassTest, IsCapturedByItsVeryFirstCall) {
  const LayerConfig config = small_config(kKinds[1]);
  const auto layer = make_layer(config, kKinds[1]);
  for (const MoeLayerOptions& options : some_options()) {
    for (const std::int64_t tokens : {1, 17, 129}) {
      SCOPED_TRACE(::testing::Message() << describe(options) << ", " << tokens << " tokens");
      const MoeLayer moe(layer->weights, options);
      Operands operands(moe, tokens, 8);
      operands.set(random_input(config, tokens, 1));
      const PoisonedWorkspace workspace(moe, tokens, 0x7F);
      const Stream stream;
      const Graph graph(stream.get(), [&] { operands.enqueue(moe, workspace.span(), stream.get()); });
      unsigned long long saturated = 0;
      for (std::uint64_t replay = 0; replay < 50; ++replay) {
        const Input input = routed_input(config, tokens, replay);
        operands.set(input);
        graph.launch();
        stream.synchronize();
        Outcome want = run_on_stream(moe, input);
        saturated += want.saturated;  // a graph's passes add up
        want.saturated = saturated;
        expect_same(operands.outcome(), want);
        if (HasFailure()) return;
      }
      workspace.check_guard();
    }
  }
}

// With every kernel's first launch under capture, whatever the number of tokens.
TEST_F(PassTest, ManySizesAreCapturedWithoutAnEagerCall) {
  const LayerConfig config = small_config(kKinds[3]);
  const auto layer = make_layer(config, kKinds[3]);
  const MoeLayer moe(layer->weights, nvfp4_options(ScaleSource::kDynamicRow, ScaleSource::kDynamicTensor));
  for (const std::int64_t tokens : {1, 2, 5, 10, 20, 40, 80, 160, 320, 2000}) {
    Operands operands(moe, tokens);
    const Input input = random_input(config, tokens, 3);
    operands.set(input);
    const PoisonedWorkspace workspace(moe, tokens, 0x7F);
    const Stream stream;
    const Graph graph(stream.get(), [&] { operands.enqueue(moe, workspace.span(), stream.get()); });
    graph.launch();
    stream.synchronize();
    expect_same(operands.outcome(), run_on_stream(moe, input));
  }
}

// A pass begins while the one before still runs, in the same memory, over another routing.
TEST_F(PassTest, PassesInARowShareAWorkspace) {
  const LayerConfig config = small_config(kKinds[1]);
  const auto layer = make_layer(config, kKinds[1]);
  for (const MoeLayerOptions& options : some_options()) {
    const MoeLayer moe(layer->weights, options);
    for (const std::int64_t tokens : {1, 17, 129, 2000}) {
      SCOPED_TRACE(::testing::Message() << describe(options) << ", " << tokens << " tokens");
      std::vector<Input> inputs;
      std::vector<Outcome> want;
      std::vector<std::unique_ptr<Operands>> passes;
      for (std::uint64_t turn = 0; turn < 12; ++turn) {
        inputs.push_back(routed_input(config, tokens, turn));
        want.push_back(run_on_stream(moe, inputs.back()));
        passes.push_back(std::make_unique<Operands>(moe, tokens));
      }
      const PoisonedWorkspace workspace(moe, tokens, 0x7F);
      const Stream stream;
      const auto enqueue = [&] {
        for (const auto& pass : passes) pass->enqueue(moe, workspace.span(), stream.get());
      };
      const auto run_all = [&](const std::function<void()>& run) {
        for (std::size_t i = 0; i < passes.size(); ++i) {
          passes[i]->set(inputs[i]);
          passes[i]->set_status({});
        }
        run();
        stream.synchronize();
        for (std::size_t i = 0; i < passes.size(); ++i) expect_same(passes[i]->outcome(), want[i]);
      };
      run_all(enqueue);
      const Graph graph(stream.get(), enqueue);
      run_all([&] { graph.launch(); });
      workspace.check_guard();
      if (HasFailure()) return;
    }
  }
}

TEST_F(PassTest, TwoThreadsOnTwoStreams) {
  const LayerConfig config = make_config(512, 256, 8, 2);
  const auto layer = make_layer(config, kKinds[1]);
  for (const MoeLayerOptions& options : some_options()) {
    SCOPED_TRACE(describe(options));
    const MoeLayer moe(layer->weights, options);
    const auto work = [&](std::int64_t tokens, std::uint64_t seed) {
      const Stream stream;
      const PoisonedWorkspace workspace(moe, tokens, 0xFF);
      Operands operands(moe, tokens);
      std::vector<Input> inputs;
      std::vector<Outcome> want;
      for (std::uint64_t turn = 0; turn < 5; ++turn) {
        inputs.push_back(routed_input(config, tokens, seed + turn));
        want.push_back(run_on_stream(moe, inputs.back()));
      }
      for (std::size_t i = 0; i < 100; ++i) {
        operands.set(inputs[i % 5]);
        operands.set_status({});
        operands.enqueue(moe, workspace.span(), stream.get());
        stream.synchronize();
        expect_same(operands.outcome(), want[i % 5]);
      }
      workspace.check_guard();
    };
    std::thread other([&] { work(129, 10); });
    work(17, 20);
    other.join();
  }
}

// ---- Both GEMMs in one launch

// Routings of few tokens: by turns random, all to one expert, duplicates, somebody left out, ids out of
// range.
Input few_input(const LayerConfig& config, std::int64_t tokens, std::uint64_t turn) {
  Input input = random_input(config, tokens, 2000 + turn);
  for (std::size_t i = 0; i < input.ids.size(); ++i) {
    const auto last = static_cast<std::int32_t>(config.num_experts - 1);
    switch (turn % 5) {
      case 1: input.ids[i] = last; break;
      case 2: input.ids[i] = i % 2 == 0 ? 0 : last; break;
      case 3:
        if (i % 3 == 0) input.ids[i] = -1;
        if (i % 3 == 1) input.weights[i] = 0.0f;
        break;
      case 4: input.ids[i] = i % 3 == 1 ? last + 1 : i % 3 == 2 ? INT32_MIN : input.ids[i]; break;
      default: break;
    }
  }
  return input;
}
// What the steps make of it, which take no ids out of range.
Outcome few_by_steps(MoeLayer& layer, Input input) {
  unsigned long long bad_id = ~0ull;
  for (std::size_t i = input.ids.size(); i-- > 0;) {
    if (input.ids[i] >= -1 && input.ids[i] < layer.config().num_experts) continue;
    input.ids[i] = -1;
    bad_id = i;
  }
  Outcome result = run_by_steps(layer, input);
  result.bad_id = bad_id;
  return result;
}
std::vector<MoeLayerOptions> few_options() {
  return {bf16_options(), nvfp4_options(ScaleSource::kStatic, ScaleSource::kStatic),
          nvfp4_options(ScaleSource::kDynamicRow, ScaleSource::kStaticLayerMax),
          nvfp4_options(ScaleSource::kStaticLayerMax, ScaleSource::kStatic),
          nvfp4_options(ScaleSource::kDynamicTensor, ScaleSource::kStatic)};
}

// Whatever the number of rows, all experts' or one's, up to the most that there may be.
TEST_F(PassTest, FewRowsEqualTheSteps) {
  const sm90::ForcedTiles forced(sm90::kFewTile, sm90::kFewTile);
  struct Geometry {
    std::int64_t hidden, intermediate, experts;
    int top_k;
  };
  for (const Geometry& g : {Geometry{144, 80, 5, 3},
                            {16, 16, 1, 1},
                            {2880, 1008, 6, 4},
                            {4096, 1040, 6, 6},
                            {528, 16, 40, 8},
                            {16, 1040, 3, 1}}) {
    for (const LayerKind& kind : kKinds) {
      const LayerConfig config = make_config(g.hidden, g.intermediate, g.experts, g.top_k, kind.activation);
      const auto layer = make_layer(config, kind);
      for (const MoeLayerOptions& options : few_options()) {
        MoeLayer moe(layer->weights, options);
        for (const std::int64_t tokens : {1, 2, sm90::kWarpPairs / g.top_k, sm90::kWarpPairs / g.top_k + 1,
                                          50, sm90::kFewRows / g.top_k}) {
          const bool many = tokens * g.top_k > 2 * sm90::kWarpPairs;  // the steps take long then
          for (const std::uint64_t turn : {0, 1, 2, 3, 4}) {
            if (many && turn != 1 && turn != 3) continue;
            SCOPED_TRACE(::testing::Message() << g.hidden << " x " << g.intermediate << ", " << g.experts
                                              << " experts, " << kind.name << ", " << describe(options)
                                              << ", " << tokens << " tokens, routing " << turn);
            const Input input = few_input(config, tokens, turn);
            const Outcome want = few_by_steps(moe, input);
            for (const int poison : {0x00, 0x7F, 0xFF}) {
              if (!many || poison == 0x7F)
                expect_same(run_on_stream(moe, input, tokens % 2 == 0 ? 8 : 0, poison), want);
            }
            if (HasFailure()) return;
          }
        }
      }
    }
  }
}

// Which way is taken shows in nothing but time and launches.
TEST_F(PassTest, FewRowsTakeFewLaunches) {
  const auto launches = [](const LayerKind& kind, const MoeLayerOptions& options, std::int64_t tokens) {
    const LayerConfig config = make_config(144, 80, 20, 3, kind.activation);
    const auto layer = make_layer(config, kind);
    const MoeLayer moe(layer->weights, options);
    Operands operands(moe, tokens);
    operands.set(random_input(config, tokens, 1));
    const PoisonedWorkspace workspace(moe, tokens, 0x7F);
    const Stream stream;
    return Graph(stream.get(), [&] { operands.enqueue(moe, workspace.span(), stream.get()); }).kernels();
  };
  const LayerKind &alone = kKinds[0], &shared = kKinds[1];
  ASSERT_EQ(shared.shared, Shared::kGated);
  const MoeLayerOptions w4a4 = nvfp4_options(ScaleSource::kStatic, ScaleSource::kStatic);
  EXPECT_EQ(launches(alone, bf16_options(), 10), 2);  // 30 pairs
  EXPECT_EQ(launches(alone, bf16_options(), 11), 3);
  EXPECT_EQ(launches(alone, bf16_options(), 33), 3);  // five rows an expert
  EXPECT_EQ(launches(alone, bf16_options(), 34), 5);
  EXPECT_EQ(launches(alone, w4a4, 10), 3);
  EXPECT_EQ(launches(alone, w4a4, 11), 4);
  EXPECT_EQ(launches(alone, w4a4, 34), 5);
  EXPECT_EQ(launches(alone, nvfp4_options(ScaleSource::kDynamicTensor, ScaleSource::kStatic), 10), 5);
  EXPECT_EQ(launches(shared, bf16_options(), 1), 6);
  EXPECT_EQ(launches(shared, bf16_options(), 33), 6);
  EXPECT_EQ(launches(shared, bf16_options(), 34), 8);
}

// In one workspace, one after the other, without waiting: passes of few rows and, of as many, others.
TEST_F(PassTest, FewRowsAndOthersInARow) {
  for (const bool shared : {false, true}) {
    for (const MoeLayerOptions& options : few_options()) {
      const LayerConfig config = small_config(kKinds[shared]);
      const auto layer = make_layer(config, kKinds[shared]);
      const MoeLayer moe(layer->weights, options);
      for (const std::int64_t tokens : {10, 11, 17}) {
        SCOPED_TRACE(::testing::Message() << describe(options) << ", " << tokens << " tokens");
        std::vector<Outcome> want;
        std::vector<std::unique_ptr<Operands>> passes;
        const auto with_tiles = [](std::size_t pass, const auto& run) {
          const sm90::TileChoice tile = pass % 3 == 2 ? sm90::TileChoice{16, 4} : sm90::kFewTile;
          const sm90::ForcedTiles forced(tile, tile);
          run();
        };
        for (std::size_t i = 0; i < 12; ++i) {
          const Input input = few_input(config, tokens, i);
          with_tiles(i, [&] { want.push_back(run_on_stream(moe, input)); });
          passes.push_back(std::make_unique<Operands>(moe, tokens));
          passes.back()->set(input);
        }
        const PoisonedWorkspace workspace(moe, tokens, 0x7F);
        const Stream stream;
        const Graph graph(stream.get(), [&] {
          for (std::size_t i = 0; i < passes.size(); ++i)
            with_tiles(i, [&] { passes[i]->enqueue(moe, workspace.span(), stream.get()); });
        });
        graph.launch();
        stream.synchronize();
        for (std::size_t i = 0; i < passes.size(); ++i) expect_same(passes[i]->outcome(), want[i]);
        workspace.check_guard();
        if (HasFailure()) return;
      }
    }
  }
}

// Passes of two layers at once, in graphs: not all CTAs of either fit on the GPU then.
TEST_F(PassTest, FewRowsOfTwoLayersAtOnce) {
  constexpr std::uint64_t kPasses = 10;
  struct Side {
    std::unique_ptr<TestLayer> layer;
    std::unique_ptr<MoeLayer> moe;
    std::vector<std::unique_ptr<Operands>> passes;
    std::vector<Outcome> want;
    std::unique_ptr<PoisonedWorkspace> workspace;
    Stream stream;
    std::unique_ptr<Graph> graph;
  };
  for (const MoeLayerOptions& options : few_options()) {
    for (const std::int64_t tokens : {2, 10}) {
      SCOPED_TRACE(::testing::Message() << describe(options) << ", " << tokens << " tokens");
      Side sides[2];
      for (Side& side : sides) {
        const bool first = &side == sides;
        const LayerConfig config = first ? make_config(2048, 768, 16, 8) : make_config(1024, 2880, 8, 4);
        side.layer = make_layer(config, kKinds[0]);
        side.moe = std::make_unique<MoeLayer>(side.layer->weights, options);
        side.workspace = std::make_unique<PoisonedWorkspace>(*side.moe, tokens, 0xFF);
        for (std::uint64_t turn = 0; turn < kPasses; ++turn) {
          const Input input = few_input(config, tokens, turn);
          side.want.push_back(few_by_steps(*side.moe, input));
          side.passes.push_back(std::make_unique<Operands>(*side.moe, tokens));
          side.passes.back()->set(input);
        }
        side.graph = std::make_unique<Graph>(side.stream.get(), [&] {
          for (const auto& pass : side.passes)
            pass->enqueue(*side.moe, side.workspace->span(), side.stream.get());
        });
      }
      cuda_check(cudaDeviceSynchronize(), "testing");
      constexpr int kReplays = 100;
      for (int replay = 0; replay < kReplays; ++replay) {
        for (const Side& side : sides) side.graph->launch();
      }
      for (Side& side : sides) {
        side.stream.synchronize();
        for (std::size_t i = 0; i < kPasses; ++i) {
          Outcome want = side.want[i];
          want.saturated *= kReplays;  // a graph's passes add up
          expect_same(side.passes[i]->outcome(), want);
        }
        side.workspace->check_guard();
      }
      if (HasFailure()) return;
    }
  }
}

TEST_F(PassTest, IdsOutOfRangeAreReportedAndLeftOut) {
  const LayerConfig config = small_config(kKinds[0]);
  const auto layer = make_layer(config, kKinds[0]);
  for (const MoeLayerOptions& options : some_options()) {
    SCOPED_TRACE(describe(options));
    const MoeLayer moe(layer->weights, options);
    const Input good = routed_input(config, 17, 0);
    Input bad = good, without = good;
    for (const auto& [pair, id] : {std::pair<std::size_t, std::int32_t>{13, -2}, {20, 5}, {50, INT32_MAX}}) {
      bad.ids[pair] = id;
      without.ids[pair] = -1;
    }
    Outcome want = run_on_stream(moe, without);
    EXPECT_EQ(want.bad_id, ~0ull);
    want.bad_id = 13;  // token 4, slot 1
    expect_same(run_on_stream(moe, bad), want);

    // What was noted stays noted, unless something stands before it.
    Operands operands(moe, 17);
    const PoisonedWorkspace workspace(moe, 17, 0x7F);
    const Stream stream;
    unsigned long long saturated = 1000;
    operands.set_status({.saturated = 1000, .bad_id = 20});
    for (const auto& [input, bad_id] : {std::pair{&good, 20ull}, {&bad, 13ull}, {&good, 13ull}}) {
      operands.set(*input);
      operands.enqueue(moe, workspace.span(), stream.get());
      stream.synchronize();
      saturated += run_on_stream(moe, *input).saturated;
      EXPECT_EQ(operands.outcome().bad_id, bad_id);
      EXPECT_EQ(operands.outcome().saturated, saturated);
    }
    // Nobody asks.
    operands.set(bad);
    operands.enqueue(moe, workspace.span(), stream.get(), false);
    stream.synchronize();
    EXPECT_TRUE(same_bytes(operands.outcome().y, want.y));
  }
}

TEST_F(PassTest, HostMemoryGoesTheSameWay) {
  const LayerConfig config = small_config(kKinds[2]);
  const auto layer = make_layer(config, kKinds[2]);
  for (const MoeLayerOptions& options : some_options()) {
    SCOPED_TRACE(describe(options));
    MoeLayer moe(layer->weights, options);
    for (const std::int64_t tokens : {17, 600, 1, 129}) {  // the buffers grow and stay
      const Input input = routed_input(config, tokens, 0);
      expect_same(forward(moe, input), run_by_steps(moe, input));
    }
    // All four with room between their rows.
    const Input input = routed_input(config, 17, 0);
    const auto spread = [&]<class T>(const std::vector<T>& values, std::int64_t cols, T between) {
      std::vector<T> wide(static_cast<std::size_t>(17 * (cols + 3)), between);
      for (std::int64_t t = 0; t < 17; ++t)
        std::copy_n(values.begin() + t * cols, cols, wide.begin() + t * (cols + 3));
      return wide;
    };
    const std::vector<bf16> x = spread(input.x, config.hidden, kBetweenRows);
    const std::vector<std::int32_t> ids = spread(input.ids, config.top_k, 1 << 30);
    const std::vector<float> weights = spread(input.weights, config.top_k, 1e30f);
    std::vector<bf16> y(x.size(), kBetweenRows);
    moe.forward({x.data(), 17, config.hidden, config.hidden + 3},
                {ids.data(), 17, config.top_k, config.top_k + 3},
                {weights.data(), 17, config.top_k, config.top_k + 3},
                {y.data(), 17, config.hidden, config.hidden + 3});
    EXPECT_TRUE(same_bytes(y, spread(forward(moe, input).y, config.hidden, kBetweenRows)));
    // Threads take turns.
    const Input other_input = routed_input(config, 129, 1);
    const Outcome want = forward(moe, input), other_want = forward(moe, other_input);
    std::thread other([&] {
      for (int i = 0; i < 20; ++i) expect_same(forward(moe, other_input), other_want);
    });
    for (int i = 0; i < 20; ++i) expect_same(forward(moe, input), want);
    other.join();

    Input bad = input;
    bad.ids[13] = 5;
    expect_error(ErrorCode::kInvalidArgument, {"id 5", "token 4", "slot 1", "0 to 4"},
                 [&] { forward(moe, bad); });
  }
}

TEST_F(PassTest, RefusesWhatItCannotRead) {
  const LayerConfig config = small_config(kKinds[0]);
  const auto layer = make_layer(config, kKinds[0]);
  const MoeLayer moe(layer->weights, bf16_options());
  const std::int64_t bytes = moe.stream_workspace_bytes(4);
  const DeviceArray<std::byte> memory(bytes + 256);
  const DeviceArray<bf16> x(4 * 200), y(4 * 200);
  const DeviceArray<std::int32_t> ids(4 * 5);
  const DeviceArray<float> weights(4 * 5);
  struct Call {
    std::int64_t x_from = 0, x_stride = 144, id_stride = 3, weight_stride = 3, y_stride = 144;
    std::int64_t workspace_from = 0, workspace_bytes;
  };
  const auto call = [&](const Call& c) {
    moe.forward_on_stream({x.data() + c.x_from, 4, 144, c.x_stride}, {ids.data(), 4, 3, c.id_stride},
                          {weights.data(), 4, 3, c.weight_stride}, {y.data(), 4, 144, c.y_stride},
                          bytes_of(memory.data() + c.workspace_from, c.workspace_bytes), nullptr);
  };
  const auto refused = [&](const std::vector<std::string>& parts, const Call& c) {
    expect_error(ErrorCode::kInvalidArgument, parts, [&] { call(c); });
  };
  refused({"ids", "contiguous", "3", "5"}, {.id_stride = 5, .workspace_bytes = bytes});
  refused({"weights", "contiguous", "3", "4"}, {.weight_stride = 4, .workspace_bytes = bytes});
  refused({"rows of x", "16 bytes"}, {.x_from = 4, .workspace_bytes = bytes});
  refused({"rows of x", "16 bytes", "296"}, {.x_stride = 148, .workspace_bytes = bytes});
  refused({"row stride of 100"}, {.y_stride = 100, .workspace_bytes = bytes});
  refused({"4 tokens", std::to_string(bytes), std::to_string(bytes - 1)}, {.workspace_bytes = bytes - 1});
  refused({"256 bytes"}, {.workspace_from = 128, .workspace_bytes = bytes});
  expect_error(ErrorCode::kInvalidArgument, {"-1"}, [&] { moe.stream_workspace_bytes(-1); });
  expect_error(ErrorCode::kUnsupported, {"2147483647", "(token, slot) pairs", "1000000000"},
               [&] { moe.stream_workspace_bytes(1000000000); });
  expect_error(ErrorCode::kOutOfMemory, {}, [&] { moe.stream_workspace_bytes(INT64_MAX / 2); });
  cuda_check(cudaDeviceSynchronize(), "testing");  // nothing was started
}

TEST_F(PassTest, ASharedExpertInBf16IsRefusedOrGoesToTheCpu) {
  const LayerConfig config = small_config(kKinds[1]);
  const auto layer = make_layer(config, kKinds[1]);
  Random random(3);
  layer->weights.shared.weights.down =
      layer->random(WeightFormat::kBf16, config.hidden, config.intermediate + 48, random);
  MoeLayerOptions options = fp8_options();
  expect_error(ErrorCode::kUnsupported,
               {"'hopper'", "bf16 activations with bf16 weights", "the shared expert of", "another backend"},
               [&] { MoeLayer(layer->weights, options); });
  options.backend = "";
  EXPECT_EQ(MoeLayer(layer->weights, options).backend(), "cpu");
}

TEST_F(PassTest, TheCurrentDeviceStaysWhatItWas) {
  if (cuda::device_count() < 2) GTEST_SKIP() << "one GPU alone";
  const LayerConfig config = small_config(kKinds[1]);
  const auto layer = make_layer(config, kKinds[1]);
  for (const MoeLayerOptions& options : some_options()) {
    SCOPED_TRACE(describe(options));
    const Input input = routed_input(config, 17, 0);
    const Outcome want = run_on_stream(MoeLayer(layer->weights, options), input);
    std::optional<MoeLayer> moe;
    std::optional<Operands> operands;
    std::optional<PoisonedWorkspace> workspace;
    std::optional<Stream> stream;
    {
      const cuda::DeviceScope second(1);
      moe.emplace(layer->weights, options);
      operands.emplace(*moe, 17);
      operands->set(input);
      workspace.emplace(*moe, 17, 0x7F);
      stream.emplace();
    }
    EXPECT_EQ(cuda::current_device(), 0);
    operands->enqueue(*moe, workspace->span(), stream->get());
    EXPECT_EQ(cuda::current_device(), 0);
    stream->synchronize();
    expect_same(operands->outcome(), want);
    expect_same(forward(*moe, input), want);
    expect_same(run_by_steps(*moe, input), want);
    EXPECT_EQ(cuda::current_device(), 0);
  }
}

// For compute-sanitizer: little work, memory that nothing has filled, every kernel of a pass.
TEST_F(PassTest, SmallPasses) {
  for (const LayerKind& kind : kKinds) {
    const LayerConfig config = small_config(kind);
    const auto layer = make_layer(config, kind);
    std::vector<MoeLayerOptions> all = some_options();
    if (!config.activation.gated()) all.pop_back();
    all.push_back(fp8_options(L1::kCompact));
    all.push_back(nvfp4_options(ScaleSource::kStaticLayerMax, ScaleSource::kStatic, L1::kCompact));
    for (const MoeLayerOptions& options : all) {
      SCOPED_TRACE(::testing::Message() << kind.name << ", " << describe(options));
      const MoeLayer moe(layer->weights, options);
      // Few rows sorted by each CTA, as usual, and few that the sort has sorted.
      for (const std::int64_t tokens : {1, 9, 11}) {
        std::optional<sm90::ForcedTiles> forced;
        if (tokens == 11) {
          if (options.activations == ActivationFormat::kFp8) continue;
          forced.emplace(sm90::kFewTile, sm90::kFewTile);
        }
        const Input input = routed_input(config, tokens, tokens == 1 ? 0 : 2);
        Operands operands(moe, tokens, 8);
        operands.set(input);
        const std::int64_t bytes = moe.stream_workspace_bytes(tokens);
        const cuda::DeviceBuffer workspace(bytes);
        const Stream stream;
        operands.enqueue(moe, bytes_of(workspace.data(), bytes), stream.get());
        stream.synchronize();
        expect_same(operands.outcome(), run_on_stream(moe, input));
      }
    }
  }
}

// For compute-sanitizer: sums so long that a piece of work of few rows takes its stages of shared memory
// again.
TEST_F(PassTest, SmallLongSums) {
  const LayerConfig config = make_config(4816, 64, 2, 1, kKinds[0].activation);
  const auto layer = make_layer(config, kKinds[0]);
  for (const MoeLayerOptions& options : few_options()) {
    SCOPED_TRACE(describe(options));
    MoeLayer moe(layer->weights, options);
    const Input input = routed_input(config, 3, 0);
    expect_same(run_on_stream(moe, input), run_by_steps(moe, input));
  }
}

}  // namespace
}  // namespace megamoe::testing
