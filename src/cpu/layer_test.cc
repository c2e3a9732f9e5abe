// The GEMMs against the reference: bits where both factors are NVFP4, a derived bound elsewhere.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "cpu/cpu_backend.h"
#include "cpu/kernels.h"
#include "cpu/test_kernel.h"
#include "numerics/bf16.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"
#include "ref/ref_backend.h"

namespace megamoe::cpu {
namespace {

using Bytes = std::vector<std::uint8_t>;

// Random weights; what they point at lives in `memory`.
struct RandomLayer {
  std::mt19937 random;
  std::vector<std::vector<float>> floats;
  std::vector<Bytes> bytes;
  std::vector<std::vector<bf16>> halves;
  LayerWeights weights;

  RandomLayer(unsigned seed, std::int64_t hidden, std::int64_t intermediate, std::int64_t experts,
              ActivationConfig activation, WeightFormat format, bool biases)
      : random(seed) {
    weights.config = {.hidden = hidden,
                      .intermediate = intermediate,
                      .num_experts = experts,
                      .top_k = 1,
                      .activation = activation,
                      .router = {}};
    weights.name = "test layer";
    for (std::int64_t e = 0; e < experts; ++e) {
      ExpertWeights& w = weights.experts.emplace_back();
      if (activation.gated()) w.gate = matrix(intermediate, hidden, format);
      w.up = matrix(intermediate, hidden, format);
      w.down = matrix(hidden, intermediate, format);
      if (!biases) continue;
      if (activation.gated()) w.gate_bias = bias(intermediate);
      w.up_bias = bias(intermediate);
      w.down_bias = bias(hidden);
    }
  }

  float normal() { return std::normal_distribution<float>()(random); }

  const float* bias(std::int64_t count) {
    std::vector<float>& values = floats.emplace_back(static_cast<std::size_t>(count));
    for (float& v : values) v = 0.1f * normal();
    return values.data();
  }

  WeightMatrix matrix(std::int64_t rows, std::int64_t cols, WeightFormat format) {
    WeightMatrix w{.format = format, .rows = rows, .cols = cols};
    const auto count = static_cast<std::size_t>(rows * cols);
    switch (format) {
      case WeightFormat::kF32: {
        std::vector<float>& values = floats.emplace_back(count);
        for (float& v : values) v = 0.1f * normal();
        w.f32 = values.data();
        break;
      }
      case WeightFormat::kBf16: {
        std::vector<bf16>& values = halves.emplace_back(count);
        for (bf16& v : values) v = to_bf16(0.1f * normal());
        w.b16 = values.data();
        break;
      }
      case WeightFormat::kNvfp4: {
        Bytes& codes = bytes.emplace_back(count / 2);
        for (auto& v : codes) v = static_cast<std::uint8_t>(random());
        w.codes = codes.data();
        Bytes& scales = bytes.emplace_back(count / 16);
        for (auto& v : scales) v = static_cast<std::uint8_t>(random() % 0x7F);  // subnormals and 448, too
        w.scales = scales.data();
        w.tensor_scale = std::exp2(-10.0f + normal());
        break;
      }
    }
    return w;
  }
};

// Rows of activations in a format, with memory of their own.
struct OwnedRows {
  std::vector<bf16> values;
  Bytes codes, block_scales;
  std::vector<float> scales;
  ActivationRows view;

  OwnedRows(ActivationFormat format, std::int64_t rows, std::int64_t cols, std::int64_t row_stride = 0) {
    view = {.format = format, .rows = rows, .cols = cols, .row_stride = row_stride == 0 ? cols : row_stride};
    values.assign(static_cast<std::size_t>(rows * view.row_stride), bf16{0x7F7F});
    codes.assign(static_cast<std::size_t>(rows * cols), 0x7F);
    block_scales.assign(static_cast<std::size_t>(rows * cols / 16), 0x7F);
    scales.assign(static_cast<std::size_t>(rows * ((cols + 127) / 128)), 0.01f);
    point();
  }
  OwnedRows(const OwnedRows& other)
      : values(other.values),
        codes(other.codes),
        block_scales(other.block_scales),
        scales(other.scales),
        view(other.view) {
    point();
  }
  void point() {
    view.values = values.data();
    view.codes = codes.data();
    view.block_scales = block_scales.data();
    view.scales = scales.data();
  }
  // Any NaN equals any other: which of two a sum keeps is the compiler's choice.
  bool operator==(const OwnedRows& other) const {
    const auto same = [](bf16 a, bf16 b) { return a == b || (is_nan(to_float(a)) && is_nan(to_float(b))); };
    return std::equal(values.begin(), values.end(), other.values.begin(), other.values.end(), same) &&
           codes == other.codes && block_scales == other.block_scales && scales == other.scales;
  }
};

OwnedRows random_rows(std::mt19937& random, ActivationFormat format, std::int64_t rows, std::int64_t cols) {
  std::normal_distribution<float> normal;
  OwnedRows x(ActivationFormat::kBf16, rows, cols, cols + 8);
  for (bf16& v : x.values) v = to_bf16(normal(random));
  if (format == ActivationFormat::kBf16) return x;
  OwnedRows out(format, rows, cols);
  if (format == ActivationFormat::kFp8) {
    ref_backend().quantize_fp8(x.view, out.view);
  } else {
    for (float& g : out.scales) g = 0.001f * (1.0f + std::abs(normal(random)));
    ref_backend().quantize(x.view, nullptr, out.view);
  }
  return out;
}

// Rows of `counts[e]` tokens each in expert order, tokens shuffled.
struct Routed {
  std::vector<std::int64_t> offsets = {0};
  std::vector<std::int32_t> token, slot;
  Routing routing;

  Routed(std::mt19937& random, const std::vector<std::int64_t>& counts) {
    for (const std::int64_t count : counts) offsets.push_back(offsets.back() + count);
    const std::int64_t rows = offsets.back();
    for (std::int64_t r = 0; r < rows; ++r) token.push_back(static_cast<std::int32_t>(r));
    std::shuffle(token.begin(), token.end(), random);
    slot.assign(token.size(), 0);
    routing = {rows, 1, static_cast<std::int64_t>(counts.size()), offsets.data(), token.data(), slot.data()};
  }
};

struct Shape {
  std::int64_t hidden, intermediate;
  std::vector<std::int64_t> counts;  // rows of each expert
};
const Shape kShapes[] = {{16, 16, {1}},
                         {48, 80, {0, 3, 5}},
                         {176, 48, {2, 0, 131}},  // more rows than a slab holds
                         {80, 272, {7, 1, 0, 0, 4}},
                         {256, 176, {4, 130, 2}},
                         {48, 848, {130, 1, 2}}};  // x expanded in pieces

const ActivationConfig kActivations[] = {{.kind = Activation::kSwiGlu},
                                         {.kind = Activation::kSwiGluClamped, .limit = 2.0f},
                                         {.kind = Activation::kGptOss, .limit = 2.0f},
                                         {.kind = Activation::kRelu2}};

class CpuLayerKernels : public ::testing::TestWithParam<Kernel> {
  void SetUp() override {
    if (!GetParam().supported) GTEST_SKIP() << "needs " << GetParam().needs;
    forced_.emplace(GetParam().name);
  }
  std::optional<ForcedKernel> forced_;
};

TEST_P(CpuLayerKernels, Nvfp4HasTheBitsOfTheReference) {
  ASSERT_EQ(chosen_kernel().multiply_nvfp4, GetParam().multiply_nvfp4);
  unsigned seed = 1;
  for (const Shape& shape : kShapes) {
    for (const ActivationConfig& activation : kActivations) {
      SCOPED_TRACE(fmt::format("H {} I {} {}", shape.hidden, shape.intermediate, to_string(activation.kind)));
      ++seed;
      RandomLayer layer(seed, shape.hidden, shape.intermediate,
                        static_cast<std::int64_t>(shape.counts.size()), activation, WeightFormat::kNvfp4,
                        seed % 2 == 0);
      const auto cpu = cpu_backend().prepare(layer.weights), ref = ref_backend().prepare(layer.weights);
      Routed routed(layer.random, shape.counts);
      const std::int64_t rows = routed.offsets.back();
      OwnedRows x = random_rows(layer.random, ActivationFormat::kNvfp4, rows, shape.hidden);
      x.block_scales[0] = kE4M3NaN;  // a fault in one token
      const bool gathered = seed % 3 == 0;

      for (const L1Output mode : {L1Output::kNvfp4, L1Output::kCompactBf16, L1Output::kInterleavedBf16}) {
        const bool interleaved = mode == L1Output::kInterleavedBf16;
        if (interleaved && !activation.gated()) continue;
        OwnedRows h(mode == L1Output::kNvfp4 ? ActivationFormat::kNvfp4 : ActivationFormat::kBf16, rows,
                    interleaved ? 2 * shape.intermediate : shape.intermediate);
        OwnedRows h_ref = h;
        EXPECT_EQ(cpu->gemm1(x.view, gathered, routed.routing, mode, h.view),
                  ref->gemm1(x.view, gathered, routed.routing, mode, h_ref.view));
        EXPECT_TRUE(h == h_ref) << to_string(mode);
      }
      const OwnedRows h = random_rows(layer.random, ActivationFormat::kNvfp4, rows, shape.intermediate);
      std::vector<float> y(static_cast<std::size_t>(rows * shape.hidden)), y_ref(y);
      cpu->gemm2(h.view, routed.routing, y.data());
      ref->gemm2(h.view, routed.routing, y_ref.data());
      EXPECT_EQ(0, std::memcmp(y.data(), y_ref.data(), y.size() * sizeof(float)));
    }
  }
}

// |w| of a matrix's element with its scales, as the path multiplies by it.
double magnitude_of(const WeightMatrix& w, bool folded, std::int64_t r, std::int64_t k) {
  const std::int64_t i = r * w.cols + k;
  if (w.format == WeightFormat::kF32) return std::abs(w.f32[i]);
  if (w.format == WeightFormat::kBf16) return std::abs(to_float(w.b16[i]));
  const std::uint8_t code = nibble(w.codes, i), scale = w.scales[i / 16];
  const float value =
      folded ? 8.0f * decode_e4m3(fp8_fold(code, scale)) : decode_e2m1(code) * decode_e4m3(scale);
  return std::abs(static_cast<double>(value) * w.tensor_scale);
}

double magnitude_of(const ActivationRows& x, std::int64_t r, std::int64_t k) {
  if (x.format == ActivationFormat::kBf16) return std::abs(to_float(x.values[r * x.row_stride + k]));
  const double d = x.scales[r * ((x.cols + 127) / 128) + k / 128];
  return std::abs(decode_e4m3(x.codes[r * x.cols + k]) * d);
}

// Every term of an output passes at most this many FP32 roundings of 2^-24: its product, the additions
// within a group of 128 columns (or a block of 16), the group's factor, the additions of groups (or blocks),
// two scalings and the bias. The reference rounds once more (twice with a bias). Subnormals, which
// avx512-bf16 takes for 0, do not occur.
double rounding_bound(std::int64_t cols) {
  const std::int64_t additions = std::max(128 + cols / 128 + 1, 16 + cols / 16);
  return static_cast<double>(1 + additions + 1 + 3 + 2) * 0x1p-24;
}

void expect_gemm2_within_bound(WeightFormat weights, ActivationFormat format, const Shape& shape,
                               unsigned seed) {
  RandomLayer layer(seed, shape.hidden, shape.intermediate, static_cast<std::int64_t>(shape.counts.size()),
                    kActivations[0], weights, true);
  const auto cpu = cpu_backend().prepare(layer.weights), ref = ref_backend().prepare(layer.weights);
  Routed routed(layer.random, shape.counts);
  const std::int64_t rows = routed.offsets.back();
  const OwnedRows h = random_rows(layer.random, format, rows, shape.intermediate);
  std::vector<float> y(static_cast<std::size_t>(rows * shape.hidden)), y_ref(y);
  cpu->gemm2(h.view, routed.routing, y.data());
  ref->gemm2(h.view, routed.routing, y_ref.data());
  for (std::size_t e = 0; e < shape.counts.size(); ++e) {
    const ExpertWeights& expert = layer.weights.experts[e];
    for (std::int64_t r = routed.offsets[e]; r < routed.offsets[e + 1]; ++r) {
      for (std::int64_t c = 0; c < shape.hidden; c += 5) {
        double sum = std::abs(expert.down_bias[c]);
        for (std::int64_t k = 0; k < shape.intermediate; ++k) {
          sum +=
              magnitude_of(expert.down, format == ActivationFormat::kFp8, c, k) * magnitude_of(h.view, r, k);
        }
        const auto i = static_cast<std::size_t>(r * shape.hidden + c);
        ASSERT_LE(std::abs(static_cast<double>(y[i]) - y_ref[i]), sum * rounding_bound(shape.intermediate))
            << "row " << r << ", column " << c << ": " << y[i] << " instead of " << y_ref[i];
      }
    }
  }
}

TEST_P(CpuLayerKernels, OtherFormatsAreWithinTheRoundingBound) {
  ASSERT_EQ(chosen_kernel().multiply_f32, GetParam().multiply_f32);
  unsigned seed = 100;
  for (const Shape& shape : kShapes) {
    for (const WeightFormat weights : {WeightFormat::kF32, WeightFormat::kBf16, WeightFormat::kNvfp4}) {
      SCOPED_TRACE(fmt::format("H {} I {} {}", shape.hidden, shape.intermediate, to_string(weights)));
      expect_gemm2_within_bound(weights, ActivationFormat::kBf16, shape, ++seed);
    }
    SCOPED_TRACE("fp8");
    expect_gemm2_within_bound(WeightFormat::kNvfp4, ActivationFormat::kFp8, shape, ++seed);
  }
}

// One-hot rows of 1.0 read every folded operand out: of every scale beside its neighbours, then of those in
// whose blocks nothing but zeros lies below E4M3's normal range.
TEST_P(CpuLayerKernels, EveryFoldedOperandIsTheDefinitions) {
  RandomLayer layer(5, 128, 16, 1, kActivations[0], WeightFormat::kNvfp4, false);
  for (const bool normal : {false, true}) {
    Bytes codes(128 * 8), scales(128);
    for (std::size_t r = 0; r < 128; ++r) {
      scales[r] = static_cast<std::uint8_t>(r);  // the last is NaN
      if (normal && r < 0x28) scales[r] = static_cast<std::uint8_t>(r % 3 == 0 ? 0 : r + 0x28);
      for (std::size_t j = 0; j < 8; ++j)
        codes[r * 8 + j] = static_cast<std::uint8_t>((2 * j + 1) << 4 | 2 * j);
    }
    WeightMatrix& down = layer.weights.experts[0].down;
    down.codes = codes.data();
    down.scales = scales.data();
    down.tensor_scale = 1.0f;
    Routed routed(layer.random, {16});
    OwnedRows h(ActivationFormat::kFp8, 16, 16);
    std::fill(h.codes.begin(), h.codes.end(), std::uint8_t{0});
    std::fill(h.scales.begin(), h.scales.end(), 1.0f);
    for (std::size_t k = 0; k < 16; ++k) h.codes[k * 16 + k] = 0x38;
    std::vector<float> y(16 * 128);
    cpu_backend().prepare(layer.weights)->gemm2(h.view, routed.routing, y.data());
    for (std::size_t k = 0; k < 16; ++k) {
      for (std::size_t r = 0; r < 128; ++r) {
        const float folded = decode_e4m3(fp8_fold(static_cast<std::uint8_t>(k), scales[r]));
        const float got = y[k * 128 + r];
        EXPECT_TRUE(r == 127 ? std::isnan(got) : got == 8.0f * folded)
            << got << " for code " << k << ", scale " << int{scales[r]};
      }
    }
  }
}

// The three ways to FP8 and NVFP4 h agree, and a row's bits depend on no other row and no thread count.
TEST_P(CpuLayerKernels, FusedAndUnfusedAgreeForAnyBatchAndThreadCount) {
  const std::int64_t hidden = 144, intermediate = 304, rows = 131;
  for (const ActivationFormat format :
       {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
    SCOPED_TRACE(to_string(format));
    RandomLayer layer(77, hidden, intermediate, 1, kActivations[0], WeightFormat::kNvfp4, true);
    const auto cpu = cpu_backend().prepare(layer.weights);
    Routed routed(layer.random, {rows});
    const OwnedRows x = random_rows(layer.random, format, rows, hidden);
    OwnedRows compact(ActivationFormat::kBf16, rows, intermediate);
    OwnedRows interleaved(ActivationFormat::kBf16, rows, 2 * intermediate);
    cpu->gemm1(x.view, false, routed.routing, L1Output::kCompactBf16, compact.view);
    cpu->gemm1(x.view, false, routed.routing, L1Output::kInterleavedBf16, interleaved.view);

    OwnedRows nvfp4(ActivationFormat::kNvfp4, rows, intermediate);
    OwnedRows nvfp4_compact = nvfp4, nvfp4_interleaved = nvfp4;
    const std::int64_t saturated = cpu->gemm1(x.view, false, routed.routing, L1Output::kNvfp4, nvfp4.view);
    EXPECT_EQ(saturated, cpu_backend().quantize(compact.view, nullptr, nvfp4_compact.view));
    EXPECT_EQ(saturated, cpu_backend().deinterleave_quantize(interleaved.view, nvfp4_interleaved.view));
    EXPECT_TRUE(nvfp4.codes == nvfp4_compact.codes && nvfp4.block_scales == nvfp4_compact.block_scales);
    EXPECT_TRUE(nvfp4.codes == nvfp4_interleaved.codes);
    EXPECT_TRUE(nvfp4.block_scales == nvfp4_interleaved.block_scales);

    OwnedRows fp8(ActivationFormat::kFp8, rows, intermediate), fp8_compact = fp8;
    cpu->gemm1(x.view, false, routed.routing, L1Output::kFp8, fp8.view);
    cpu_backend().quantize_fp8(compact.view, fp8_compact.view);
    EXPECT_TRUE(fp8.codes == fp8_compact.codes && fp8.scales == fp8_compact.scales);

    set_num_threads(1);
    for (const std::int64_t count : {1, 2, 3, 4, 5, 7, 9, 17, 64, 129}) {
      OwnedRows fewer(ActivationFormat::kBf16, rows, intermediate);
      std::int64_t offsets[] = {0, count};
      Routing part = routed.routing;
      part.offsets = offsets;
      cpu->gemm1(x.view, false, part, L1Output::kCompactBf16, fewer.view);
      EXPECT_TRUE(std::equal(fewer.values.begin(), fewer.values.begin() + count * intermediate,
                             compact.values.begin()))
          << count << " rows";
    }
    set_num_threads(0);
  }
}

INSTANTIATE_TEST_SUITE_P(All, CpuLayerKernels, ::testing::ValuesIn(all_kernels()),
                         [](const ::testing::TestParamInfo<Kernel>& test) {
                           std::string name(test.param.name);
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

TEST(CpuLayer, SharedExpertIsWithinTheBoundOfTheReference) {
  for (const bool gated : {false, true}) {
    RandomLayer layer(9, 96, 32, 1, kActivations[0], WeightFormat::kNvfp4, false);
    layer.weights.shared.present = true;
    ExpertWeights& w = layer.weights.shared.weights;
    w.gate = layer.matrix(80, 96, WeightFormat::kBf16);
    w.up = layer.matrix(80, 96, WeightFormat::kBf16);
    w.down = layer.matrix(96, 80, WeightFormat::kBf16);
    if (gated) layer.weights.shared.gate = layer.bias(96);
    const std::int64_t tokens = 600;  // more than are done at a time
    const OwnedRows x = random_rows(layer.random, ActivationFormat::kBf16, tokens, 96);
    std::vector<float> y(static_cast<std::size_t>(tokens * 96)), y_ref(y);
    cpu_backend().prepare(layer.weights)->shared_expert(x.view, y.data());
    ref_backend().prepare(layer.weights)->shared_expert(x.view, y_ref.data());
    // h may round to the neighbouring BF16 (2^-8 of it); |w| stays below 0.6 and |h| below 8 here, and few of
    // the 80 terms are affected: far below the outputs' size of about 1.
    double error = 0.0, size = 0.0;
    for (std::size_t i = 0; i < y.size(); ++i) {
      error += std::pow(static_cast<double>(y[i]) - y_ref[i], 2);
      size += std::pow(y_ref[i], 2);
    }
    EXPECT_LT(std::sqrt(error / size), 0x1p-9) << "relative error";
    EXPECT_GT(size, 0.0);
  }
}

TEST(CpuLayer, RefusesWhatItCannotDo) {
  RandomLayer dense(3, 32, 32, 1, kActivations[0], WeightFormat::kBf16, false);
  Routed routed(dense.random, {2});
  const OwnedRows x = random_rows(dense.random, ActivationFormat::kNvfp4, 2, 32);
  OwnedRows h(ActivationFormat::kBf16, 2, 64);
  try {
    cpu_backend()
        .prepare(dense.weights)
        ->gemm1(x.view, false, routed.routing, L1Output::kCompactBf16, h.view);
    FAIL() << "BF16 weights with NVFP4 activations were accepted";
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("test layer, expert 0, gate is bf16"), std::string::npos)
        << error.what();
  }
  RandomLayer relu(4, 32, 32, 1, kActivations[3], WeightFormat::kNvfp4, false);
  EXPECT_THROW(cpu_backend()
                   .prepare(relu.weights)
                   ->gemm1(x.view, false, routed.routing, L1Output::kInterleavedBf16, h.view),
               Error);
}

}  // namespace
}  // namespace megamoe::cpu
