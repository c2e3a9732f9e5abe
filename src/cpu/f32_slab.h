// f32_slab.h: what a kernel for BF16 or FP8 activations for some instruction set is given. Plain data and
// declarations, for the reason that nvfp4_slab.h states.
#pragma once

#include <cstdint>

namespace megamoe::cpu {

// The scratch memory a kernel may use: 32-bit words for x, of which it takes up to 128 for a row and a span
// of 128 columns, and a factor for each of those.
inline constexpr std::int64_t kExpandedWords = 48 << 10;
inline constexpr std::int64_t kExpandedFactors = kExpandedWords / 128;

// What a panel holds and what becomes of it: NVFP4's codes times their block scales, exact; or folded to
// E4M3 (numerics/fp8_tile.h).
enum class PanelFormat : std::uint8_t { kF32, kBf16, kNvfp4, kFolded };

struct F32Panel {
  const std::uint8_t* packed;  // packed_matrix.h
  PanelFormat format;
};

// Some panels of weights times some rows of x.
struct F32Slab {
  std::int64_t blocks;     // columns / 16
  const F32Panel* panels;  // [num_panels]
  std::int64_t num_panels;
  const std::uint8_t* const* x;  // [rows], of 16 * blocks BF16 each; of as many E4M3, where there are factors
  const float* const* x_factors;  // [rows], of a scale for each 128 columns; or null
  std::int64_t rows;              // 1 to 128
  std::int32_t* scratch;          // [kExpandedWords + kExpandedFactors]
  float* sums;                    // out: [num_panels, rows, 16]
};

void multiply_f32_avx2(const F32Slab& slab);
void multiply_bf16_avx2(const F32Slab& slab);  // part of it: all panels in kNvfp4, x in BF16
void multiply_f32_avx512(const F32Slab& slab);
void multiply_f32_avx512_bf16(const F32Slab& slab);  // no panel in kF32

// As in nvfp4_slab.h.
std::int64_t only_products_f32_avx2(std::int64_t rounds);
std::int64_t only_products_f32_avx512(std::int64_t rounds);
std::int64_t only_products_f32_avx512_bf16(std::int64_t rounds);

}  // namespace megamoe::cpu
