// nvfp4_avx512.cc: the NVFP4 kernel for AVX-512 with VNNI.
#include "cpu/nvfp4_kernel.h"

namespace megamoe::cpu {
namespace {

struct Avx512 {
  static constexpr std::int64_t kLanes = 16;
  static constexpr int kTile = 16;
  using Ints = __m512i;
  using Floats = __m512;

  static Ints look_up(__m512i nibbles) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(table(kDoubledPlus12)),
                               _mm512_and_si512(nibbles, _mm512_set1_epi8(15)));
  }
  static Ints load_low(const std::uint8_t* p) { return look_up(_mm512_loadu_si512(p)); }
  static Ints load_high(const std::uint8_t* p) {
    return look_up(_mm512_srli_epi16(_mm512_loadu_si512(p), 4));
  }

  static Ints dot(const Ints (&w)[4], const std::uint8_t* x, std::int32_t correction) {
    const auto* columns = reinterpret_cast<const std::int32_t*>(x);
    Ints sum = _mm512_set1_epi32(correction);
    for (int j = 0; j < 4; ++j) sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(columns[j]));
    return sum;
  }

  // E4M3 shifted to where FP16 has its exponent is 2^-8 of its value; E4M3's NaN is made FP16's.
  static Floats scales(const std::uint8_t* p) {
    const __m256i codes = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256i halves =
        _mm256_and_si256(_mm256_slli_epi16(codes, 7), _mm256_set1_epi16(static_cast<short>(0xBF80)));
    const __m256i nan = _mm256_set1_epi16(0x3F80);
    return _mm512_cvtph_ps(_mm256_or_si256(halves, _mm256_cmpeq_epi16(_mm256_and_si256(halves, nan), nan)));
  }

  static Floats to_float(Ints v) { return _mm512_cvtepi32_ps(v); }
  static Floats broadcast(float x) { return _mm512_set1_ps(x); }
  static Floats load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, Floats v) { _mm512_storeu_ps(p, v); }
  static Floats multiply(Floats a, Floats b) { return _mm512_mul_ps(a, b); }
  static Floats multiply_add(Floats a, Floats b, Floats c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace

void multiply_avx512(const Nvfp4Slab& slab) { multiply<Avx512>(slab); }

}  // namespace megamoe::cpu
