// nvfp4_avx512.cc: the NVFP4 kernel for AVX-512 with VNNI.
#include "cpu/nvfp4_kernel.h"
#include "cpu/zmm.h"

namespace megamoe::cpu {
namespace {

struct Avx512 : Zmm {
  static constexpr int kTile = 8, kPanels = 2;

  static Ints dot(const Ints (&w)[4], const Ints (&x)[4], Ints sum) {
    for (int j = 0; j < 4; ++j) sum = _mm512_dpbusd_epi32(sum, w[j], x[j]);
    return sum;
  }
};

}  // namespace

void multiply_avx512(const Nvfp4Slab& slab) { multiply<Avx512>(slab); }
std::int64_t only_products_avx512(std::int64_t rounds) { return only_products<Avx512>(rounds); }

}  // namespace megamoe::cpu
