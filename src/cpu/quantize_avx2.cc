// quantize_avx2.cc: NVFP4 of a row of BF16, a block at a time. All but quantize_row_avx2 has internal
// linkage.
#include "cpu/quantize_avx2.h"

#include <immintrin.h>

namespace megamoe::cpu {
namespace {

constexpr int kBlock = 16;
constexpr std::uint32_t kBf16Inf = 0x7F80;

// E4M3 of a number from 2^-9 to 448: below 2^-6 the sum with 2^14 rounds to steps of 2^-9, above it 20 bits
// are rounded away.
inline std::uint8_t e4m3_code(float x) {
  const auto bits = __builtin_bit_cast(std::uint32_t, x);
  if (x >= 0x1p-6f)
    return static_cast<std::uint8_t>((bits - (120u << 23) + 0x7FFFFu + (bits >> 20 & 1u)) >> 20);
  return static_cast<std::uint8_t>(__builtin_bit_cast(std::uint32_t, x + 0x1p14f) -
                                   __builtin_bit_cast(std::uint32_t, 0x1p14f));
}

// The largest of 16 magnitudes.
inline std::uint32_t largest_of(__m256i magnitudes) {
  const __m128i eight =
      _mm_max_epu16(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(eight, _mm_set1_epi32(-1)));  // of the complements
  return 0xFFFFu - static_cast<std::uint32_t>(_mm_extract_epi16(least, 0));
}

// E2M1 codes of 8 numbers that are not negative, ties to even; of a NaN (0 / 0), 0.
inline __m256i e2m1_codes(__m256 q) {
  __m256i code = _mm256_setzero_si256();
  const auto count = [&](__m256 holds) { code = _mm256_sub_epi32(code, _mm256_castps_si256(holds)); };
  count(_mm256_cmp_ps(q, _mm256_set1_ps(0.25f), _CMP_GT_OQ));
  count(_mm256_cmp_ps(q, _mm256_set1_ps(0.75f), _CMP_GE_OQ));
  count(_mm256_cmp_ps(q, _mm256_set1_ps(1.25f), _CMP_GT_OQ));
  count(_mm256_cmp_ps(q, _mm256_set1_ps(1.75f), _CMP_GE_OQ));
  count(_mm256_cmp_ps(q, _mm256_set1_ps(2.5f), _CMP_GT_OQ));
  count(_mm256_cmp_ps(q, _mm256_set1_ps(3.5f), _CMP_GE_OQ));
  count(_mm256_cmp_ps(q, _mm256_set1_ps(5.0f), _CMP_GT_OQ));
  return code;
}

// 16 codes of 16 bits each, as 8 bytes.
inline void store_codes(__m256i codes, std::uint8_t* out) {
  const __m256i pairs = _mm256_madd_epi16(codes, _mm256_set1_epi32(0x00100001));  // even + 16 * odd
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_packus_epi16(words, words));
}

}  // namespace

std::int64_t quantize_row_avx2(const std::uint16_t* x, float g, std::int64_t blocks, const float* e4m3,
                               std::uint8_t* codes, std::uint8_t* scales) {
  const __m256i zero = _mm256_setzero_si256();
  std::int64_t saturated = 0;
  for (std::int64_t b = 0; b < blocks; ++b, x += kBlock, codes += kBlock / 2) {
    const __m256i values = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
    const __m256i magnitudes = _mm256_and_si256(values, _mm256_set1_epi16(0x7FFF));
    const std::uint32_t largest = largest_of(magnitudes);
    if (largest >= kBf16Inf) {  // a NaN or an infinity
      scales[b] = 0x7F;
      store_codes(zero, codes);
      continue;
    }
    scales[b] = 0x38;  // 1.0, the scale of an all-zero block
    if (largest != 0) {
      const float wanted = __builtin_bit_cast(float, largest << 16) / (6.0f * g);
      scales[b] = e4m3_code(wanted < 0x1p-9f ? 0x1p-9f : wanted < 448.0f ? wanted : 448.0f);
      saturated += wanted > 448.0f * (1.0f + 0x1p-20f) ? 1 : 0;
    }
    const __m256 d = _mm256_set1_ps(e4m3[scales[b]] * g);
    // The two unpackings and the packing treat each half of a vector alike: the order comes out as it was.
    const __m256i low =
        e2m1_codes(_mm256_div_ps(_mm256_castsi256_ps(_mm256_unpacklo_epi16(zero, magnitudes)), d));
    const __m256i high =
        e2m1_codes(_mm256_div_ps(_mm256_castsi256_ps(_mm256_unpackhi_epi16(zero, magnitudes)), d));
    const __m256i signs = _mm256_and_si256(_mm256_srli_epi16(values, 12), _mm256_set1_epi16(8));
    store_codes(_mm256_or_si256(_mm256_packus_epi32(low, high), signs), codes);
  }
  return saturated;
}

}  // namespace megamoe::cpu
