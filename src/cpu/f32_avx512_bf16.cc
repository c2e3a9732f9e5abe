// f32_avx512_bf16.cc: the kernel for BF16 and FP8 activations for AVX-512 with BF16: products of two columns
// at once. Its instruction takes subnormal operands for 0 and makes subnormal results 0; layer.md has the
// bound.
#include "cpu/f32_kernel.h"
#include "cpu/zmm.h"

namespace megamoe::cpu {
namespace {

// The codes' values in BF16, twice, as the lookup takes 5 bits of which the code is 4.
alignas(64) constexpr std::uint16_t kBf16OfCodes[32] = {
    0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040, 0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80,
    0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0, 0x0000, 0x3F00, 0x3F80, 0x3FC0, 0x4000, 0x4040,
    0x4080, 0x40C0, 0x8000, 0xBF00, 0xBF80, 0xBFC0, 0xC000, 0xC040, 0xC080, 0xC0C0};

// Likewise as pairs of BF16: what a block's scale is multiplied by and, in the upper half, what 1.5 times
// that is, as each value is a power of two times one of them.
alignas(64) constexpr std::uint32_t kPairsOfCodes[16] = {
    0x00000000, 0x00003F00, 0x00003F80, 0x3F800000, 0x00004000, 0x40000000, 0x00004080, 0x40800000,
    0x00008000, 0x0000BF00, 0x0000BF80, 0xBF800000, 0x0000C000, 0xC0000000, 0x0000C080, 0xC0800000};

// The two columns, of 8, of a step: those of the words of packed codes, shifted by 4 * step.
constexpr int kColumns[4][2] = {{0, 2}, {4, 6}, {1, 3}, {5, 7}};

struct F32Avx512Bf16 : Zmm {
  static constexpr int kFew = 4, kPanels = 2, kTile = 12, kSteps = 4;
  static constexpr bool kHasNvfp4 = true;

  static Floats dot(Floats sum, Ints a, Ints b) {
    return _mm512_dpbf16_ps(sum, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static Floats product(Ints a, Ints b) { return dot(broadcast(0.0f), a, b); }
  // Of numbers of at most 8 bits, or NaN both, as two columns of BF16.
  static Ints join(Floats low, Floats high) {
    return _mm512_or_si512(_mm512_srli_epi32(as_ints(low), 16), as_ints(high));
  }

  // Scales for folding. Where no folded value is below E4M3's normal range they are all exact but for 1.5
  // times the scale, which is rounded once for all.
  struct FoldedScales {
    Floats scales;
    Ints pairs;  // the scale and 1.5 times it
    bool normal;
  };
  template <bool kFold>
  static auto prepare_scales(const std::uint8_t* p) {
    const Floats scales = multiply(e4m3(p), broadcast(kFold ? 0x1p5f : 0x1p8f));
    if constexpr (kFold) {
      constexpr char kLeast = 0x28;  // 2^-2, half of which is multiplied by 2^-3
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      const __m128i magnitudes = _mm_and_si128(codes, _mm_set1_epi8(0x7F)), one = _mm_set1_epi8(1);
      const __mmask16 small =  // 0 is not
          _mm_cmplt_epu8_mask(_mm_sub_epi8(magnitudes, one), _mm_set1_epi8(kLeast - 1));
      const Floats more = round_to_e4m3<Zmm>(multiply(scales, broadcast(1.5f)));
      return FoldedScales{scales, join(scales, more), small == 0};
    } else {
      return scales;
    }
  }
  // Each column of the pair times its scale: the other one meets a 0. The products are exact in BF16.
  template <bool kFold>
  static Ints step_of_codes(const std::uint8_t* codes, int step, Floats scales) {
    const Ints shifted = _mm512_srli_epi16(_mm512_loadu_si512(codes), static_cast<unsigned>(4 * step));
    const Ints pair = _mm512_permutexvar_epi16(shifted, _mm512_load_si512(kBf16OfCodes));
    const Ints high_scale = as_ints(scales), low_scale = _mm512_srli_epi32(high_scale, 16);
    Floats low = product(pair, low_scale), high = product(pair, high_scale);
    if constexpr (kFold) low = round_to_e4m3<Zmm>(low), high = round_to_e4m3<Zmm>(high);
    return join(low, high);
  }
  template <bool kFold>
  static Ints step_of_codes(const std::uint8_t* codes, int step, const FoldedScales& scales) {
    if (!scales.normal) [[unlikely]]
      return step_of_codes<kFold>(codes, step, scales.scales);
    const auto column = [&](int c) {
      const Ints shifted =
          _mm512_srli_epi32(_mm512_loadu_si512(codes), static_cast<unsigned>(c % 4 * 8 + c / 4 * 4));
      return product(_mm512_permutexvar_epi32(shifted, _mm512_load_si512(kPairsOfCodes)), scales.pairs);
    };
    return join(column(kColumns[step][0]), column(kColumns[step][1]));
  }

  static Ints step_of_bf16(const std::uint8_t* p, int step) {
    const Ints low = words(p + kColumns[step][0] * kRowsOfPanel * 2),
               high = words(p + kColumns[step][1] * kRowsOfPanel * 2);
    return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
  }

  // 16 columns of 16 bits, each 8 in the order of the steps.
  static void store_words(__m256i columns, std::int32_t* out) {
    const __m256i order =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_shuffle_epi8(columns, order));
  }
  static void words_of_bf16(const std::uint8_t* p, std::int32_t* out) {
    store_words(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)), out);
  }
  static void words_of_e4m3(const std::uint8_t* p, std::int32_t* out) {
    const Ints values = _mm512_castps_si512(multiply(e4m3(p), broadcast(0x1p8f)));
    store_words(_mm512_cvtepi32_epi16(_mm512_srli_epi32(values, 16)), out);
  }

  static Floats accumulate(Floats acc, Ints w, Ints x) { return dot(acc, w, x); }
};

}  // namespace

void multiply_f32_avx512_bf16(const F32Slab& slab) { multiply<F32Avx512Bf16>(slab); }
std::int64_t only_products_f32_avx512_bf16(std::int64_t rounds) {
  return only_products<F32Avx512Bf16>(rounds);
}

}  // namespace megamoe::cpu
