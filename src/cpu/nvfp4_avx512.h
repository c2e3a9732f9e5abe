// nvfp4_avx512.h: what the NVFP4 kernels for AVX-512 with VNNI have in common.
#pragma once

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
}  // namespace megamoe::cpu
