// quantize_x86.h: rows to NVFP4 with AVX2 and with AVX-512; the same bits as nvfp4.h. Plain declarations: a
// file compiled for an instruction set includes nothing that has code, lest the linker keep its copy of a
// shared function for all CPUs.
#pragma once

#include <cstdint>

#include "megamoe/types.h"

namespace megamoe {

struct BlockCounts {
  std::int64_t saturated = 0;
  std::int64_t nonfinite = 0;
};

// `blocks` blocks of x [16 * blocks] under tensor scale g: codes [8 * blocks], scales [blocks].
BlockCounts quantize_row_avx2(const float* x, float g, std::int64_t blocks, std::uint8_t* codes,
                              std::uint8_t* scales);
BlockCounts quantize_row_avx2(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                              std::uint8_t* scales);
BlockCounts quantize_row_avx2(const fp16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                              std::uint8_t* scales);

BlockCounts quantize_row_avx512(const float* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales);
BlockCounts quantize_row_avx512(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales);
BlockCounts quantize_row_avx512(const fp16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales);

// The largest finite magnitude of x [count], 0 without one.
float finite_amax_avx2(const float* x, std::int64_t count);
float finite_amax_avx2(const bf16* x, std::int64_t count);
float finite_amax_avx2(const fp16* x, std::int64_t count);

}  // namespace megamoe
