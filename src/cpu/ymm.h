// ymm.h: operations on vectors of 32 bytes, 8 lanes, as the kernels written over a vector type want them.
#pragma once

#include "cpu/x86.h"

namespace megamoe::cpu {
namespace {

struct Ymm {
  static constexpr std::int64_t kLanes = 8;
  using Ints = __m256i;
  using Floats = __m256;

  static __m256i bytes(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
  // The low, the high codes of the bytes at p, by a table of bytes.
  static Ints look_up(const std::int8_t* values, __m256i nibbles) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table(values)),
                               _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
  }
  static Ints load_low(const std::int8_t* values, const std::uint8_t* p) { return look_up(values, bytes(p)); }
  static Ints load_high(const std::int8_t* values, const std::uint8_t* p) {
    return look_up(values, _mm256_srli_epi16(bytes(p), 4));
  }

  // E4M3 codes at p times 2^-8: shifted to where FP16 has its exponent they are that. E4M3's NaN is made
  // FP16's.
  static Floats e4m3(const std::uint8_t* p) {
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i halves =
        _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(static_cast<short>(0xBF80)));
    const __m128i nan = _mm_set1_epi16(0x3F80);
    return _mm256_cvtph_ps(_mm_or_si128(halves, _mm_cmpeq_epi16(_mm_and_si128(halves, nan), nan)));
  }
  // Likewise the 16 of a panel; quicker for those that are neither negative nor NaN.
  [[gnu::always_inline]] static void e4m3_of_panel(const std::uint8_t* p, Floats (&out)[2]) {
    const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
    if (_mm_movemask_epi8(_mm_adds_epu8(codes, _mm_set1_epi8(1))) != 0) [[unlikely]] {
      out[0] = e4m3(p), out[1] = e4m3(p + 8);
      return;
    }
    const __m128i zero = _mm_setzero_si128();
    out[0] = _mm256_cvtph_ps(_mm_srli_epi16(_mm_unpacklo_epi8(zero, codes), 1));
    out[1] = _mm256_cvtph_ps(_mm_srli_epi16(_mm_unpackhi_epi8(zero, codes), 1));
  }
  // Byte i of each lane as its highest, with zeros below.
  static Ints byte_to_top(Ints v, int i) {
    if (i == 3) return _mm256_and_si256(v, _mm256_set1_epi32(static_cast<int>(0xFF000000u)));
    const Ints top = _mm256_set_epi32(0x0C808080, 0x08808080, 0x04808080, 0x00808080, 0x0C808080, 0x08808080,
                                      0x04808080, 0x00808080);
    return _mm256_shuffle_epi8(v, _mm256_add_epi32(top, _mm256_set1_epi32(i << 24)));
  }
  // 8 numbers of 16 bits at p, each as the lower half of a lane.
  static Ints words(const void* p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128(static_cast<const __m128i*>(p)));
  }
  static Floats bf16(const void* p) { return _mm256_castsi256_ps(_mm256_slli_epi32(words(p), 16)); }

  static Ints load_ints(const void* p) { return bytes(p); }
  static void store_ints(void* p, Ints v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }

  static Ints as_ints(Floats v) { return _mm256_castps_si256(v); }
  static Floats as_floats(Ints v) { return _mm256_castsi256_ps(v); }
  static Floats to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
  static Floats broadcast(float x) { return _mm256_set1_ps(x); }
  static Ints broadcast(std::int32_t x) { return _mm256_set1_epi32(x); }
  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
  static Ints add(Ints a, Ints b) { return _mm256_add_epi32(a, b); }
  static Ints max(Ints a, Ints b) { return _mm256_max_epi32(a, b); }
  static Ints bit_and(Ints a, Ints b) { return _mm256_and_si256(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }

  // sum += a * b, where the compiler would leave some of many sums in the register of b, and move them back
  // in the end.
  static void add_product(Floats& sum, Floats a, Floats b) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
  }

  // The compiler must have v in a register here and knows nothing of it afterwards.
  static void keep(Ints& v) { asm volatile("" : "+x"(v)); }
  static void keep(Floats& v) { asm volatile("" : "+x"(v)); }
};

}  // namespace
}  // namespace megamoe::cpu
