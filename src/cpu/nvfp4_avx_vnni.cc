// nvfp4_avx_vnni.cc: the NVFP4 kernel for AVX-VNNI, which processors without AVX-512 have.
#include "cpu/nvfp4_kernel.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

struct AvxVnni : Ymm {
  static constexpr int kTile = 8;

  static Ints dot(const Ints (&w)[4], const std::uint8_t* x, std::int32_t correction) {
    const auto* columns = reinterpret_cast<const std::int32_t*>(x);
    Ints sum = _mm256_set1_epi32(correction);
    for (int j = 0; j < 4; ++j) sum = _mm256_dpbusd_avx_epi32(sum, w[j], _mm256_set1_epi32(columns[j]));
    return sum;
  }
};

}  // namespace

void multiply_avx_vnni(const Nvfp4Slab& slab) { multiply<AvxVnni>(slab); }

}  // namespace megamoe::cpu
