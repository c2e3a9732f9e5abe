// nvfp4_slab.h: what an NVFP4 kernel for some instruction set is given. Plain data and declarations: a file
// compiled for wider vectors includes nothing that has code, lest the linker keep its copy of a shared
// function for all CPUs.
#pragma once

#include <cstdint>

namespace megamoe::cpu {

// The scratch memory a kernel may use: that much for each row of x and block of 16 columns, and so many of
// them.
inline constexpr std::int64_t kExpandedBlockBytes = 24;
inline constexpr std::int64_t kExpandedBlocks = 8192;

// Some panels of weights (packed_matrix.h) times some rows of x.
struct Nvfp4Slab {
  std::int64_t blocks;                // columns / 16
  const std::uint8_t* const* panels;  // [num_panels]
  std::int64_t num_panels;
  const std::uint8_t* const* x_codes;   // [rows], of 8 * blocks each
  const std::uint8_t* const* x_scales;  // [rows], of `blocks` each
  std::int64_t rows;                    // <= 128
  const float* e4m3;                    // [256]: every code's value
  std::uint8_t* scratch;                // [kExpandedBlocks * kExpandedBlockBytes]
  float* sums;                          // out: [num_panels, rows, 16]
};

void multiply_avx512(const Nvfp4Slab& slab);
void multiply_avx512_vbmi(const Nvfp4Slab& slab);
void multiply_avx512_bf16(const Nvfp4Slab& slab);
void multiply_avx_vnni(const Nvfp4Slab& slab);
void multiply_avx2(const Nvfp4Slab& slab);

// Only the products, in registers, as often as makes `rounds`: the rate that bounds a kernel. Returns the
// multiplications and additions.
std::int64_t only_products_avx512(std::int64_t rounds);
std::int64_t only_products_avx_vnni(std::int64_t rounds);
std::int64_t only_products_avx2(std::int64_t rounds);

}  // namespace megamoe::cpu
