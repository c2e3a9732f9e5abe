// fused_test.cc: h made FP4 or E4M3 in the epilogue is, byte for byte, what the quantisers make of h in BF16.
#include <algorithm>

#include "cuda/quantize.h"
#include "cuda/sm90/gemm_test.h"
#include "tests/independent.h"

namespace megamoe::sm90 {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;
using testing::Operands;
using testing::Rows;

class FusedTest : public HopperTest {};

// By quantize, or by deinterleave_quantize, of what the first GEMM wrote as BF16.
HiddenResult quantize_on_gpu(L1Output mode, const Rows& h, std::int64_t cols,
                             const std::vector<float>& scales) {
  const DeviceArray<bf16> values(h.values);
  const DeviceArray<float> tensor_scales(scales);
  const cuda::Output<std::uint8_t> codes(h.rows * cols / 2), block_scales(h.rows * cols / 16);
  const DeviceArray<unsigned long long> saturated(std::vector<unsigned long long>{100});
  const cuda::Nvfp4Out out{codes.data(), block_scales.data(), tensor_scales.data(), saturated.data()};
  if (h.rows > 0) {
    cuda_check(mode == L1Output::kInterleavedBf16
                   ? cuda::deinterleave_quantize(values.data(), 2 * cols, h.rows, cols,
                                                 cuda::TensorScales::kGiven, out, nullptr)
                   : cuda::quantize({cuda::ElementType::kBf16, values.data(), cols}, nullptr, h.rows, cols,
                                    cuda::TensorScales::kGiven, out, nullptr),
               "testing the quantiser");
  }
  HiddenResult result{Rows(ActivationFormat::kNvfp4, h.rows, cols, 0), saturated.download()[0] - 100};
  result.h.codes = codes.download();
  result.h.block_scales = block_scales.download();
  result.h.scales = scales;
  return result;
}

// With one NaN for all.
HiddenResult one_nan(HiddenResult result) {
  for (bf16& x : result.h.values) {
    if ((x.bits & 0x7FFF) > 0x7F80) x.bits = 0x7FC0;
  }
  return result;
}

std::int64_t any_of(cuda::Random& random, const std::vector<std::int64_t>& values) {
  return values[size(random.integer(0, static_cast<std::int64_t>(values.size()) - 1))];
}

TEST_F(FusedTest, ThreeWaysAgreeIn500Trials) {
  const std::vector<std::int64_t> widths = {16, 32, 48, 80, 112, 128, 176, 256, 368, 720, 1008, 1408, 2880};
  std::int64_t bytes = 0;
  std::uint64_t saturated = 0;
  std::vector<TileChoice> tiles = all_tiles(OperandType::kBf16);
  tiles.push_back({});
  for (std::uint64_t trial = 0; trial < 500; ++trial) {
    cuda::Random random(trial);
    std::int64_t hidden, intermediate;
    int experts;
    do {
      hidden = any_of(random, widths), intermediate = any_of(random, widths);
      experts = static_cast<int>(random.integer(1, 20));
    } while (hidden * intermediate * experts > 6'000'000);
    const ActivationConfig& activation = kActivations[trial % 4];
    const LayerConfig config = testing::make_config(hidden, intermediate, experts, 1, activation);
    const ActivationFormat format =
        random.integer(0, 1) == 0 ? ActivationFormat::kBf16 : ActivationFormat::kNvfp4;
    const std::int64_t rows = random.integer(0, 3) == 0 ? random.integer(60, 1200) : random.integer(0, 60);
    const std::int64_t tokens = random.integer(0, 3) == 0 ? 0 : random.integer(1, 40);
    const RoutedRows routed = ragged_rows(rows, experts, tokens, random);
    const TileChoice tile = tiles[trial / 4 % tiles.size()];  // with each activation
    SCOPED_TRACE(::testing::Message()
                 << "trial " << trial << ", " << tile << ": " << hidden << " x " << intermediate << ", "
                 << experts << " experts, " << rows << " rows of " << tokens << " tokens, "
                 << to_string(format) << ", " << to_string(activation.kind));
    const auto weights = testing::wide_layer(config, Operands::kRandom, random.integer(0, 1) == 0, trial);
    const DeviceLayer layer(weights->weights);
    Rows x = testing::wide_rows(format, tokens != 0 ? tokens : std::max<std::int64_t>(rows, 1), hidden,
                                Operands::kRandom, trial);
    if (trial % 10 == 0) {  // a faulty token
      if (format == ActivationFormat::kBf16)
        x.values[size(random.integer(0, x.rows * hidden - 1))] = {0x7F80};
      if (format == ActivationFormat::kNvfp4)
        x.block_scales[size(random.integer(0, x.rows * hidden / 16 - 1))] = 0x7F;
    }
    if (trial % 10 == 5) {  // tokens of zeros, now few and now most of them
      for (std::int64_t r = 0; r < x.rows; ++r) {
        if (random.integer(0, 99) > (trial % 20 == 5 ? 10 : 80)) continue;
        if (format == ActivationFormat::kBf16)
          std::fill_n(x.values.begin() + r * hidden, hidden, bf16{0x8000});
        if (format == ActivationFormat::kNvfp4)
          std::fill_n(x.codes.begin() + r * hidden / 2, hidden / 2, std::uint8_t{0});
      }
    }
    std::vector<float> scales = testing::h_scales(rows, trial);
    for (float& g : scales) {  // blocks that saturate, and both ends of the range
      const std::int64_t kind = random.integer(0, 15);
      g = kind == 0 ? 0x1p-130f : kind == 1 ? 1e20f : kind == 2 ? g * 0.01f : g;
    }
    const std::int64_t max_rows = rows + (trial % 3 == 0 ? random.integer(0, 2000) : 0);
    const auto run = [&](L1Output mode, int poison) {
      return layer.gemm1(x, routed, mode, mode == L1Output::kNvfp4 ? scales : std::vector<float>(),
                         {.tile = tile, .max_rows = max_rows, .poison = poison, .strided = trial % 2 == 0});
    };
    const HiddenResult fused = run(L1Output::kNvfp4, 0x7F);
    expect_same(run(L1Output::kNvfp4, 0xFF), fused);
    if (format == ActivationFormat::kNvfp4) {  // as a pass has it
      expect_same(one_nan(layer.gemm1(x, routed, L1Output::kNvfp4, scales,
                                      {.tile = tile, .max_rows = max_rows, .poison = 0x7F, .decoded = true})),
                  one_nan(decoded(fused)));
    }
    for (const L1Output mode : modes_of(config, format)) {
      if (mode == L1Output::kNvfp4) continue;
      SCOPED_TRACE(to_string(mode));
      const HiddenResult bf16_h = run(mode, 0x00);
      EXPECT_EQ(bf16_h.saturated, 0u);
      expect_same(quantize_on_gpu(mode, bf16_h.h, intermediate, scales), fused);
    }
    ASSERT_FALSE(HasFailure());
    bytes += static_cast<std::int64_t>(fused.h.codes.size() + fused.h.block_scales.size());
    saturated += fused.saturated;
  }
  EXPECT_GT(bytes, 10'000'000);
  EXPECT_GT(saturated, 1000u);
}

// E4M3 made in the epilogue is what becomes of h in BF16: of usual numbers, where now and then a warp cannot
// tell the activation; of rows of zeros, a few and so many that a warp's list of such is full; of NaN,
// infinity and numbers at the ends of FP32's range.
TEST_F(FusedTest, Fp8IsWhatBecomesOfBf16) {
  constexpr std::int64_t kHidden = 144;
  std::int64_t groups = 0;
  for (std::uint64_t trial = 0; trial < 120; ++trial) {
    cuda::Random random(trial);
    const std::int64_t intermediate = any_of(random, {112, 128, 256, 272, 640, 896});
    const int experts = static_cast<int>(random.integer(1, 5));
    const ActivationConfig& activation = kActivations[trial % 3];
    const std::int64_t rows = random.integer(1, 700), kind = trial / 3 % 5;
    const bool biased = random.integer(0, 1) == 0 && kind != 4;  // a bias would hide tiny sums
    SCOPED_TRACE(::testing::Message() << "trial " << trial << ", kind " << kind << ", " << intermediate
                                      << " columns, " << rows << " rows, " << to_string(activation.kind));
    const auto weights =
        testing::wide_layer(testing::make_config(kHidden, intermediate, experts, 1, activation),
                            Operands::kRandom, biased, trial);
    const DeviceLayer layer(weights->weights);
    const RoutedRows routed = ragged_rows(rows, experts, 0, random);
    Rows x = testing::wide_rows(ActivationFormat::kFp8, rows, kHidden, Operands::kRandom, trial);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::uint8_t* codes = &x.codes[size(r * kHidden)];
      float* scales = &x.scales[size(r * 2)];
      if (kind == 1 && r % 29 == 0) std::fill_n(codes, kHidden, std::uint8_t{0});
      if (kind == 2 && r % 64 < 40) std::fill_n(codes, kHidden, std::uint8_t{0x80});
      if (kind == 3 && r % 50 == 7) codes[random.integer(0, kHidden - 1)] = 0x7F;
      if (kind == 4 && r % 20 == 3) {  // h of SwiGLU beyond kFastTileMin and kFastTileMax
        for (int group = 0; group < 2; ++group) scales[group] *= r % 40 == 3 ? 0x1p-40f : 0x1p55f;
      }
    }
    for (const TileChoice& tile : tile_kinds(OperandType::kFp8)) {
      SCOPED_TRACE(tile);
      const auto run = [&](L1Output mode, int poison) {
        return layer.gemm1(x, routed, mode, {}, {.tile = tile, .poison = poison});
      };
      expect_same(run(L1Output::kFp8, trial % 2 == 0 ? 0x7F : 0xFF),
                  as_fp8(run(L1Output::kCompactBf16, 0x00).h));
    }
    ASSERT_FALSE(HasFailure());
    groups += rows * ((intermediate + 127) / 128);
  }
  EXPECT_GT(groups, 100'000);
}

// tools/gpu_test.sh counts what each of these writes.
TEST_F(FusedTest, OneCallOfEachMode) {
  const LayerConfig config = testing::make_config(256, 1024, 2, 1);
  const auto weights = testing::wide_layer(config, Operands::kRandom, false, 1);
  const DeviceLayer layer(weights->weights);
  const RoutedRows routed{{0, 40, 100}, {}};
  const Rows x = testing::wide_rows(ActivationFormat::kNvfp4, 100, 256, Operands::kRandom, 2);
  const std::vector<float> scales = testing::h_scales(100, 3);
  std::vector<HiddenResult> results;
  for (const L1Output mode : {L1Output::kCompactBf16, L1Output::kInterleavedBf16, L1Output::kNvfp4}) {
    results.push_back(layer.gemm1(x, routed, mode, mode == L1Output::kNvfp4 ? scales : std::vector<float>()));
  }
  expect_same(quantize_on_gpu(L1Output::kCompactBf16, results[0].h, 1024, scales), results[2]);
  expect_same(quantize_on_gpu(L1Output::kInterleavedBf16, results[1].h, 1024, scales), results[2]);
}

// ---- The epilogue's encoder alone

// A layer that hands its tokens through: gate is 128, which is its own silu, up the token's number times
// 2^-7, so that h [rows, 64] is x. Exact from 2^-100 up.
constexpr std::int64_t kWidth = 64;

class PassThrough {
 public:
  PassThrough() : layer_(testing::make_config(kWidth + 16, kWidth, 1, 1)) {
    const auto one = [](std::int64_t, std::int64_t) { return 0x38; };
    ExpertWeights& expert = layer_.weights.experts[0];
    expert.gate = layer_.nvfp4(
        kWidth, kWidth + 16, 1.0f, [](std::int64_t, std::int64_t k) { return k == kWidth ? 2 : 0; }, one);
    expert.up = layer_.nvfp4(
        kWidth, kWidth + 16, 0x1p-7f, [](std::int64_t r, std::int64_t k) { return k == r ? 2 : 0; }, one);
    expert.down = layer_.nvfp4(
        kWidth + 16, kWidth, 1.0f, [](std::int64_t, std::int64_t) { return 0; }, one);
    device_ = std::make_unique<DeviceLayer>(layer_.weights);
  }

  // Holds the FP4 of `h` [rows, 64] under these tensor scales [rows] against a second implementation.
  void expect_encoded(const std::vector<bf16>& h, const std::vector<float>& scales) const {
    const auto rows = static_cast<std::int64_t>(scales.size());
    ASSERT_EQ(h.size(), size(rows * kWidth));
    Rows x(ActivationFormat::kBf16, rows, kWidth + 16, 0);
    for (std::int64_t r = 0; r < rows; ++r) {
      std::copy_n(h.begin() + r * kWidth, kWidth, x.values.begin() + r * (kWidth + 16));
      x.values[size(r * (kWidth + 16) + kWidth)] = {0x4300};  // 128
    }
    HiddenResult want{Rows(ActivationFormat::kNvfp4, rows, kWidth, 0), 0};
    std::int64_t saturated = 0;
#pragma omp parallel for reduction(+ : saturated)
    for (std::int64_t r = 0; r < rows; ++r) {
      const independent::Row row = independent::make_row(
          {h.begin() + r * kWidth, h.begin() + (r + 1) * kWidth}, ActivationFormat::kNvfp4, scales[size(r)]);
      std::copy(row.codes.begin(), row.codes.end(), want.h.codes.begin() + r * kWidth / 2);
      std::copy(row.block_scales.begin(), row.block_scales.end(),
                want.h.block_scales.begin() + r * kWidth / 16);
      saturated += row.saturated;
    }
    want.h.scales = scales;
    want.saturated = static_cast<std::uint64_t>(saturated);
    for (const TileChoice& tile : tile_kinds(OperandType::kBf16)) {
      SCOPED_TRACE(tile);
      expect_same(device_->gemm1(x, {{0, rows}, {}}, L1Output::kNvfp4, scales, {.tile = tile}), want);
    }
  }

 private:
  testing::TestLayer layer_;
  std::unique_ptr<DeviceLayer> device_;
};

// The magnitudes that PassThrough keeps: from 2^-100 to 2^100.
constexpr std::uint32_t kFirstBits = (127 - 100) << 7, kLastBits = (127 + 100) << 7;

// Every BF16 number under every scale: blocks of a number that makes the scale, and 15 that are no larger.
TEST_F(FusedTest, EveryBf16UnderEveryScale) {
  const PassThrough layer;
  for (const float g : {1.0f, 0.0013732910f}) {
    std::vector<bf16> h;
    for (int scale = 1; scale < 127; ++scale) {
      const bf16 largest = independent::nearest_bf16(
          static_cast<float>(6.0 * independent::e4m3_value(scale) * static_cast<double>(g)));
      const auto add = [&](std::uint32_t bits) {
        if (h.size() % 16 == 0) h.push_back(largest);
        h.push_back({static_cast<std::uint16_t>(bits)});
      };
      add(0);
      for (std::uint32_t bits = kFirstBits; bits <= largest.bits; ++bits) add(bits), add(bits | 0x8000);
      while (h.size() % 16 != 0) h.push_back({0});
    }
    while (h.size() % kWidth != 0) h.push_back({0});
    layer.expect_encoded(h, std::vector<float>(h.size() / size(kWidth), g));
  }
}

// Every BF16 number as the largest of its block: scales below 2^-9, subnormal, rounded up over a power of
// two, tied, and beyond 448.
TEST_F(FusedTest, EveryBf16AsTheLargest) {
  const PassThrough layer;
  cuda::Random random(1);
  std::vector<bf16> h;
  std::vector<float> scales;
  for (const float g : {1.0f, 0.0013732910f, 1.0f / 6, 0x1.8p-3f, 0x1p-60f, 0x1.234568p+60f}) {
    for (std::uint32_t bits = kFirstBits; bits <= kLastBits; ++bits) {
      for (std::int64_t i = 0; i < 16; ++i) {
        const std::uint32_t smaller = bits - static_cast<std::uint32_t>(random.integer(0, 512));
        const std::uint32_t sign = static_cast<std::uint32_t>(random.integer(0, 1)) << 15;
        h.push_back(
            {static_cast<std::uint16_t>((i == bits % 16 ? bits : std::max(smaller, kFirstBits)) | sign)});
      }
    }
    while (h.size() % kWidth != 0) h.push_back({0});
    scales.resize(h.size() / size(kWidth), g);
  }
  layer.expect_encoded(h, scales);
}

}  // namespace
}  // namespace megamoe::sm90
