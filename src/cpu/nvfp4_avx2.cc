// nvfp4_avx2.cc: the NVFP4 kernel for AVX2.
#include "cpu/nvfp4_kernel.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

struct Avx2 : Ymm {
  using Scales = FusedScales<Ymm>;
  static constexpr int kTile = 8, kPanels = 1;
  static constexpr bool kDecodeOnce = true;

  // 16 bits hold what a lane adds up: 8 products of at most 24 * 12.
  static Ints dot(const Ints (&w)[4], const Ints (&x)[4], Ints seed) {
    Ints pairs = _mm256_maddubs_epi16(w[0], x[0]);
    for (int j = 1; j < 4; ++j) pairs = _mm256_add_epi16(pairs, _mm256_maddubs_epi16(w[j], x[j]));
    return _mm256_add_epi32(_mm256_madd_epi16(pairs, _mm256_set1_epi16(1)), seed);
  }
};

}  // namespace

void multiply_avx2(const Nvfp4Slab& slab) { multiply<Avx2>(slab); }
std::int64_t only_products_avx2(std::int64_t rounds) { return only_products<Avx2>(rounds); }

}  // namespace megamoe::cpu
