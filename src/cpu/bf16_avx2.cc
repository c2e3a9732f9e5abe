// bf16_avx2.cc: the kernel for NVFP4 weights and BF16 activations for AVX2: FP32 products, fused with their
// addition.
//
// A lane is a row of weights. For each block of 16 columns it has an accumulator of codes times x, over
// ascending columns; that times the block's scale is added to the output's sum, over ascending blocks, with
// one rounding. So scales cost one multiplication in 17 with any number of rows; but a lone row, which
// decoding bounds, takes a fifth fewer instructions than with scales in the weights. All row counts take this
// order.
//
// x is expanded once for all panels, a span of 128 columns after the other, in each the rows one after the
// other. Up to kFew rows take the weights of a panel as they are decoded; of more rows some do, span by span,
// and leave them in the first-level cache for the others.
//
// A doubled code is converted from a lane's highest byte, and so is 2^24 times as large; x is made 2^16 times
// smaller, which is exact for all BF16; the scales come times 2^-8; and all sums are halved at the end. So a
// block's sum overflows from 2^119 on.
#include "cpu/f32_slab.h"
#include "cpu/x86.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

constexpr std::int64_t kBlocksOfSpan = 8, kColumnsOfSpan = 16 * kBlocksOfSpan;
constexpr int kFew = 4, kTile = 6;  // rows

// Accesses to memory stay on their side of this. GCC would load all of a block first, and spill it.
[[gnu::always_inline]] inline void in_order() { asm volatile("" ::: "memory"); }

// Weights of a span of a panel.
struct DecodedSpan {
  alignas(64) float columns[kColumnsOfSpan][kRowsOfPanel];
  float scales[kBlocksOfSpan][kRowsOfPanel];
};

// Adds the products of kBlocks blocks of a panel, side by side, to the sums of kRows rows of x. Leaves the
// weights behind, if kKeep.
template <int kRows, int kBlocks, bool kKeep>
[[gnu::always_inline]] inline void add_packed(const std::uint8_t* codes, const std::uint8_t* scales,
                                              const float* x, __m256 (&sums)[kRows][2],
                                              float (*columns)[kRowsOfPanel], float (*kept)[kRowsOfPanel]) {
  __m256 acc[kBlocks][kRows][2];
#pragma GCC unroll 64
  for (int four = 0; four < 4; ++four) {  // columns, whose codes lie in one half of some bytes
#pragma GCC unroll 64
    for (int b = 0; b < kBlocks; ++b) {
      const std::uint8_t* bytes = codes + b * kCodesOfBlock + four / 2 * (kCodesOfBlock / 2);
      __m256i doubled[2];
#pragma GCC unroll 64
      for (int v = 0; v < 2; ++v) {
        doubled[v] = four % 2 == 0 ? Ymm::load_low(kDoubled, bytes + v * 32)
                                   : Ymm::load_high(kDoubled, bytes + v * 32);
      }
#pragma GCC unroll 64
      for (int i = 0; i < 4; ++i) {
        in_order();
        const int k = b * 16 + four * 4 + i;
        const __m256 w[2] = {Ymm::to_float(Ymm::byte_to_top(doubled[0], i)),
                             Ymm::to_float(Ymm::byte_to_top(doubled[1], i))};
        if constexpr (kKeep) Ymm::store(columns[k], w[0]), Ymm::store(columns[k] + 8, w[1]);
#pragma GCC unroll 64
        for (int r = 0; r < kRows; ++r) {
          const __m256 value = Ymm::broadcast(x[r * kColumnsOfSpan + k]);
#pragma GCC unroll 64
          for (int v = 0; v < 2; ++v) {
            acc[b][r][v] = four == 0 && i == 0 ? Ymm::multiply(w[v], value)
                                               : Ymm::multiply_add(w[v], value, acc[b][r][v]);
          }
        }
      }
#pragma GCC unroll 64
      for (int r = 0; r < kRows; ++r)  // not later, behind a branch
        Ymm::keep(acc[b][r][0]), Ymm::keep(acc[b][r][1]);
    }
  }
#pragma GCC unroll 64
  for (int b = 0; b < kBlocks; ++b) {
    __m256 scale[2];
    Ymm::e4m3_of_panel(scales + b * kRowsOfPanel, scale);
    if constexpr (kKeep) Ymm::store(kept[b], scale[0]), Ymm::store(kept[b] + 8, scale[1]);
#pragma GCC unroll 64
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 64
      for (int v = 0; v < 2; ++v) sums[r][v] = Ymm::multiply_add(acc[b][r][v], scale[v], sums[r][v]);
    }
  }
}

// Adds the products of a panel's `blocks` blocks, which begin at a group and, if kKeep, are of one span, with
// kRows rows of x, whose spans are `stride` numbers apart, to sums [kRows, 16].
template <int kRows, bool kKeep>
void multiply_packed(const std::uint8_t* packed, std::int64_t blocks, const float* x, std::int64_t stride,
                     float* sums, DecodedSpan* kept) {
  constexpr int kTogether = kRows == 1 ? 2 : 1;  // blocks, lest few accumulators wait for themselves
  __m256 acc[kRows][2];
#pragma GCC unroll 64
  for (int r = 0; r < kRows; ++r) {
    acc[r][0] = Ymm::load(sums + r * kRowsOfPanel), acc[r][1] = Ymm::load(sums + r * kRowsOfPanel + 8);
  }
  for (std::int64_t first = 0; first < blocks; first += kGroup, packed += kGroup * kBlockOfPanel) {
    const std::int64_t rest = blocks - first, group = rest < kGroup ? rest : kGroup;
#pragma GCC unroll 64
    for (std::int64_t i = 0; i < kGroup * kBlockOfPanel; i += 64) prefetch(packed + kAhead + i);
    const float* at = x + first / kBlocksOfSpan * stride + first % kBlocksOfSpan * 16;
    const auto add = [&]<int kBlocks>(std::int64_t b) __attribute__((always_inline)) {
      add_packed<kRows, kBlocks, kKeep>(
          packed + group * kRowsOfPanel + b * kCodesOfBlock, packed + b * kRowsOfPanel, at + b * 16, acc,
          kKeep ? kept->columns + (first + b) * 16 : nullptr, kKeep ? kept->scales + first + b : nullptr);
    };
    std::int64_t b = 0;
    for (; b + kTogether <= group; b += kTogether) add.template operator()<kTogether>(b);
    if constexpr (kTogether > 1) {
      for (; b < group; ++b) add.template operator()<1>(b);
    }
  }
#pragma GCC unroll 64
  for (int r = 0; r < kRows; ++r) {
    Ymm::store(sums + r * kRowsOfPanel, acc[r][0]), Ymm::store(sums + r * kRowsOfPanel + 8, acc[r][1]);
  }
}

// Likewise, of some blocks of a span that is decoded; the sums stay in the first-level cache.
template <int kRows>
void multiply_decoded(const DecodedSpan& span, std::int64_t blocks, const float* x, float* sums) {
  for (std::int64_t b = 0; b < blocks; ++b, x += 16) {
    __m256 acc[kRows][2];
#pragma GCC unroll 64
    for (int k = 0; k < 16; ++k) {
      in_order();
      const float* column = span.columns[b * 16 + k];
      const __m256i w[2] = {Ymm::load_ints(column), Ymm::load_ints(column + 8)};
#pragma GCC unroll 64
      for (int r = 0; r < kRows; ++r) {
        const __m256 value = Ymm::broadcast(x[r * kColumnsOfSpan + k]);
#pragma GCC unroll 64
        for (int v = 0; v < 2; ++v) {
          if (k == 0) {
            acc[r][v] = Ymm::multiply(Ymm::as_floats(w[v]), value);
          } else {
            Ymm::add_product(acc[r][v], Ymm::as_floats(w[v]), value);
          }
        }
      }
    }
    in_order();
    const __m256 scale[2] = {Ymm::load(span.scales[b]), Ymm::load(span.scales[b] + 8)};
#pragma GCC unroll 64
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 64
      for (int v = 0; v < 2; ++v) {
        float* to = sums + r * kRowsOfPanel + v * 8;
        Ymm::store(to, Ymm::multiply_add(acc[r][v], scale[v], Ymm::load(to)));
      }
    }
  }
}

using MultiplyPacked = void (*)(const std::uint8_t* packed, std::int64_t blocks, const float* x,
                                std::int64_t stride, float* sums, DecodedSpan* kept);
constexpr MultiplyPacked kMultiplyFew[kFew] = {multiply_packed<1, false>, multiply_packed<2, false>,
                                               multiply_packed<3, false>, multiply_packed<4, false>};
constexpr MultiplyPacked kMultiplyFirst[kFew] = {multiply_packed<1, true>, multiply_packed<2, true>,
                                                 multiply_packed<3, true>, multiply_packed<4, true>};
using MultiplyDecoded = void (*)(const DecodedSpan& span, std::int64_t blocks, const float* x, float* sums);
constexpr MultiplyDecoded kMultiplyDecoded[kTile] = {multiply_decoded<1>, multiply_decoded<2>,
                                                     multiply_decoded<3>, multiply_decoded<4>,
                                                     multiply_decoded<5>, multiply_decoded<6>};

// A panel's `blocks` blocks times more than kFew rows of x.
void multiply_many(const std::uint8_t* packed, std::int64_t blocks, const float* x, std::int64_t rows,
                   float* sums) {
  DecodedSpan span;
  const std::int64_t tiles = (rows - kFew + kTile - 1) / kTile;  // of about equal size, behind the first
  const std::int64_t equal = rows / (tiles + 1), first = equal < kFew ? equal : kFew, others = rows - first;
  for (std::int64_t b = 0; b < blocks; b += kBlocksOfSpan, x += rows * kColumnsOfSpan) {
    const std::int64_t rest = blocks - b, count = rest < kBlocksOfSpan ? rest : kBlocksOfSpan;
    kMultiplyFirst[first - 1](packed + b * kBlockOfPanel, count, x, 0, sums, &span);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t begin = first + others * t / tiles, end = first + others * (t + 1) / tiles;
      kMultiplyDecoded[end - begin - 1](span, count, x + begin * kColumnsOfSpan, sums + begin * kRowsOfPanel);
    }
  }
}

}  // namespace

void multiply_bf16_avx2(const F32Slab& slab) {
  const std::int64_t rows = slab.rows, sums_of_panel = rows * kRowsOfPanel;
  const std::int64_t most_blocks = kExpandedWords / (rows * kColumnsOfSpan) * kBlocksOfSpan;
  auto* x = reinterpret_cast<float*>(slab.scratch);
  for (std::int64_t i = 0; i < slab.num_panels * sums_of_panel; ++i) slab.sums[i] = 0.0f;
  for (std::int64_t first = 0; first < slab.blocks; first += most_blocks) {
    const std::int64_t rest = slab.blocks - first, blocks = rest < most_blocks ? rest : most_blocks;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < 2 * blocks; ++i) {  // 8 columns each
        constexpr std::int64_t kOfSpan = kColumnsOfSpan / 8;
        Ymm::store(x + (i / kOfSpan * rows + r) * kColumnsOfSpan + i % kOfSpan * 8,
                   Ymm::multiply(Ymm::bf16(slab.x[r] + first * 32 + i * 16), Ymm::broadcast(0x1p-16f)));
      }
    }
    for (std::int64_t p = 0; p < slab.num_panels; ++p) {
      const std::uint8_t* packed = slab.panels[p].packed + first * kBlockOfPanel;
      float* sums = slab.sums + p * sums_of_panel;
      if (rows > kFew) {
        multiply_many(packed, blocks, x, rows, sums);
      } else {
        kMultiplyFew[rows - 1](packed, blocks, x, rows * kColumnsOfSpan, sums, nullptr);
      }
    }
  }
  for (std::int64_t i = 0; i < slab.num_panels * sums_of_panel; ++i) slab.sums[i] *= 0.5f;
}

}  // namespace megamoe::cpu
