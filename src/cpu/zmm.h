// zmm.h: as ymm.h, for vectors of 64 bytes, 16 lanes.
#pragma once

#include "cpu/x86.h"

namespace megamoe::cpu {
namespace {

struct Zmm {
  static constexpr std::int64_t kLanes = 16;
  using Ints = __m512i;
  using Floats = __m512;

  static Ints look_up(const std::int8_t* values, __m512i nibbles) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table(values)),
                               _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
  }
  static Ints load_low(const std::int8_t* values, const std::uint8_t* p) {
    return look_up(values, _mm512_loadu_si512(p));
  }
  static Ints load_high(const std::int8_t* values, const std::uint8_t* p) {
    return look_up(values, _mm512_srli_epi16(_mm512_loadu_si512(p), 4));
  }

  static Floats e4m3(const std::uint8_t* p) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves =
        _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xBF80)));
    const __m256i nan = _mm256_set1_epi16(0x3F80);
    return _mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_cmpeq_epi16(_mm256_and_si256(halves, nan), nan)));
  }
  static Ints words(const void* p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256(static_cast<const __m256i*>(p)));
  }

  static Ints load_ints(const void* p) { return _mm512_loadu_si512(p); }
  static void store_ints(void* p, Ints v) { _mm512_storeu_si512(p, v); }

  static Ints as_ints(Floats v) { return _mm512_castps_si512(v); }
  static Floats as_floats(Ints v) { return _mm512_castsi512_ps(v); }
  static Floats broadcast(float x) { return _mm512_set1_ps(x); }
  static Ints broadcast(std::int32_t x) { return _mm512_set1_epi32(x); }
  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  static Ints add(Ints a, Ints b) { return _mm512_add_epi32(a, b); }
  static Ints max(Ints a, Ints b) { return _mm512_max_epi32(a, b); }
  static Ints bit_and(Ints a, Ints b) { return _mm512_and_si512(a, b); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }

  static void keep(Ints& v) { asm volatile("" : "+v"(v)); }
  static void keep(Floats& v) { asm volatile("" : "+v"(v)); }
};

}  // namespace
}  // namespace megamoe::cpu
