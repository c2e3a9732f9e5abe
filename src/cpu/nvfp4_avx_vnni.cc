// nvfp4_avx_vnni.cc: the NVFP4 kernel for AVX-VNNI, which processors without AVX-512 have.
#include "cpu/nvfp4_kernel.h"
#include "cpu/nvfp4_products.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

struct AvxVnni : Ymm {
  using Scales = FusedScales<Ymm>;
  static constexpr int kTile = 8, kPanels = 1;
  static constexpr bool kDecodeOnce = true;

  static Ints dot(const Ints (&w)[4], const Ints (&x)[4], Ints sum) {
    for (int j = 0; j < 4; ++j) sum = _mm256_dpbusd_avx_epi32(sum, w[j], x[j]);
    return sum;
  }
};

}  // namespace

void multiply_avx_vnni(const Nvfp4Slab& slab) { multiply<AvxVnni>(slab); }
std::int64_t only_products_avx_vnni(std::int64_t rounds) { return only_products<AvxVnni>(rounds); }

}  // namespace megamoe::cpu
