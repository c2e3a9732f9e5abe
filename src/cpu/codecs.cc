#include "cpu/codecs.h"

#include <algorithm>
#include <cstring>

#include "numerics/bf16.h"

namespace megamoe::cpu {
namespace {

constexpr std::uint16_t kBf16Magnitude = 0x7FFFu;
constexpr std::uint16_t kBf16Inf = 0x7F80u;

// E4M3 without a branch, for the compiler to vectorise: below 2^-6 the sum with 2^14 rounds to steps of
// 2^-9, above it integer arithmetic rounds 20 bits away.
inline std::uint32_t e4m3_code(float x) {
  const std::uint32_t bits = bits_of_float(x);
  const std::uint32_t magnitude_bits = bits & kFloatMagnitude;
  const std::uint32_t top = bits_of_float(512.0f);
  const std::uint32_t b = magnitude_bits < top ? magnitude_bits : top;
  const std::uint32_t normal = (b - (120u << 23) + 0x7FFFFu + ((b >> 20) & 1u)) >> 20;
  const std::uint32_t small = bits_of_float(float_of_bits(b) + 0x1p14f) - bits_of_float(0x1p14f);
  const std::uint32_t code = b >= bits_of_float(0x1p-6f) ? (normal < 0x7Eu ? normal : 0x7Eu) : small;
  return ((bits >> 24) & 0x80u) | code;
}

// Eight codes of a byte each, made four bytes of two codes.
inline std::uint32_t pack_nibbles(std::uint64_t codes) {
  codes = (codes | codes >> 4) & 0x00FF00FF00FF00FFu;
  codes = (codes | codes >> 8) & 0x0000FFFF0000FFFFu;
  return static_cast<std::uint32_t>(codes | codes >> 16);
}

// One block: reads x[0..15], writes 8 bytes of codes.
inline Nvfp4Scale quantize_block(const bf16* x, float g, std::uint8_t* codes) {
  std::int16_t largest = 0;
  for (int i = 0; i < kNvfp4Block; ++i) {
    largest = std::max(largest, static_cast<std::int16_t>(x[i].bits & kBf16Magnitude));
  }
  if (largest >= kBf16Inf) {
    std::memset(codes, 0, kNvfp4Block / 2);
    return {kE4M3NaN, false};
  }
  const float a = to_float(bf16{static_cast<std::uint16_t>(largest)});
  Nvfp4Scale scale{0x38, false};  // 1.0, the scale of an all-zero block
  if (a != 0.0f) {
    const float wanted = a / (kE2M1Max * g);
    scale = {static_cast<std::uint8_t>(e4m3_code(std::clamp(wanted, kE4M3Min, kE4M3Max))),
             wanted > kE4M3Max * (1.0f + 0x1p-20f)};
  }
  const float d = kE4M3Values[scale.code] * g;
  alignas(16) std::uint8_t wide[kNvfp4Block];
  for (int i = 0; i < kNvfp4Block; ++i) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x[i].bits) << 16;
    // 0 / 0 is a NaN, and no comparison with a NaN holds: code 0, as for 0 itself
    const float q = float_of_bits(bits & kFloatMagnitude) / d;
    const int code =
        (q > 0.25f) + (q >= 0.75f) + (q > 1.25f) + (q >= 1.75f) + (q > 2.5f) + (q >= 3.5f) + (q > 5.0f);
    wide[i] = static_cast<std::uint8_t>(static_cast<std::uint32_t>(code) | ((bits >> 28) & 8u));
  }
  std::uint64_t halves[2];
  std::memcpy(halves, wide, sizeof(halves));
  const std::uint32_t packed[2] = {pack_nibbles(halves[0]), pack_nibbles(halves[1])};
  std::memcpy(codes, packed, sizeof(packed));
  return scale;
}

}  // namespace

void bf16_to_float(const bf16* in, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) {
    out[i] = float_of_bits(static_cast<std::uint32_t>(in[i].bits) << 16);
  }
}

void e4m3_to_float(const std::uint8_t* in, std::int64_t count, float* out) {
  for (std::int64_t i = 0; i < count; ++i) out[i] = kE4M3Values[in[i]];
}

float finite_amax(const bf16* in, std::int64_t count) {
  std::int16_t largest = 0;  // magnitudes have 15 bits and sort as integers
  for (std::int64_t i = 0; i < count; ++i) {
    const auto a = static_cast<std::int16_t>(in[i].bits & kBf16Magnitude);
    const auto finite = static_cast<std::int16_t>(a < kBf16Inf ? a : 0);
    largest = largest > finite ? largest : finite;
  }
  return to_float(bf16{static_cast<std::uint16_t>(largest)});
}

std::int64_t quantize_row(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                          std::uint8_t* scales) {
  std::int64_t saturated = 0;
  for (std::int64_t b = 0; b < blocks; ++b) {
    const Nvfp4Scale scale = quantize_block(x + b * kNvfp4Block, g, codes + b * (kNvfp4Block / 2));
    scales[b] = scale.code;
    saturated += scale.saturated ? 1 : 0;
  }
  return saturated;
}

float quantize_fp8_tile(const bf16* x, std::int64_t count, std::uint8_t* codes) {
  const float d = fp8_tile_scale(finite_amax(x, count));  // never 0, so 0 / d is 0
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint32_t code = e4m3_code(float_of_bits(static_cast<std::uint32_t>(x[i].bits) << 16) / d);
    const bool finite = static_cast<std::int16_t>(x[i].bits & kBf16Magnitude) < kBf16Inf;
    codes[i] = static_cast<std::uint8_t>(finite ? code : kE4M3NaN);
  }
  return d;
}

}  // namespace megamoe::cpu
