// The vectorised conversions against the scalar definitions: every code, every BF16 under every block scale.
#include "cpu/codecs.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "cpu/decode.h"
#include "cpu/kernels.h"
#include "numerics/bf16.h"

namespace megamoe::cpu {
namespace {

std::vector<bf16> every_bf16() {
  std::vector<bf16> values(1 << 16);
  for (std::size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<std::uint16_t>(i);
  return values;
}

TEST(CpuCodecs, EveryCodeDecodes) {
  std::vector<std::uint8_t> codes(256);
  for (std::size_t i = 0; i < 256; ++i) codes[i] = static_cast<std::uint8_t>(i);
  std::vector<float> values(256);
  e4m3_to_float(codes.data(), 256, values.data());
  for (std::size_t i = 0; i < 256; ++i) {
    EXPECT_EQ(bits_of_float(values[i]), bits_of_float(decode_e4m3(codes[i]))) << i;
  }
  for (std::size_t i = 0; i < 256; i += 16) {
    const DoubledCodes doubled = doubled_codes(load<V16u>(codes.data() + i));
    for (std::size_t j = 0; j < 16; ++j) {
      const int lane = static_cast<int>(j);
      EXPECT_EQ(doubled.low[lane], e2m1_doubled(codes[i + j] & 15)) << i + j;
      EXPECT_EQ(doubled.high[lane], e2m1_doubled(codes[i + j] >> 4)) << i + j;
    }
  }
}

TEST(CpuCodecs, EveryBf16Widens) {
  const std::vector<bf16> x = every_bf16();
  std::vector<float> wide(x.size());
  bf16_to_float(x.data(), 1 << 16, wide.data());
  for (std::size_t i = 0; i < x.size(); ++i) {
    ASSERT_EQ(bits_of_float(wide[i]), bits_of_float(to_float(x[i])));
  }
}

TEST(CpuCodecs, FiniteAmaxLooksPastFaults) {
  const bf16 nan{0x7FC0}, inf{0xFF80}, largest{0xFF7F}, small{0x0001};
  std::vector<bf16> x(37, small);
  EXPECT_EQ(finite_amax(x.data(), 37), to_float(small));
  x[3] = nan;
  x[36] = inf;
  EXPECT_EQ(finite_amax(x.data(), 37), to_float(small));
  x[20] = largest;
  EXPECT_EQ(finite_amax(x.data(), 37), -to_float(largest));
  EXPECT_EQ(finite_amax(x.data() + 3, 1), 0.0f);
  EXPECT_EQ(finite_amax(x.data(), 0), 0.0f);
}

void expect_same_block(const bf16* x, float g) {
  float values[kNvfp4Block];
  for (int i = 0; i < kNvfp4Block; ++i) values[i] = to_float(x[i]);
  std::uint8_t expected[8];
  const Nvfp4Scale expected_scale = nvfp4_quantize_block(values, g, expected);
  for (const Kernel& kernel : all_kernels()) {
    if (!kernel.supported) continue;
    std::uint8_t actual[8], scale = 0;
    std::fill_n(actual, 8, std::uint8_t{0x7F});
    const std::int64_t saturated = kernel.quantize_row(x, g, 1, actual, &scale);
    ASSERT_EQ(scale, expected_scale.code) << kernel.name << ": " << values[0] << " under " << g;
    ASSERT_EQ(saturated, expected_scale.saturated ? 1 : 0) << kernel.name;
    ASSERT_TRUE(std::equal(actual, actual + 8, expected))
        << kernel.name << ": a block with " << values[1] << " under " << g;
  }
}

// The first value of a block, 6 * s, makes its scale s for all that are not larger.
TEST(CpuCodecs, EveryBf16UnderEveryBlockScale) {
  const std::vector<bf16> all = every_bf16();
  for (int code = 1; code < kE4M3NaN; ++code) {
    const float top = 6.0f * kE4M3Values[static_cast<std::size_t>(code)];
    bf16 x[kNvfp4Block] = {to_bf16(top)};
    ASSERT_EQ(to_float(x[0]), top);
    int filled = 1;
    for (const bf16 value : all) {
      if (magnitude(to_float(value)) > top || is_nan(to_float(value))) continue;
      x[filled++] = value;
      if (filled < kNvfp4Block) continue;
      expect_same_block(x, 1.0f);
      if (HasFatalFailure()) return;
      filled = 1;
    }
  }
}

TEST(CpuCodecs, EveryBf16UnderManyTensorScales) {
  const std::vector<bf16> all = every_bf16();
  for (const float g : {1.0f, 0x1p-149f, 0x1.3p-140f, 0x1.7p-20f, 1.0f / 2688.0f, 3.7f, 0x1.5p120f}) {
    for (std::size_t i = 0; i < all.size(); i += kNvfp4Block) {
      expect_same_block(all.data() + i, g);  // neighbours, and blocks of faults
      bf16 mixed[kNvfp4Block];
      for (std::size_t j = 0; j < kNvfp4Block; ++j) mixed[j] = all[(i / 16 + j * 4099) % all.size()];
      expect_same_block(mixed, g);
      if (HasFatalFailure()) return;
    }
  }
}

TEST(CpuCodecs, EveryBf16AsFp8) {
  const std::vector<bf16> all = every_bf16();
  for (const std::int64_t count : {128, 48, 16, 1}) {
    for (std::int64_t first = 0; first + count <= (1 << 16); first += count) {
      // neighbours fill half of the codes' range; every fifth value of another magnitude fills the rest
      std::vector<bf16> x(all.begin() + first, all.begin() + first + count);
      for (std::size_t j = 0; j < x.size(); j += 5)
        x[j].bits = static_cast<std::uint16_t>(x[j].bits - j * 40);
      float amax = 0.0f;
      for (const bf16 v : x) {
        if (is_finite(to_float(v))) amax = std::max(amax, magnitude(to_float(v)));
      }
      std::vector<std::uint8_t> codes(x.size());
      const float d = quantize_fp8_tile(x.data(), count, codes.data());
      ASSERT_EQ(bits_of_float(d), bits_of_float(fp8_tile_scale(amax)));
      for (std::size_t j = 0; j < x.size(); ++j) {
        ASSERT_EQ(codes[j], fp8_code(to_float(x[j]), d)) << to_float(x[j]) << " / " << d;
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::cpu
