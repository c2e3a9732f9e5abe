// nvfp4_ymm.h: what the kernels for 32-byte vectors share: all of a Vector (nvfp4_kernel.h) but the dot
// product.
#pragma once

#include "cpu/nvfp4_kernel.h"

namespace megamoe::cpu {
namespace {

struct Ymm {
  static constexpr std::int64_t kLanes = 8;
  static constexpr int kTile = 8;
  using Ints = __m256i;
  using Floats = __m256;

  static __m256i bytes(const std::uint8_t* p) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  }
  static Ints look_up(__m256i nibbles) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(table(kDoubledPlus12)),
                               _mm256_and_si256(nibbles, _mm256_set1_epi8(15)));
  }
  static Ints load_low(const std::uint8_t* p) { return look_up(bytes(p)); }
  static Ints load_high(const std::uint8_t* p) { return look_up(_mm256_srli_epi16(bytes(p), 4)); }

  // E4M3 shifted to where FP16 has its exponent is 2^-8 of its value; E4M3's NaN is made FP16's.
  static Floats scales(const std::uint8_t* p) {
    const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    const __m128i halves =
        _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(static_cast<short>(0xBF80)));
    const __m128i nan = _mm_set1_epi16(0x3F80);
    return _mm256_cvtph_ps(_mm_or_si128(halves, _mm_cmpeq_epi16(_mm_and_si128(halves, nan), nan)));
  }

  static Floats to_float(Ints v) { return _mm256_cvtepi32_ps(v); }
  static Floats broadcast(float x) { return _mm256_set1_ps(x); }
  static Floats load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm256_storeu_ps(p, v); }
  static Floats multiply(Floats a, Floats b) { return _mm256_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace megamoe::cpu
