// quantize_avx2.cc: as quantize_x86.h says. All but its functions has internal linkage.
//
// Eight blocks at a time: their scales are the lanes of one vector.
#include <immintrin.h>

#include "numerics/quantize_loops.h"

namespace megamoe {
namespace {

inline __m256 splat(float x) { return _mm256_set1_ps(x); }
inline __m256i splat(std::uint32_t x) { return _mm256_set1_epi32(static_cast<int>(x)); }
inline __m256i bits(__m256 x) { return _mm256_castps_si256(x); }
inline __m256 number(__m256i x) { return _mm256_castsi256_ps(x); }
inline __m256i magnitude_bits(__m256 x) { return _mm256_and_si256(bits(x), splat(0x7FFFFFFFu)); }
constexpr std::uint32_t kInf = 0x7F800000u;
constexpr std::uint32_t kLeastNormal = 121u << 23;  // of E4M3: 2^-6

inline __m256 load8(const float* x) { return _mm256_loadu_ps(x); }
inline __m256 load8(const bf16* x) {
  const __m128i halves = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x));
  return number(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
inline __m256 load8(const fp16* x) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(x)));
}

// Lane i: the largest of m[i]'s lanes.
inline __m256i largest_of_each(const __m256i (&m)[8]) {
  const auto pair = [](__m256i a, __m256i b) {
    return _mm256_max_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
  };
  const auto four = [](__m256i a, __m256i b) {
    return _mm256_max_epi32(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  };
  const __m256i low = four(pair(m[0], m[1]), pair(m[2], m[3])),
                high = four(pair(m[4], m[5]), pair(m[6], m[7]));
  return _mm256_max_epi32(_mm256_permute2x128_si256(low, high, 0x20),
                          _mm256_permute2x128_si256(low, high, 0x31));
}

// E4M3 of numbers from 2^-9 to 448, as numbers and as codes. Adding 1.5 * 2^20 times the power of two below a
// number, at least 2^-6, rounds to three bits behind that and leaves their number in the last bits; eight
// codes more for each doubling.
struct Scales {
  __m256 values;
  __m256i codes;
};
inline Scales round_to_e4m3(__m256 x) {
  const __m256i power = _mm256_max_epi32(_mm256_and_si256(bits(x), splat(kInf)), splat(kLeastNormal));
  const __m256i step = _mm256_add_epi32(power, splat(20u << 23 | 1u << 22));
  const __m256 sum = _mm256_add_ps(x, number(step));
  const __m256i doublings = _mm256_srli_epi32(_mm256_sub_epi32(power, splat(kLeastNormal)), 20);
  return {_mm256_sub_ps(sum, number(step)), _mm256_add_epi32(_mm256_sub_epi32(bits(sum), step), doublings)};
}

// The codes of 8 magnitudes under the scale d; of a NaN (0 / 0) what `narrow` and `store_codes` make 0. With
// P the power of two below a quotient, at least 1, codes stand for steps of P / 2: adding P * 2^22 rounds to
// those, ties to even, and leaves their number in the last bits.
inline __m256i codes_of(__m256 x, __m256 d) {
  const __m256 quotient = _mm256_div_ps(number(magnitude_bits(x)), d);
  const __m256 q = _mm256_min_ps(splat(6.0f), quotient);  // a NaN stays one
  const __m256i power = _mm256_and_si256(bits(_mm256_max_ps(q, splat(1.0f))), splat(kInf));
  const __m256i step = _mm256_add_epi32(power, splat(22u << 23));
  const __m256i steps = _mm256_sub_epi32(bits(_mm256_add_ps(q, number(step))), step);
  // Two codes more for each doubling of P.
  return _mm256_add_epi32(steps, _mm256_sub_epi32(_mm256_srli_epi32(power, 22), splat(2u * 127)));
}

// 32 numbers of 8 bits, or of which the sign counts, out of vectors of 32 bits; in the order in which
// `in_order` puts right.
inline __m256i narrow(__m256i a, __m256i b, __m256i c, __m256i d) {
  return _mm256_packs_epi16(_mm256_packs_epi32(a, b), _mm256_packs_epi32(c, d));
}
inline __m256i in_order(__m256i v) {
  return _mm256_permutevar8x32_epi32(v, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

// The 16 bytes of two blocks, x[0] to x[3].
inline void store_codes(const __m256 (&x)[4], __m256 d0, __m256 d1, std::uint8_t* out) {
  const __m256i narrowed =
      narrow(codes_of(x[0], d0), codes_of(x[1], d0), codes_of(x[2], d1), codes_of(x[3], d1));
  const __m128i of_narrowed =
      _mm_setr_epi8(0, 1, 2, 3, 4, 5, 6, 7, 0, 0, 0, 0, 0, 0, 0, 0);  // a NaN is 127 or -128
  const __m256i codes = _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(of_narrowed), narrowed);
  const __m256i negative = narrow(bits(x[0]), bits(x[1]), bits(x[2]), bits(x[3]));
  const __m256i signs = _mm256_and_si256(_mm256_srli_epi16(negative, 4), _mm256_set1_epi8(8));
  const __m256i pairs = _mm256_maddubs_epi16(in_order(_mm256_or_si256(codes, signs)),
                                             _mm256_set1_epi16(0x1001));  // even + 16 * odd
  _mm_storeu_si128(reinterpret_cast<__m128i*>(out),
                   _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1)));
}

inline void store_scales(__m256i codes, std::uint8_t* out) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(codes), _mm256_extracti128_si256(codes, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
}

struct Avx2 {
  static constexpr int kBlocks = 8, kStored = 2;

  template <class T>
  static Faults choose_scales(const T* x, float g, float* d, std::uint8_t* scales) {
    __m256i magnitudes[kBlocks];
#pragma GCC unroll 8
    for (int b = 0; b < kBlocks; ++b) {
      magnitudes[b] =
          _mm256_max_epi32(magnitude_bits(load8(x + b * kBlock)), magnitude_bits(load8(x + b * kBlock + 8)));
    }
    const __m256i largest = largest_of_each(magnitudes);
    const int nonfinite = _mm256_movemask_ps(number(_mm256_cmpgt_epi32(largest, splat(kInf - 1))));
    const __m256 wanted = _mm256_div_ps(number(largest), splat(6.0f * g));
    const int saturated =
        _mm256_movemask_ps(_mm256_cmp_ps(wanted, splat(448.0f * (1.0f + 0x1p-20f)), _CMP_GT_OQ));
    const __m256 zero = number(_mm256_cmpeq_epi32(largest, _mm256_setzero_si256()));
    const __m256 cut = _mm256_min_ps(_mm256_max_ps(wanted, splat(0x1p-9f)), splat(448.0f));
    const Scales rounded = round_to_e4m3(_mm256_blendv_ps(cut, splat(1.0f), zero));
    _mm256_storeu_ps(d, _mm256_mul_ps(rounded.values, splat(g)));
    store_scales(rounded.codes, scales);
    return {static_cast<std::uint64_t>(saturated & ~nonfinite), static_cast<std::uint64_t>(nonfinite)};
  }

  template <class T>
  static void store_codes(const T* x, const float* d, std::uint8_t* out) {
    megamoe::store_codes({load8(x), load8(x + 8), load8(x + 16), load8(x + 24)}, splat(d[0]), splat(d[1]),
                         out);
  }
};

template <class T>
float finite_amax(const T* x, std::int64_t count) {
  __m256i largest = _mm256_setzero_si256();
  const auto take = [&](const T* at) {
    const __m256i magnitudes = magnitude_bits(load8(at));
    const __m256i finite = _mm256_cmpgt_epi32(splat(kInf), magnitudes);
    largest = _mm256_max_epi32(largest, _mm256_and_si256(magnitudes, finite));
  };
  std::int64_t i = 0;
  for (; i + 8 <= count; i += 8) take(x + i);
  if (i < count) {
    T last[8] = {};
    std::memcpy(last, x + i, static_cast<std::size_t>(count - i) * sizeof(T));
    take(last);
  }
  const __m256i each[8] = {largest, largest, largest, largest, largest, largest, largest, largest};
  return _mm256_cvtss_f32(number(largest_of_each(each)));
}

}  // namespace

BlockCounts quantize_row_avx2(const float* x, float g, std::int64_t blocks, std::uint8_t* codes,
                              std::uint8_t* scales) {
  return quantize_row<Avx2>(x, g, blocks, codes, scales);
}
BlockCounts quantize_row_avx2(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                              std::uint8_t* scales) {
  return quantize_row<Avx2>(x, g, blocks, codes, scales);
}
BlockCounts quantize_row_avx2(const fp16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                              std::uint8_t* scales) {
  return quantize_row<Avx2>(x, g, blocks, codes, scales);
}

float finite_amax_avx2(const float* x, std::int64_t count) { return finite_amax(x, count); }
float finite_amax_avx2(const bf16* x, std::int64_t count) { return finite_amax(x, count); }
float finite_amax_avx2(const fp16* x, std::int64_t count) { return finite_amax(x, count); }

}  // namespace megamoe
