// nvfp4_avx512.cc: the NVFP4 kernel for AVX-512 with VNNI.
#include "cpu/nvfp4_kernel.h"
#include "cpu/zmm.h"

namespace megamoe::cpu {
namespace {

struct Avx512 : Zmm {
  static constexpr int kTile = 16;

  static Ints dot(const Ints (&w)[4], const std::uint8_t* x, std::int32_t correction) {
    const auto* columns = reinterpret_cast<const std::int32_t*>(x);
    Ints sum = _mm512_set1_epi32(correction);
    for (int j = 0; j < 4; ++j) sum = _mm512_dpbusd_epi32(sum, w[j], _mm512_set1_epi32(columns[j]));
    return sum;
  }
};

}  // namespace

void multiply_avx512(const Nvfp4Slab& slab) { multiply<Avx512>(slab); }

}  // namespace megamoe::cpu
