// formats_test.cc: element types by enumeration, and the roundings that people get wrong, each with its
// reason.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/fp16.h"
#include "numerics/fp8_tile.h"
#include "numerics/oracle.h"

namespace megamoe {
namespace {

using oracle::kInf;
using oracle::kNaN;

// The scalar code also works at compile time.
static_assert(encode_e2m1(5.25f) == 7 && decode_e2m1(7) == 6.0f && e2m1_doubled(0xF) == -12);
static_assert(encode_e4m3(250.0f) == 0x78 && decode_e4m3(0x78) == 256.0f);
static_assert(to_fp16(1.0f).bits == 0x3C00 && to_bf16(1.0f).bits == 0x3F80);

TEST(E2M1, EveryCodeHasItsValueAndComesBack) {
  for (int code = 0; code < 16; ++code) {
    const float value = decode_e2m1(static_cast<std::uint8_t>(code));
    EXPECT_EQ(value, oracle::e2m1_value(code)) << code;
    EXPECT_EQ(std::signbit(value), code >= 8) << code;  // code 8 is -0
    EXPECT_EQ(e2m1_doubled(static_cast<std::uint8_t>(code)), 2 * oracle::e2m1_value(code)) << code;
    EXPECT_EQ(encode_e2m1(value), code);
  }
}

TEST(E4M3, EveryCodeHasItsValueAndComesBack) {
  for (int code = 0; code < 256; ++code) {
    const float value = decode_e4m3(static_cast<std::uint8_t>(code));
    EXPECT_EQ(std::signbit(value), code >= 0x80) << code;
    if ((code & 0x7F) == 0x7F) {
      EXPECT_TRUE(std::isnan(value)) << code;
      EXPECT_EQ(encode_e4m3(value), 0x7F) << "a NaN of either sign is 0x7F";
      continue;
    }
    EXPECT_EQ(value, oracle::e4m3_value(code)) << code;
    EXPECT_EQ(encode_e4m3(value), code);
  }
}

TEST(E8M0, EveryCodeHasItsValueAndComesBack) {
  for (int code = 0; code < 255; ++code) {
    const float value = decode_e8m0(static_cast<std::uint8_t>(code));
    EXPECT_EQ(value, std::ldexp(1.0, code - 127)) << code;
    EXPECT_EQ(encode_e8m0_up(value), code);
  }
  EXPECT_TRUE(std::isnan(decode_e8m0(0xFF)));
  EXPECT_EQ(encode_e8m0_up(kNaN), 0xFF);
  EXPECT_EQ(encode_e8m0_up(kInf), 0xFF);
}

TEST(E8M0, RoundsUp) {
  for (std::uint64_t i = 0; i < 200000; ++i) {
    const float x = oracle::float_from_bits(static_cast<std::uint32_t>(oracle::mix(i) >> 33));
    if (!std::isfinite(x)) continue;
    int exponent;
    const double fraction = std::frexp(static_cast<double>(x), &exponent);  // x = fraction * 2^exponent
    const int up = fraction == 0.5 ? exponent - 1 : exponent;
    const int expected = x == 0 ? 0 : std::min(std::max(up + 127, 0), 254);
    ASSERT_EQ(encode_e8m0_up(x), expected) << x;
    ASSERT_EQ(encode_e8m0_up(-x), expected) << x;
  }
}

// All 65,536 patterns; only a signalling NaN changes, into the quiet one with the same payload.
TEST(BF16, EveryPatternComesBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(bf16{static_cast<std::uint16_t>(bits)});
    const bool nan = (bits & 0x7FFF) > 0x7F80;
    ASSERT_EQ(std::isnan(value), nan) << bits;
    ASSERT_EQ(to_bf16(value).bits, nan ? bits | 0x40 : bits);
    if (nan || (bits & 0x7FFF) == 0x7F80) continue;
    const int e = bits >> 7 & 0xFF, m = bits & 0x7F;
    const double expected = e == 0 ? std::ldexp(m, -133) : std::ldexp(128 + m, e - 134);
    ASSERT_EQ(value, bits & 0x8000 ? -expected : expected) << bits;
  }
}

TEST(FP16, EveryPatternComesBack) {
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = to_float(fp16{static_cast<std::uint16_t>(bits)});
    const bool nan = (bits & 0x7FFF) > 0x7C00;
    ASSERT_EQ(std::isnan(value), nan) << bits;
    ASSERT_EQ(to_fp16(value).bits, nan ? bits | 0x200 : bits);
    if ((bits & 0x7FFF) >= 0x7C00) continue;
    const int e = bits >> 10 & 0x1F, m = bits & 0x3FF;
    const double expected = e == 0 ? std::ldexp(m, -24) : std::ldexp(1024 + m, e - 25);
    ASSERT_EQ(value, bits & 0x8000 ? -expected : expected) << bits;
  }
}

struct Rounding {
  float x;
  std::uint32_t code;
  const char* reason;
};

TEST(E2M1, Roundings) {
  const Rounding table[] = {
      {0.0f, 0x0, "zero"},
      {-0.0f, 0x8, "the sign of zero is kept"},
      {0x1p-149f, 0x0, "the least subnormal is nearer to 0"},
      {-0x1p-149f, 0x8, "and keeps its sign there"},
      {0.25f, 0x0, "a tie between 0 and 0.5 goes to the even code"},
      {-0.25f, 0x8, "likewise, and stays negative"},
      {std::nextafter(0.25f, 1.0f), 0x1, "just above the tie"},
      {0.75f, 0x2, "tie: 1 has the even code, not 0.5"},
      {std::nextafter(0.75f, 0.0f), 0x1, "just below the tie"},
      {1.25f, 0x2, "tie down to 1"},
      {1.75f, 0x4, "tie up to 2"},
      {std::nextafter(1.75f, 0.0f), 0x3, "just below the tie"},
      {2.5f, 0x4, "tie down to 2"},
      {3.5f, 0x6, "tie up to 4"},
      {5.0f, 0x6, "tie down to 4"},
      {std::nextafter(5.0f, 6.0f), 0x7, "just above the tie"},
      {5.25f, 0x7, "through half steps it would be 10.5, then 10, then 4"},
      {2.75f, 0x5, "through half steps it would be 5.5, then 6, here right by luck"},
      {2.6f, 0x5, "through half steps it would be 5.2, then 5, which has no code"},
      {6.5f, 0x7, "saturates"},
      {-1000.0f, 0xF, "saturates on its side"},
      {kInf, 0x7, "infinity saturates"},
      {-kInf, 0xF, "on its side"},
      {kNaN, 0x7, "NaN is the largest code"},
      {-kNaN, 0x7, "whatever its sign"},
  };
  for (const Rounding& row : table) EXPECT_EQ(encode_e2m1(row.x), row.code) << row.x << ": " << row.reason;
}

TEST(E4M3, Roundings) {
  const Rounding table[] = {
      {0.0f, 0x00, "zero"},
      {-0.0f, 0x80, "the sign of zero is kept"},
      {0x1p-149f, 0x00, "far below the least value"},
      {0x1p-10f, 0x00, "half of the least value: a tie that goes to 0"},
      {std::nextafter(0x1p-10f, 1.0f), 0x01, "just above that tie"},
      {0x1p-9f, 0x01, "the least value"},
      {1.5f * 0x1p-9f, 0x02, "a tie among subnormals goes to the even code"},
      {7.5f * 0x1p-9f, 0x08, "a tie at the border rounds into the normal numbers"},
      {0x1p-6f, 0x08, "the least normal value"},
      {0.01367187f, 0x07, "the largest subnormal is 7 * 2^-9"},
      {1.03f, 0x38, "to 1"},
      {1.0625f, 0x38, "tie down to 1"},
      {1.1875f, 0x3A, "tie up to 1.25"},
      {250.0f, 0x78, "the carry walks into the exponent: 256, not 240"},
      {248.0f, 0x78, "tie between 240 and 256 goes to the even code"},
      {std::nextafter(248.0f, 0.0f), 0x77, "just below that tie"},
      {432.0f, 0x7E, "tie between 416 and 448: 448 has the even code"},
      {447.0f, 0x7E, "to 448"},
      {448.0f, 0x7E, "the largest value"},
      {456.0f, 0x7E, "saturates"},
      {463.9f, 0x7E, "saturates"},
      {464.0f, 0x7E, "halfway to what would be 480: still 448, never NaN"},
      {465.0f, 0x7E, "what would round to 480 saturates"},
      {480.0f, 0x7E, "the pattern of 480 is NaN: saturates"},
      {4480.0f, 0x7E, "saturates"},
      {-4480.0f, 0xFE, "saturates on its side"},
      {3e38f, 0x7E, "saturates without overflowing on the way"},
      {kInf, 0x7E, "infinity saturates"},
      {-kInf, 0xFE, "on its side"},
      {kNaN, 0x7F, "NaN"},
      {-kNaN, 0x7F, "of either sign"},
  };
  for (const Rounding& row : table) EXPECT_EQ(encode_e4m3(row.x), row.code) << row.x << ": " << row.reason;
}

TEST(BF16, Roundings) {
  const Rounding table[] = {
      {1.0f + 0x1p-8f, 0x3F80, "tie down to even"},
      {1.0f + 3 * 0x1p-8f, 0x3F82, "tie up to even"},
      {263.0f, 0x4384, "263 is a tie between 262 and 264"},
      {std::numeric_limits<float>::max(), 0x7F80, "overflow is infinity"},
      {0x1.FEp+127f, 0x7F7F, "the largest value"},
      {0x1p-149f, 0x0000, "below half of the least subnormal"},
      {0x1p-134f, 0x0000, "half of the least subnormal: tie to 0"},
      {0x1.8p-134f, 0x0001, "three quarters of it"},
      {-0.0f, 0x8000, "the sign of zero is kept"},
      {-kInf, 0xFF80, "infinity"},
      {oracle::float_from_bits(0x7F800001), 0x7FC0, "a NaN with low payload bits alone stays a NaN"},
      {oracle::float_from_bits(0xFFFFFFFF), 0xFFFF, "a NaN does not carry into the sign"},
  };
  for (const Rounding& row : table) EXPECT_EQ(to_bf16(row.x).bits, row.code) << row.x << ": " << row.reason;
}

TEST(FP16, Roundings) {
  const Rounding table[] = {
      {1.0f + 0x1p-11f, 0x3C00, "tie down to even"},
      {1.0f + 3 * 0x1p-11f, 0x3C02, "tie up to even"},
      {65504.0f, 0x7BFF, "the largest value"},
      {std::nextafter(65520.0f, 0.0f), 0x7BFF, "just below halfway to 65536"},
      {65520.0f, 0x7C00, "halfway to 65536 overflows"},
      {172032.0f, 0x7C00, "overflow is infinity"},
      {0x1p-24f, 0x0001, "the least subnormal"},
      {0x1p-25f, 0x0000, "half of it: tie to 0"},
      {std::nextafter(0x1p-25f, 1.0f), 0x0001, "just above half of it"},
      {0x1.8p-24f, 0x0002, "tie among subnormals goes to even"},
      {0x1.FFCp-15f + 0x1p-26f, 0x0400, "rounds up into the normal numbers"},
      {0x1p-149f, 0x0000, "an FP32 subnormal"},
      {-0.0f, 0x8000, "the sign of zero is kept"},
      {oracle::float_from_bits(0x7F800001), 0x7E00, "a NaN with low payload bits alone stays a NaN"},
  };
  for (const Rounding& row : table) EXPECT_EQ(to_fp16(row.x).bits, row.code) << row.x << ": " << row.reason;
}

// The foundation of every path that multiplies decoded weights: nothing is lost in a 16-bit float.
TEST(Products, EveryCodeTimesEveryScaleIsExactInBF16AndFP16) {
  for (int code = 0; code < 16; ++code) {
    for (int scale = 0; scale < 256; ++scale) {
      if ((scale & 0x7F) == 0x7F) continue;
      const double exact = oracle::e2m1_value(code) * oracle::e4m3_value(scale);
      const float product =
          decode_e2m1(static_cast<std::uint8_t>(code)) * decode_e4m3(static_cast<std::uint8_t>(scale));
      ASSERT_EQ(product, exact);
      ASSERT_EQ(to_float(to_bf16(product)), exact) << code << " " << scale;
      ASSERT_EQ(to_float(to_fp16(product)), exact) << code << " " << scale;
    }
  }
}

// A block's dot product in doubled codes is an integer of at most 16 * 12 * 12; with two scales it has at
// most 20 bits. Every integer with every pair of scales, in both orders of multiplication, against FP64.
TEST(Products, BlockDotProductTimesTwoScalesIsExactInFP32) {
  constexpr int kLargest = 16 * 12 * 12;
  std::int64_t wrong = 0;
  for (int sa = 0; sa < 127; ++sa) {
    for (int sb = sa; sb < 127; ++sb) {
      const float fa = decode_e4m3(static_cast<std::uint8_t>(sa));
      const float fb = decode_e4m3(static_cast<std::uint8_t>(sb));
      const float both = fa * fb;
      const double exact_both = static_cast<double>(fa) * static_cast<double>(fb);
      for (int dot = 0; dot <= kLargest; ++dot) {
        const float quarter = 0.25f * static_cast<float>(dot);
        const double exact = static_cast<double>(quarter) * exact_both;
        wrong += static_cast<double>(quarter * both) != exact;
        wrong += static_cast<double>(quarter * fa * fb) != exact;
        wrong += static_cast<double>(quarter * fb * fa) != exact;
      }
    }
  }
  EXPECT_EQ(wrong, 0);
}

TEST(Fp8, FoldRoundsOnceAndNeverSaturates) {
  double largest = 0;
  for (int code = 0; code < 16; ++code) {
    for (int scale = 0; scale < 127; ++scale) {
      const double exact = oracle::e2m1_value(code) * oracle::e4m3_value(scale) / 8;
      const std::uint8_t folded = fp8_fold(static_cast<std::uint8_t>(code), static_cast<std::uint8_t>(scale));
      ASSERT_EQ(folded, oracle::e4m3(exact)) << code << " " << scale;
      largest = std::max(largest, std::fabs(exact));
    }
    EXPECT_EQ(fp8_fold(static_cast<std::uint8_t>(code), kE4M3NaN), kE4M3NaN) << "a NaN scale stays visible";
  }
  EXPECT_EQ(largest, 336.0);
}

TEST(Fp8, TileScaleAndCodes) {
  EXPECT_EQ(fp8_tile_scale(0.0f), 1.0f);
  EXPECT_EQ(fp8_tile_scale(448.0f), 1.0f);
  EXPECT_EQ(fp8_tile_scale(1.0f), 1.0f / 448.0f);
  EXPECT_GT(fp8_tile_scale(0x1p-149f), 0.0f) << "never 0, even where the quotient underflows";
  EXPECT_EQ(fp8_code(-0.0f, 1.0f), 0x80);
  EXPECT_EQ(fp8_code(kNaN, 1.0f), kE4M3NaN);
  EXPECT_EQ(fp8_code(-kInf, 1.0f), kE4M3NaN) << "an infinity is a fault, not a large number";
  // The largest value of a tile never ends above the largest code.
  for (std::uint64_t i = 0; i < 100000; ++i) {
    const float a = oracle::float_from_bits(static_cast<std::uint32_t>(oracle::mix(i) >> 33));
    if (!std::isfinite(a) || a == 0) continue;
    const float d = fp8_tile_scale(a);
    const double q = static_cast<double>(static_cast<float>(static_cast<double>(a) / static_cast<double>(d)));
    ASSERT_EQ(fp8_code(a, d), oracle::e4m3(q)) << a;
    if (a >= 0x1p-110f) {
      ASSERT_EQ(fp8_code(a, d), 0x7E) << a;
    }
  }
}

}  // namespace
}  // namespace megamoe
