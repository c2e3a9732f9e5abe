// nvfp4_avx512.cc: the NVFP4 kernel for AVX-512 with VNNI.
#include "cpu/nvfp4_avx512.h"
#include "cpu/nvfp4_products.h"

namespace megamoe::cpu {

void multiply_avx512(const Nvfp4Slab& slab) { multiply<Avx512>(slab); }
std::int64_t only_products_avx512(std::int64_t rounds) { return only_products<Avx512>(rounds); }

}  // namespace megamoe::cpu
