// nvfp4_avx512_vbmi.cc: the NVFP4 kernel for AVX-512 with VNNI and VBMI.
#include "cpu/nvfp4_avx512.h"

namespace megamoe::cpu {

void multiply_avx512_vbmi(const Nvfp4Slab& slab) { multiply<Avx512Vbmi>(slab); }

}  // namespace megamoe::cpu
