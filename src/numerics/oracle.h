// oracle.h: for tests alone: the formats defined once more, by search over tables of values instead of by
// bits.
//
// Nothing here uses the encoders and decoders it judges. Values come from ldexp, roundings from comparing
// exact FP64 distances; a quotient of FP32 numbers is rounded to FP64 and then to FP32, which for normal
// results is the same as rounding once (53 >= 2 * 24 + 2).
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

namespace megamoe::oracle {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
inline constexpr float kMax = std::numeric_limits<float>::max();

// Magnitudes in the order of their codes: with `mantissa_bits` below an exponent of bias `bias`.
inline std::vector<double> magnitudes(int count, int mantissa_bits, int bias) {
  std::vector<double> values;
  for (int code = 0; code < count; ++code) {
    const int e = code >> mantissa_bits, m = code - (e << mantissa_bits);
    const int one = 1 << mantissa_bits;
    values.push_back(e == 0 ? std::ldexp(m, 1 - bias - mantissa_bits)
                            : std::ldexp(one + m, e - bias - mantissa_bits));
  }
  return values;
}

inline const std::vector<double>& e2m1_magnitudes() {
  static const std::vector<double> values = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  return values;
}
inline const std::vector<double>& e4m3_magnitudes() {
  static const std::vector<double> values = magnitudes(127, 3, 7);
  return values;
}

// The index of the value next to |x|; between two equally near ones, the even index. Saturates.
inline int nearest(const std::vector<double>& values, double x) {
  const double a = std::fabs(x);
  if (a >= values.back())
    return static_cast<int>(values.size()) - 1;  // distances of huge numbers all look alike
  int best = 0;
  for (int i = 1; i < static_cast<int>(values.size()); ++i) {
    const double here = std::fabs(a - values[static_cast<std::size_t>(i)]);
    const double there = std::fabs(a - values[static_cast<std::size_t>(best)]);
    if (here < there || (here == there && i % 2 == 0)) best = i;
  }
  return best;
}

inline std::uint8_t e2m1(double x) {
  if (std::isnan(x)) return 7;
  if (std::isinf(x)) return std::signbit(x) ? 15 : 7;
  return static_cast<std::uint8_t>(nearest(e2m1_magnitudes(), x) + (std::signbit(x) ? 8 : 0));
}
inline std::uint8_t e4m3(double x) {
  if (std::isnan(x)) return 0x7F;
  if (std::isinf(x)) return std::signbit(x) ? 0xFE : 0x7E;
  return static_cast<std::uint8_t>(nearest(e4m3_magnitudes(), x) + (std::signbit(x) ? 0x80 : 0));
}
inline double e2m1_value(int code) {
  const double v = e2m1_magnitudes()[static_cast<std::size_t>(code & 7)];
  return code & 8 ? -v : v;
}
inline double e4m3_value(int code) {
  const double v = e4m3_magnitudes()[static_cast<std::size_t>(code & 0x7F)];
  return code & 0x80 ? -v : v;
}

// The NVFP4 recipe. Codes are one to a byte.
struct Block {
  std::uint8_t scale = 0;
  std::uint8_t codes[16] = {};
};
inline Block nvfp4(const float* x, float g) {
  Block out;
  double a = 0;
  for (int i = 0; i < 16; ++i) {
    if (!std::isfinite(x[i])) {
      out.scale = 0x7F;
      return out;
    }
    a = std::max(a, std::fabs(static_cast<double>(x[i])));
  }
  const float six_g = static_cast<float>(6.0 * static_cast<double>(g));
  const float wanted = a == 0 ? 1.0f : static_cast<float>(std::min(a / static_cast<double>(six_g), 0x1p127));
  out.scale = e4m3(a == 0 ? 1.0 : std::min(std::max(static_cast<double>(wanted), 0x1p-9), 448.0));
  const float d = static_cast<float>(e4m3_value(out.scale) * static_cast<double>(g));
  for (int i = 0; i < 16; ++i) {
    const double q =
        x[i] == 0 ? static_cast<double>(x[i]) : static_cast<double>(x[i]) / static_cast<double>(d);
    out.codes[i] = e2m1(std::fabs(q) > 0x1p127 ? q : static_cast<double>(static_cast<float>(q)));
  }
  return out;
}

// 64 well-mixed bits of a number (splitmix64): random data that is the same everywhere, tools/make_golden.py
// included.
inline std::uint64_t mix(std::uint64_t z) {
  z += 0x9E3779B97F4A7C15u;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

inline float float_from_bits(std::uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}
inline std::uint32_t bits_from_float(float x) {
  std::uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

}  // namespace megamoe::oracle
