// nvfp4_kernel.h: the NVFP4 kernel for x86, written once over a vector type; nvfp4_<set>.cc compiles it for
// one instruction set. All of it has internal linkage.
//
// Weights become w + 12 (w a doubled code, 0 .. 24 then), because the byte products of x86 take an unsigned
// and a signed factor; sum (w + 12) * x  -  12 * sum x  is the dot product. x is expanded once for all
// panels. Tile by tile, for each block of 16 columns, its rows stand together:
//
//   | doubled codes, 16 bytes a row | scales, FP32 | -12 * sum x, int32 |
//
// A lane is a row of weights, its accumulator one register; so the order of the additions is that of gemm.h.
//
// A Vector has
//   kLanes, kTile              rows of weights in a vector, 8 or 16; rows of x that share a load of them
//   Ints, Floats
//   load_low(p), load_high(p)  w + 12 of the low, of the high codes of the bytes at p
//   dot(w, x, correction)      4 columns of each of w[4] times the 16 bytes at x, plus the correction
//   scales(p)                  kLanes E4M3 codes at p, times 2^-8
//   to_float, broadcast, load, store, multiply, multiply_add
#pragma once

#include <immintrin.h>

#include "cpu/nvfp4_slab.h"

namespace megamoe::cpu {
namespace {

constexpr std::int64_t kRowsOfPanel = 16;
constexpr std::int64_t kBlockOfPanel = 144;  // bytes
constexpr std::int64_t kGroup = 4;           // blocks whose scales stand together
// How far ahead of their use weights are asked for: about a page, beyond which the hardware does not look.
constexpr std::int64_t kAhead = 7 * kGroup * kBlockOfPanel;

// The doubled codes, and with 12 added.
alignas(16) constexpr std::int8_t kDoubled[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
alignas(16) constexpr std::int8_t kDoubledPlus12[16] = {12, 13, 14, 15, 16, 18, 20, 24,
                                                        12, 11, 10, 9,  8,  6,  4,  0};
inline __m128i table(const std::int8_t* values) {
  return _mm_load_si128(reinterpret_cast<const __m128i*>(values));
}

// A hint, and no access: it may lie behind the matrix.
inline void prefetch(const std::uint8_t* p) { _mm_prefetch(reinterpret_cast<const char*>(p), _MM_HINT_T0); }

// What x's scales are multiplied by: 2^-2 undoes both doublings, 2^8 is missing in the weights' scales.
constexpr float kScaleOfX = 0x1p6f;

// One row of x, as row `i` of a tile of `rows`.
inline void expand_row(const Nvfp4Slab& slab, std::int64_t row, std::int64_t first_block, std::int64_t blocks,
                       std::int64_t rows, std::int64_t i, std::uint8_t* tile) {
  const std::uint8_t* codes = slab.x_codes[row] + first_block * 8;
  const std::uint8_t* scales = slab.x_scales[row] + first_block;
  const __m128i doubled = table(kDoubled), low = _mm_set1_epi8(15);
  for (std::int64_t b = 0; b < blocks; ++b, tile += rows * kExpandedBlockBytes) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + b * 8));
    const __m128i nibbles =
        _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    const __m128i values = _mm_shuffle_epi8(doubled, nibbles);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(tile + i * 16), values);
    const __m128i halves = _mm_sad_epu8(_mm_add_epi8(values, _mm_set1_epi8(12)), _mm_setzero_si128());
    const int sum = _mm_cvtsi128_si32(halves) + _mm_extract_epi16(halves, 4) - 16 * 12;
    reinterpret_cast<float*>(tile + rows * 16)[i] = slab.e4m3[scales[b]] * kScaleOfX;
    reinterpret_cast<std::int32_t*>(tile + rows * 20)[i] = -12 * sum;
  }
}

// Rows of x times kLanes rows of a panel, over `blocks` blocks; `lane` is the first row of the panel.
// `packed` begins at a group. Adds to sums [kRows, 16], or begins them.
template <class V, int kRows>
void multiply_lanes(const std::uint8_t* packed, std::int64_t blocks, std::int64_t lane, const std::uint8_t* x,
                    bool begin, float* sums) {
  typename V::Floats acc[kRows];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
    acc[i] = begin ? V::broadcast(0.0f) : V::load(sums + i * kRowsOfPanel + lane);
  while (blocks > 0) {
    const std::int64_t group = blocks < kGroup ? blocks : kGroup;
    const std::uint8_t* codes = packed + group * kRowsOfPanel + lane * 4;
    prefetch(packed + kAhead);
    for (std::int64_t b = 0; b < group; ++b, codes += 128, x += kRows * kExpandedBlockBytes) {
      prefetch(codes + kAhead);
      prefetch(codes + kAhead + 64);
      const typename V::Ints w[4] = {V::load_low(codes), V::load_high(codes), V::load_low(codes + 64),
                                     V::load_high(codes + 64)};
      const typename V::Floats scales = V::scales(packed + b * kRowsOfPanel + lane);
      const float* x_scales = reinterpret_cast<const float*>(x + kRows * 16);
      const std::int32_t* corrections = reinterpret_cast<const std::int32_t*>(x + kRows * 20);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) {
        const typename V::Ints dot = V::dot(w, x + i * 16, corrections[i]);
        acc[i] = V::multiply_add(V::to_float(dot), V::multiply(scales, V::broadcast(x_scales[i])), acc[i]);
      }
    }
    packed += group * kBlockOfPanel;
    blocks -= group;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i) V::store(sums + i * kRowsOfPanel + lane, acc[i]);
}

// As multiply_lanes, for all rows of a panel and 1 to kRows rows of x.
template <class V, int kRows>
void multiply_tile(std::int64_t rows, const std::uint8_t* packed, std::int64_t blocks, const std::uint8_t* x,
                   bool begin, float* sums) {
  if (rows == kRows) {
    for (std::int64_t lane = 0; lane < kRowsOfPanel; lane += V::kLanes) {
      multiply_lanes<V, kRows>(packed, blocks, lane, x, begin, sums);
    }
  } else if constexpr (kRows > 1) {
    multiply_tile<V, kRows - 1>(rows, packed, blocks, x, begin, sums);
  }
}

template <class V>
void multiply(const Nvfp4Slab& slab) {
  const std::int64_t tiles = (slab.rows + V::kTile - 1) / V::kTile;  // of about equal size
  const auto first_of = [&](std::int64_t tile) { return slab.rows * tile / tiles; };
  const std::int64_t most_blocks = kExpandedBlocks / slab.rows / kGroup * kGroup;
  for (std::int64_t first = 0; first < slab.blocks; first += most_blocks) {
    const std::int64_t rest = slab.blocks - first, blocks = rest < most_blocks ? rest : most_blocks;
    const auto expanded = [&](std::int64_t row) { return slab.scratch + row * blocks * kExpandedBlockBytes; };
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t row = first_of(t), rows = first_of(t + 1) - row;
      for (std::int64_t i = 0; i < rows; ++i)
        expand_row(slab, row + i, first, blocks, rows, i, expanded(row));
    }
    for (std::int64_t p = 0; p < slab.num_panels; ++p) {
      for (std::int64_t t = 0; t < tiles; ++t) {
        const std::int64_t row = first_of(t);
        multiply_tile<V, V::kTile>(first_of(t + 1) - row, slab.panels[p] + first * kBlockOfPanel, blocks,
                                   expanded(row), first == 0,
                                   slab.sums + (p * slab.rows + row) * kRowsOfPanel);
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::cpu
