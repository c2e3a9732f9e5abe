// nvfp4_avx512.h: what the NVFP4 kernels for AVX-512 with VNNI have in common.
#pragma once

#include "cpu/nvfp4_kernel.h"
#include "cpu/zmm.h"

namespace megamoe::cpu {
namespace {

struct Avx512 : Zmm {
  using Scales = FusedScales<Zmm>;
  static constexpr int kTile = 8, kPanels = 2;
  static constexpr bool kDecodeOnce = true;

  static Ints dot(const Ints (&w)[4], const Ints (&x)[4], Ints sum) {
    for (int j = 0; j < 4; ++j) sum = _mm512_dpbusd_epi32(sum, w[j], x[j]);
    return sum;
  }
};

#ifdef __AVX512VBMI__
// With VBMI, whose lookup of bytes takes six bits: no code needs to be cut out of its byte before.
struct Avx512Vbmi : Avx512 {
  // Four times the table: two bits of the other code do not matter.
  static Ints look_up(const std::int8_t* values, __m512i codes) {
    return _mm512_permutexvar_epi8(codes, _mm512_broadcast_i32x4(table(values)));
  }
  static Ints load_low(const std::int8_t* values, const std::uint8_t* p) {
    return look_up(values, _mm512_loadu_si512(p));
  }
  static Ints load_high(const std::int8_t* values, const std::uint8_t* p) {
    return look_up(values, _mm512_srli_epi16(_mm512_loadu_si512(p), 4));
  }
};
#endif

}  // namespace
}  // namespace megamoe::cpu
