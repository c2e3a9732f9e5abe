// nvfp4_avx512_bf16.cc: the NVFP4 kernel of avx512-bf16, for processors that add and look up beside their
// multipliers, as AMD's do. There the multipliers bound the kernel, and of the two multiplications by scales
// one can be had elsewhere.
//
// The scale of a block of x names a vector of a table. Its 16 elements are that scale times the mantissas of
// E4M3 and the last bit of the exponent, by which the scale of w picks one; the rest of w's scale, a power of
// 4 and the sign, is added to its bits.
#include "cpu/nvfp4_avx512.h"

namespace megamoe::cpu {
namespace {

constexpr int kNaN = 0x7F;  // E4M3's

struct Products {
  alignas(64) std::uint32_t bits[256][16];  // less the exponent of 1
};
constexpr Products kProducts = [] {
  Products out{};
  for (unsigned code = 0; code < 256; ++code) {
    const unsigned exponent = code >> 3 & 15, mantissa = code & 7;
    // 0, too, takes a vector of numbers: its codes are made 0.
    const unsigned significand = exponent == 0 && mantissa != 0 ? mantissa : 8 + mantissa;
    float value = static_cast<float>(significand) * 0x1p-9f * kScaleOfX;
    for (unsigned e = 1; e < exponent; ++e) value *= 2.0f;
    for (unsigned j = 0; j < 16; ++j) {
      const float product = value * static_cast<float>(8 + j % 8) * (j < 8 ? 0x1p-3f : 0x1p-2f);
      out.bits[code][j] = __builtin_bit_cast(std::uint32_t, product) - (127u << 23) + (code >> 7 << 31);
    }
  }
  return out;
}();

struct LookedUpScales {
  __m512i index, power;  // into a vector of the table; what is added to its element
  __m512 one23;          // kOne23, which is taken off the sum; NaN where the scale is

  LookedUpScales() = default;
  LookedUpScales(const std::uint8_t* codes, __m512i (&w)[4]) {
    const __m512i bits = _mm512_castps_si512(Zmm::e4m3(codes));
    index = _mm512_srli_epi32(bits, 20);
    power = _mm512_and_si512(bits, _mm512_set1_epi32(static_cast<int>(0xFF000000u)));
    one23 = Zmm::broadcast(kOne23);
    const __m128i all = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes));
    // 0 and NaN, to which the table does not apply; plus 1, whatever the sign, they are these bits alone.
    if (_mm_testn_epi8_mask(_mm_add_epi8(all, _mm_set1_epi8(1)), _mm_set1_epi8(0x7E)) == 0) [[likely]]
      return;
    const __m128i nan = _mm_set1_epi8(kNaN), magnitudes = _mm_and_si128(all, nan);
    const __mmask16 is_zero = _mm_testn_epi8_mask(magnitudes, magnitudes),
                    is_nan = _mm_cmpeq_epi8_mask(magnitudes, nan);
    for (auto& v : w) v = _mm512_mask_mov_epi32(v, is_zero, _mm512_set1_epi8(12));
    power = _mm512_mask_mov_epi32(power, is_zero, _mm512_set1_epi32(127 << 23));  // any that overflows not
    one23 = _mm512_mask_mov_ps(one23, is_nan, _mm512_castsi512_ps(_mm512_set1_epi32(0x7FC00000)));
  }
  static std::int32_t of_x(const float*, std::uint8_t code, __m128i& values, std::int32_t& seed) {
    if ((code & kNaN) == 0) values = _mm_setzero_si128(), seed = kBitsOfOne23;
    if ((code & kNaN) == kNaN) seed += 0x7FE00000 - kBitsOfOne23;  // NaN, whatever is added to it
    return static_cast<std::int32_t>(code * sizeof(kProducts.bits[0]));
  }
  __m512 add(__m512i dot, const std::int32_t* x, __m512 acc) const {
    const void* vector = reinterpret_cast<const std::uint8_t*>(kProducts.bits) + *x;
    const __m512i element = _mm512_permutexvar_epi32(index, _mm512_load_si512(vector));
    const __m512 product = _mm512_castsi512_ps(_mm512_add_epi32(element, power));
    return _mm512_fmadd_ps(_mm512_sub_ps(_mm512_castsi512_ps(dot), one23), product, acc);
  }
};

// Decoding is looking up, too, and so costs little beside the multiplications.
struct ManyRows : Avx512Vbmi {
  using Scales = LookedUpScales;
  static constexpr int kTile = 20, kPanels = 1;
  static constexpr bool kDecodeOnce = false;

  using Avx512Vbmi::dot;
  // The compiler would load and spread each word before.
  static Ints dot(const Ints (&w)[4], const std::int32_t* x, Ints sum) {
    for (int j = 0; j < 4; ++j) asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sum) : "v"(w[j]), "m"(x[j]));
    return sum;
  }
};

}  // namespace

void multiply_avx512_bf16(const Nvfp4Slab& slab) {
  constexpr std::int64_t kFew = 8;  // rows, for which decoding counts more
  if (slab.rows > kFew) {
    multiply<ManyRows>(slab);
  } else {
    multiply_avx512_vbmi(slab);
  }
}

}  // namespace megamoe::cpu
