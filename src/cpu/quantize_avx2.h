// quantize_avx2.h: the NVFP4 quantiser for AVX2. Plain declarations, as in nvfp4_slab.h.
#pragma once

#include <cstdint>

namespace megamoe::cpu {

// As quantize_row (codecs.h), x being the bits of BF16; e4m3 [256] holds every code's value.
std::int64_t quantize_row_avx2(const std::uint16_t* x, float g, std::int64_t blocks, const float* e4m3,
                               std::uint8_t* codes, std::uint8_t* scales);

}  // namespace megamoe::cpu
