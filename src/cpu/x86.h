// x86.h: what the kernels for x86 share: the packed form (packed_matrix.h) in numbers, and E2M1 in tables.
// All of it has internal linkage.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace megamoe::cpu {
namespace {

constexpr std::int64_t kRowsOfPanel = 16;
constexpr std::int64_t kCodesOfBlock = 128;  // bytes
constexpr std::int64_t kBlockOfPanel = kRowsOfPanel + kCodesOfBlock;
constexpr std::int64_t kGroup = 4;  // blocks whose scales stand together
// How far ahead of their use weights are asked for: beyond a page, where the hardware does not look, and not
// right behind its end, where that is about to.
constexpr std::int64_t kAhead = 12 * kGroup * kBlockOfPanel;

// The doubled codes, and with 12 added.
alignas(16) constexpr std::int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr std::int8_t kDoubledPlus12[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                        12, 11, 10, 9,  8,  6,  4,  0};
inline __m128i table(const std::int8_t* values) {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(values));
}

// For |x| <= 448 and NaN, up to the sign of zero: adding 1.5 * 2^20 times the power of two below |x|, at
// least 2^-6, rounds to three bits behind that. V is a vector of ymm.h or zmm.h.
template <class V>
typename V::Floats round_to_e4m3(typename V::Floats x) {
  const auto bits = [](float value) { return V::broadcast(__builtin_bit_cast(std::int32_t, value)); };
  const typename V::Ints power = V::max(V::bit_and(V::as_ints(x), V::broadcast(0x7F800000)), bits(0x1p-6f));
  const typename V::Floats step = V::as_floats(V::add(power, V::broadcast(20 << 23 | 1 << 22)));
  return (x + step) - step;
}

// A hint, and no access: it may lie behind the matrix. Always inline, as GCC drops the call of a function
// that does nothing else.
[[gnu::always_inline]] inline void prefetch(const std::uint8_t* p) {
  _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0);
}

// Calls body(codes, scales) for `count` blocks of a panel, which begin at a group, and asks for those ahead.
template <class Body>
[[gnu::always_inline]] inline void for_each_block(const std::uint8_t* panel, std::int64_t count,
                                                  const Body& body) {
  for (std::int64_t first = 0; first < count; first += kGroup, panel += kGroup * kBlockOfPanel) {
    const std::int64_t rest = count - first, group = rest < kGroup ? rest : kGroup;
    prefetch(panel + kAhead);
    const std::uint8_t* codes = panel + group * kRowsOfPanel;
    for (std::int64_t b = 0; b < group; ++b, codes += kCodesOfBlock) {
      prefetch(codes + kAhead);
      prefetch(codes + kAhead + 64);
      body(codes, panel + b * kRowsOfPanel);
    }
  }
}

}  // namespace
}  // namespace megamoe::cpu
