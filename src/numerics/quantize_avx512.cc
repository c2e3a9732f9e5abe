// quantize_avx512.cc: as quantize_x86.h says. All but its functions has internal linkage.
//
// As quantize_avx2.cc, with a block in a vector: 16 blocks at a time, whose scales are the lanes of one.
#include <immintrin.h>

#include "numerics/quantize_loops.h"

namespace megamoe {
namespace {

inline __m512 splat(float x) { return _mm512_set1_ps(x); }
inline __m512i splat(std::uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
inline __m512i bits(__m512 x) { return _mm512_castps_si512(x); }
inline __m512 number(__m512i x) { return _mm512_castsi512_ps(x); }
inline __m512i magnitude_bits(__m512 x) { return _mm512_and_si512(bits(x), splat(0x7FFFFFFFu)); }
constexpr std::uint32_t kInf = 0x7F800000u;
constexpr std::uint32_t kLeastNormal = 121u << 23;  // of E4M3: 2^-6

inline __m512 load16(const float* x) { return _mm512_loadu_ps(x); }
inline __m512 load16(const bf16* x) {
  const __m256i halves = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  return number(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
inline __m512 load16(const fp16* x) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)));
}

// Lane i: the largest of m[i]'s lanes.
inline __m512i largest_of_each(const __m512i (&m)[16]) {
  const auto pair = [](__m512i a, __m512i b) {
    return _mm512_max_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
  };
  const auto four = [&](const __m512i* v) {  // in each quarter: of those quarters of v[0] to v[3]
    const __m512i a = pair(v[0], v[1]), b = pair(v[2], v[3]);
    return _mm512_max_epi32(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
  };
  const auto halves = [](__m512i a, __m512i b) {  // twice a, twice b
    return _mm512_max_epi32(_mm512_shuffle_i32x4(a, b, 0x44), _mm512_shuffle_i32x4(a, b, 0xEE));
  };
  const __m512i low = halves(four(m), four(m + 4)), high = halves(four(m + 8), four(m + 12));
  return _mm512_max_epi32(_mm512_shuffle_i32x4(low, high, 0x88), _mm512_shuffle_i32x4(low, high, 0xDD));
}

// E4M3 of numbers from 2^-9 to 448, as numbers and as codes, as quantize_avx2.cc.
struct Scales {
  __m512 values;
  __m512i codes;
};
inline Scales round_to_e4m3(__m512 x) {
  const __m512i power = _mm512_max_epi32(_mm512_and_si512(bits(x), splat(kInf)), splat(kLeastNormal));
  const __m512i step = _mm512_add_epi32(power, splat(20u << 23 | 1u << 22));
  const __m512 sum = _mm512_add_ps(x, number(step));
  const __m512i doublings = _mm512_srli_epi32(_mm512_sub_epi32(power, splat(kLeastNormal)), 20);
  return {_mm512_sub_ps(sum, number(step)), _mm512_add_epi32(_mm512_sub_epi32(bits(sum), step), doublings)};
}

// The codes of 16 numbers under the scale d; 0 for 0 / 0. With P the power of two below a quotient's
// magnitude, at least 1, codes stand for steps of P / 2: adding P * 2^22 rounds to those, ties to even, and
// leaves their number in the last bits; two codes more for each doubling of P.
inline __m512i codes_of(__m512 x, __m512 d) {
  const __m512 quotient = _mm512_div_ps(number(magnitude_bits(x)), d);
  const __m512 q = _mm512_min_ps(splat(6.0f), _mm512_max_ps(quotient, splat(0.0f)));  // of a NaN 0
  const __m512i power = _mm512_and_si512(bits(_mm512_max_ps(q, splat(1.0f))), splat(kInf));
  // Two steps more, as the shifted exponent of 1 is 2 * 127, which is 6 in the last three bits.
  const __m512i step = _mm512_add_epi32(power, splat((22u << 23) + 2));
  const __m512i code = _mm512_add_epi32(bits(_mm512_add_ps(q, number(step))), _mm512_srli_epi32(power, 22));
  const __m512i sign = _mm512_srli_epi32(bits(x), 28);
  return _mm512_ternarylogic_epi32(splat(7u), code, sign, 0xCA);  // code in the three bits, sign in the rest
}

// The 32 bytes of four blocks.
inline void store_blocks(const __m512i (&codes)[4], std::uint8_t* out) {
  const __m512i bytes =
      _mm512_packus_epi16(_mm512_packus_epi32(codes[0], codes[1]), _mm512_packus_epi32(codes[2], codes[3]));
  const __m512i pairs = _mm512_maddubs_epi16(bytes, _mm512_set1_epi16(0x1001));  // even + 16 * odd
  // Each quarter has two bytes of each block.
  const __m256i order = _mm256_setr_epi16(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_permutexvar_epi16(order, _mm512_cvtepi16_epi8(pairs)));
}

struct Avx512 {
  static constexpr int kBlocks = 16, kStored = 4;

  template <class T>
  static Faults choose_scales(const T* x, float g, float* d, std::uint8_t* scales) {
    __m512i magnitudes[kBlocks];
#pragma GCC unroll 16
    for (int b = 0; b < kBlocks; ++b) magnitudes[b] = magnitude_bits(load16(x + b * kBlock));
    const __m512i largest = largest_of_each(magnitudes);
    const __mmask16 nonfinite = _mm512_cmpgt_epi32_mask(largest, splat(kInf - 1));
    const __m512 wanted = _mm512_div_ps(number(largest), splat(6.0f * g));
    const __mmask16 saturated = _mm512_cmp_ps_mask(wanted, splat(448.0f * (1.0f + 0x1p-20f)), _CMP_GT_OQ);
    const __mmask16 zero = _mm512_testn_epi32_mask(largest, largest);
    const __m512 cut = _mm512_min_ps(_mm512_max_ps(wanted, splat(0x1p-9f)), splat(448.0f));
    const Scales rounded = round_to_e4m3(_mm512_mask_blend_ps(zero, cut, splat(1.0f)));
    _mm512_storeu_ps(d, _mm512_mul_ps(rounded.values, splat(g)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(scales), _mm512_cvtepi32_epi8(rounded.codes));
    return {static_cast<std::uint64_t>(saturated & ~nonfinite & 0xFFFF), nonfinite};
  }

  template <class T>
  static void store_codes(const T* x, const float* d, std::uint8_t* out) {
    __m512i codes[kStored];
#pragma GCC unroll 4
    for (int b = 0; b < kStored; ++b) codes[b] = codes_of(load16(x + b * kBlock), splat(d[b]));
    store_blocks(codes, out);
  }
};

}  // namespace

BlockCounts quantize_row_avx512(const float* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales) {
  return quantize_row<Avx512>(x, g, blocks, codes, scales);
}
BlockCounts quantize_row_avx512(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales) {
  return quantize_row<Avx512>(x, g, blocks, codes, scales);
}
BlockCounts quantize_row_avx512(const fp16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales) {
  return quantize_row<Avx512>(x, g, blocks, codes, scales);
}

}  // namespace megamoe
