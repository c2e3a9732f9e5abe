#include "tests/harness.h"

#include <cmath>
#include <cstring>

#include "engine/backends.h"
#include "tests/independent.h"

namespace megamoe::testing {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

template <class T>
std::vector<T> poisoned(std::int64_t count, int poison) {
  std::vector<T> v(size(count));
  if (count > 0) std::memset(static_cast<void*>(v.data()), poison, v.size() * sizeof(T));
  return v;
}

}  // namespace

TestLayer::TestLayer(const LayerConfig& config) {
  weights.config = config;
  weights.name = "test";
  weights.experts.resize(size(config.num_experts));
}

WeightMatrix TestLayer::nvfp4(std::int64_t rows, std::int64_t cols, float tensor_scale,
                              const std::function<int(std::int64_t, std::int64_t)>& code,
                              const std::function<int(std::int64_t, std::int64_t)>& scale) {
  std::vector<std::uint8_t> codes(size(rows * cols / 2)), scales(size(rows * cols / 16));
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t k = 0; k < cols; k += 2) {
      codes[size((r * cols + k) / 2)] = static_cast<std::uint8_t>(code(r, k) + 16 * code(r, k + 1));
    }
    for (std::int64_t b = 0; b < cols / 16; ++b) {
      scales[size(r * (cols / 16) + b)] = static_cast<std::uint8_t>(scale(r, b));
    }
  }
  return nvfp4(rows, cols, tensor_scale, std::move(codes), std::move(scales));
}

WeightMatrix TestLayer::nvfp4(std::int64_t rows, std::int64_t cols, float tensor_scale,
                              std::vector<std::uint8_t> codes, std::vector<std::uint8_t> scales) {
  WeightMatrix w{.format = WeightFormat::kNvfp4, .rows = rows, .cols = cols, .tensor_scale = tensor_scale};
  w.codes = bytes_.emplace_back(std::move(codes)).data();
  w.scales = bytes_.emplace_back(std::move(scales)).data();
  return w;
}

WeightMatrix TestLayer::random(WeightFormat format, std::int64_t rows, std::int64_t cols, Random& random) {
  const float width = 1.0f / std::sqrt(static_cast<float>(cols));
  if (format == WeightFormat::kNvfp4) {
    // Values of a few units before the tensor scale; zero, subnormal and extreme block scales among them.
    return nvfp4(
        rows, cols, width * random.uniform(0.1f, 0.6f),
        [&](std::int64_t, std::int64_t) { return static_cast<int>(random.integer(0, 15)); },
        [&](std::int64_t, std::int64_t) {
          const std::int64_t kind = random.integer(0, 63);
          if (kind == 0) return static_cast<int>(random.integer(0x00, 0x07));
          if (kind == 1) return static_cast<int>(random.integer(0x50, 0x58));
          return static_cast<int>(random.integer(0x2C, 0x3C));
        });
  }
  WeightMatrix w{.format = format, .rows = rows, .cols = cols};
  std::vector<float> values(size(rows * cols));
  for (float& v : values) v = width * random.bell();
  if (format == WeightFormat::kF32)
    w.f32 = floats(std::move(values));
  else
    w.b16 = bf16s_.emplace_back(to_bf16s(values)).data();
  return w;
}

const float* TestLayer::floats(std::vector<float> values) {
  return floats_.emplace_back(std::move(values)).data();
}

LayerConfig make_config(std::int64_t hidden, std::int64_t intermediate, std::int64_t experts, int top_k,
                        ActivationConfig activation) {
  LayerConfig config;
  config.hidden = hidden;
  config.intermediate = intermediate;
  config.num_experts = experts;
  config.top_k = top_k;
  config.activation = activation;
  return config;
}

std::unique_ptr<TestLayer> random_layer(const LayerConfig& config, WeightFormat format, std::uint64_t seed,
                                        bool bias) {
  Random random(seed);
  auto layer = std::make_unique<TestLayer>(config);
  const auto make_bias = [&](std::int64_t count) {
    std::vector<float> values(size(count));
    for (float& v : values) v = random.bell();
    return layer->floats(std::move(values));
  };
  for (ExpertWeights& expert : layer->weights.experts) {
    if (config.activation.gated()) {
      expert.gate = layer->random(format, config.intermediate, config.hidden, random);
      if (bias) expert.gate_bias = make_bias(config.intermediate);
    }
    expert.up = layer->random(format, config.intermediate, config.hidden, random);
    expert.down = layer->random(format, config.hidden, config.intermediate, random);
    if (bias) expert.up_bias = make_bias(config.intermediate);
    if (bias) expert.down_bias = make_bias(config.hidden);
  }
  validate(layer->weights);
  return layer;
}

Rows::Rows(ActivationFormat f, std::int64_t r, std::int64_t c, int poison) : format(f), rows(r), cols(c) {
  switch (format) {
    case ActivationFormat::kBf16: values = poisoned<bf16>(rows * cols, poison); break;
    case ActivationFormat::kFp8:
      codes = poisoned<std::uint8_t>(rows * cols, poison);
      scales = poisoned<float>(rows * ((cols + 127) / 128), poison);
      break;
    case ActivationFormat::kNvfp4:
      codes = poisoned<std::uint8_t>(rows * cols / 2, poison);
      block_scales = poisoned<std::uint8_t>(rows * cols / 16, poison);
      scales = poisoned<float>(rows, poison);
      break;
  }
}

ActivationRows Rows::view() const {
  return {.format = format,
          .rows = rows,
          .cols = cols,
          .row_stride = cols,
          .values = values.data(),
          .codes = codes.data(),
          .block_scales = block_scales.data(),
          .scales = scales.data()};
}

OwnedRouting::OwnedRouting(std::int64_t t, int k, std::int64_t e, int poison)
    : tokens(t),
      top_k(k),
      num_experts(e),
      offsets(poisoned<std::int64_t>(e + 1, poison)),
      row_to_token(poisoned<std::int32_t>(t * k, poison)),
      row_to_slot(poisoned<std::int32_t>(t * k, poison)) {}

Routing OwnedRouting::view() const {
  return {tokens, top_k, num_experts, offsets.data(), row_to_token.data(), row_to_slot.data()};
}

std::vector<bf16> to_bf16s(const std::vector<float>& values) {
  std::vector<bf16> result;
  result.reserve(values.size());
  for (const float v : values) result.push_back(independent::nearest_bf16(v));
  return result;
}

Input random_input(const LayerConfig& config, std::int64_t tokens, std::uint64_t seed) {
  Random random(seed);
  Input input{.tokens = tokens, .x = {}, .ids = {}, .weights = {}};
  std::vector<float> x(size(tokens * config.hidden));
  for (float& v : x) v = random.bell() * (random.integer(0, 40) == 0 ? 8.0f : 1.0f);
  input.x = to_bf16s(x);
  for (std::int64_t i = 0; i < tokens * config.top_k; ++i) {
    const bool nobody = random.integer(0, 15) == 0;
    input.ids.push_back(nobody ? -1 : static_cast<std::int32_t>(random.integer(0, config.num_experts - 1)));
    input.weights.push_back(random.integer(0, 15) == 0 ? 0.0f : random.uniform(-0.2f, 1.0f));
  }
  return input;
}

Input ones_input(const LayerConfig& config, std::int64_t tokens) {
  Input input{.tokens = tokens,
              .x = to_bf16s(std::vector<float>(size(tokens * config.hidden), 1.0f)),
              .ids = {},
              .weights = std::vector<float>(size(tokens * config.top_k), 1.0f)};
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int slot = 0; slot < config.top_k; ++slot) input.ids.push_back(slot);
  }
  return input;
}

RunResult run(const Backend& backend, const LayerWeights& layer, const Input& input,
              const RunOptions& options) {
  const LayerConfig& c = layer.config;
  const int poison = options.poison;
  OwnedRouting routing(input.tokens, c.top_k, c.num_experts, poison);
  backend.sort(input.ids.data(), input.weights.data(), routing.view());
  const std::int64_t rows = routing.rows();

  Rows tokens(ActivationFormat::kBf16, input.tokens, c.hidden, poison);
  tokens.values = input.x;
  Rows x = tokens;
  if (options.format == ActivationFormat::kFp8) {
    x = Rows(options.format, input.tokens, c.hidden, poison);
    backend.quantize_fp8(tokens.view(), x.view());
  } else if (options.format == ActivationFormat::kNvfp4) {
    x = Rows(options.format, options.gathered ? rows : input.tokens, c.hidden, poison);
    std::vector<float> amax(size(input.tokens));
    backend.row_amax(tokens.view(), amax.data());
    for (std::int64_t r = 0; r < x.rows; ++r) {
      const std::int64_t t = options.gathered ? routing.row_to_token[size(r)] : r;
      const float own = amax[size(t)] == 0.0f ? 1.0f : amax[size(t)] / 2688.0f;
      x.scales[size(r)] = options.x_scale != 0.0f ? options.x_scale : own;
    }
    backend.quantize(tokens.view(), options.gathered ? routing.row_to_token.data() : nullptr, x.view());
  }

  const bool interleaved = options.l1 == L1Output::kInterleavedBf16;
  const bool fused = options.l1 == L1Output::kFp8 || options.l1 == L1Output::kNvfp4;
  RunResult result{.routing = std::move(routing),
                   .x = std::move(x),
                   .h_bf16 = Rows(ActivationFormat::kBf16, fused ? 0 : rows,
                                  c.intermediate * (interleaved ? 2 : 1), poison),
                   .h = Rows(options.format, rows, c.intermediate, poison),
                   .expert_out = poisoned<float>(rows * c.hidden, poison),
                   .y = poisoned<bf16>(input.tokens * c.hidden, poison)};
  for (float& scale : result.h.scales) {
    if (options.format == ActivationFormat::kNvfp4) scale = options.h_scale;
  }
  const std::unique_ptr<PreparedLayer> prepared = backend.prepare(layer);
  const Routing view = result.routing.view();
  result.saturated = prepared->gemm1(result.x.view(), options.gathered, view, options.l1,
                                     fused ? result.h.view() : result.h_bf16.view());
  if (options.format == ActivationFormat::kBf16) {
    result.h = result.h_bf16;
  } else if (interleaved) {
    result.saturated = backend.deinterleave_quantize(result.h_bf16.view(), result.h.view());
  } else if (!fused && options.format == ActivationFormat::kFp8) {
    backend.quantize_fp8(result.h_bf16.view(), result.h.view());
  } else if (!fused) {
    result.saturated = backend.quantize(result.h_bf16.view(), nullptr, result.h.view());
  }
  prepared->gemm2(result.h.view(), view, result.expert_out.data());
  backend.combine(result.expert_out.data(), view, input.weights.data(), nullptr,
                  MatrixView<bf16>(result.y.data(), input.tokens, c.hidden));
  return result;
}

std::vector<const Backend*> backends_under_test() {
  std::vector<const Backend*> supported;
  for (const Backend* backend : all_backends()) {
    if (backend->supported()) supported.push_back(backend);
  }
  return supported;
}

std::vector<ActivationFormat> Conformance::formats(WeightFormat weights) const {
  std::vector<ActivationFormat> result;
  for (const ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    if (backend().runs(format, weights)) result.push_back(format);
  }
  return result;
}

bool same(float a, float b) { return (a != a && b != b) || std::memcmp(&a, &b, sizeof(a)) == 0; }
bool same(bf16 a, bf16 b) {
  return a == b || (std::isnan(independent::bf16_value(a)) && std::isnan(independent::bf16_value(b)));
}
bool same(std::uint8_t a, std::uint8_t b) { return a == b; }

}  // namespace megamoe::testing
