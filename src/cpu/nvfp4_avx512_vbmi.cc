// nvfp4_avx512_vbmi.cc: the NVFP4 kernel for AVX-512 with VNNI and VBMI, whose lookup of bytes takes six
// bits: no code needs to be cut out of its byte before it is looked up.
#include "cpu/nvfp4_avx512.h"

namespace megamoe::cpu {
namespace {

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

}  // namespace

void multiply_avx512_vbmi(const Nvfp4Slab& slab) { multiply<Avx512Vbmi>(slab); }

}  // namespace megamoe::cpu
