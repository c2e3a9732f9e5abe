// f32_kernel.h: the kernel for BF16 and FP8 activations for x86, written once over a vector type, as
// nvfp4_kernel.h is.
//
// A lane is a row of weights. What is multiplied are lanes of 32 bits: one column in FP32, or two columns in
// BF16, whose products are added together. The weights carry their block scales (exact in BF16, too), so that
// an output is, for each span of 128 columns, one FP32 accumulator over ascending steps, times the factor of
// the row of x, added to its sum. All row counts take this order.
//
// x is expanded once for all panels, a span after the other, in each the rows one after the other. Up to kFew
// rows take the weights of a panel as they are decoded; more rows those of kPanels panels, kTile rows at a
// time, of which the first decode them for the rest.
//
// A Vector is a Ymm or a Zmm (ymm.h, zmm.h) that has
//   kFew, kPanels, kTile   as above
//   kSteps                 vectors that 8 columns of weights are, and words that 8 columns of x are
//   kHasNvfp4              whether it is for NVFP4 that is not folded, too
//   prepare_scales<fold>   of a block of NVFP4, for
//   step_of_codes<fold>    a step of 8 columns of it
//   step_of_bf16           likewise, of BF16
//   words_of_bf16, words_of_e4m3  16 columns of x
//   accumulate(acc, w, x)  acc + w * x
//   accumulate_here        perhaps: likewise, for more than kFew rows
//   load_ints, store_ints
#pragma once

#include "cpu/f32_slab.h"
#include "cpu/x86.h"

namespace megamoe::cpu {
namespace {

constexpr std::int64_t kSpan = 8;                  // blocks that one accumulator adds up
constexpr std::int64_t kHalvesOfSpan = 2 * kSpan;  // 8 columns each

// Where the weights of a span, and of those that follow it, come from. A Block is one of 16 columns, as a
// vector of lanes needs it; step(block, half, step) is a vector of it.
template <class V, bool kFold>
struct Nvfp4Source {
  static constexpr std::int64_t kBlockBytes = kBlockOfPanel;
  struct Block {
    const std::uint8_t* codes;
    decltype(V::template prepare_scales<kFold>(nullptr)) scales;
  };
  const std::uint8_t* packed;

  Block block(std::int64_t span, std::int64_t blocks, std::int64_t b, std::int64_t lane) const {
    const std::int64_t in_group = b % kGroup, first = b - in_group;
    const std::uint8_t* group = packed + (span * kSpan + first) * kBlockBytes;
    const std::int64_t rest = blocks - first, blocks_of_group = rest < kGroup ? rest : kGroup;
    if (lane == 0) {
      const std::uint8_t* ahead = group + in_group * kBlockBytes + kAhead;
      prefetch(ahead);
      prefetch(ahead + 64);
      prefetch(ahead + 128);
    }
    return {group + blocks_of_group * kRowsOfPanel + in_group * kCodesOfBlock + lane * 4,
            V::template prepare_scales<kFold>(group + in_group * kRowsOfPanel + lane)};
  }
  static typename V::Ints step(const Block& block, std::int64_t half, int step) {
    return V::template step_of_codes<kFold>(block.codes + half * 64, step, block.scales);
  }
};

template <class V>
struct Bf16Source {
  static constexpr std::int64_t kBlockBytes = 16 * kRowsOfPanel * 2;
  using Block = const std::uint8_t*;
  const std::uint8_t* packed;

  Block block(std::int64_t span, std::int64_t, std::int64_t b, std::int64_t lane) const {
    return packed + (span * kSpan + b) * kBlockBytes + lane * 2;
  }
  static typename V::Ints step(Block block, std::int64_t half, int step) {
    return V::step_of_bf16(block + half * (kBlockBytes / 2), step);
  }
};

// Decoded before: for each step 16 words of each of some panels. FP32 weights are just that, of one panel,
// where a word is a column.
template <class V, int kPanels>
struct DecodedSource {
  static constexpr std::int64_t kStepBytes = kPanels * kRowsOfPanel * 4;
  static constexpr std::int64_t kBlockBytes = 2 * V::kSteps * kStepBytes;
  using Block = const std::uint8_t*;
  const std::uint8_t* packed;

  Block block(std::int64_t span, std::int64_t, std::int64_t b, std::int64_t lane) const {
    return packed + (span * kSpan + b) * kBlockBytes + lane * 4;
  }
  static typename V::Ints step(Block block, std::int64_t half, int step) {
    return V::load_ints(block + half * (kBlockBytes / 2) + step * kStepBytes);
  }
};

// Some panels' spans that are decoded as they are used, for a DecodedSource to have them afterwards.
template <class V, class Source, int kPanels>
struct DecodingSource {
  using Decoded = DecodedSource<V, kPanels>;
  struct Block {
    typename Source::Block block;
    std::uint8_t* decoded;
  };
  const F32Panel* panels;
  std::int64_t offset;  // bytes into each
  std::uint8_t* decoded;

  Block block(std::int64_t span, std::int64_t blocks, std::int64_t b, std::int64_t lane) const {
    const Source source{panels[lane / kRowsOfPanel].packed + offset};
    return {source.block(span, blocks, b, lane % kRowsOfPanel),
            decoded + (span * kSpan + b) * Decoded::kBlockBytes + lane * 4};
  }
  static typename V::Ints step(const Block& block, std::int64_t half, int step) {
    const typename V::Ints w = Source::step(block.block, half, step);
    V::store_ints(block.decoded + half * (Decoded::kBlockBytes / 2) + step * Decoded::kStepBytes, w);
    return w;
  }
};

// x of a slab, some spans of it.
template <class V>
struct ExpandedX {
  static constexpr std::int64_t kRowWords = kHalvesOfSpan * V::kSteps;  // of a span
  std::int64_t rows;
  std::int32_t* words;  // [spans, rows, kRowWords]
  float* factors;       // [spans, rows]
};

template <class V>
void expand(const F32Slab& slab, std::int64_t first_block, std::int64_t blocks, const ExpandedX<V>& out) {
  for (std::int64_t i = 0; i < slab.rows; ++i) {
    for (std::int64_t b = 0; b < blocks; ++b) {
      const std::int64_t at = b / kSpan * slab.rows + i;
      std::int32_t* words = out.words + at * ExpandedX<V>::kRowWords + b % kSpan * 2 * V::kSteps;
      const std::int64_t column = (first_block + b) * 16;
      if (slab.x_factors == nullptr) {
        V::words_of_bf16(slab.x[i] + column * 2, words);
        out.factors[at] = 1.0f;
      } else {
        V::words_of_e4m3(slab.x[i] + column, words);
        out.factors[at] = slab.x_factors[i][column / 128];
      }
    }
  }
}

template <class V, int kRows>
typename V::Floats accumulate(typename V::Floats acc, typename V::Ints w, typename V::Ints x) {
  if constexpr (kRows > V::kFew && requires { V::accumulate_here(acc, w, x); }) {
    return V::accumulate_here(acc, w, x);
  } else {
    return V::accumulate(acc, w, x);
  }
}

// kSpans spans, side by side, of a panel, or of some that stand together, kVectors vectors in all, times
// kRows rows of x from row `first` on; adds to sums [panels, x.rows, 16]. All spans have `blocks` blocks.
template <class V, class Source, int kRows, int kSpans, int kVectors>
void multiply_spans(const Source& source, std::int64_t blocks, const ExpandedX<V>& x, std::int64_t span,
                    std::int64_t first, float* sums) {
  constexpr std::int64_t kRowWords = ExpandedX<V>::kRowWords;
  typename V::Floats acc[kSpans][kRows][kVectors];
#pragma GCC unroll 64
  for (auto& of_span : acc) {
#pragma GCC unroll 64
    for (auto& row : of_span) {
#pragma GCC unroll 64
      for (auto& v : row) v = V::broadcast(0.0f);
    }
  }
  const std::int32_t* words = x.words + (span * x.rows + first) * kRowWords;
  for (std::int64_t b = 0; b < blocks; ++b) {
    typename Source::Block weights[kSpans][kVectors];
#pragma GCC unroll 64
    for (int g = 0; g < kSpans; ++g) {
#pragma GCC unroll 64
      for (int v = 0; v < kVectors; ++v) {
        weights[g][v] = source.block(g, blocks, b, v * V::kLanes);
      }
    }
    for (std::int64_t half = 0; half < 2; ++half, words += V::kSteps) {
#pragma GCC unroll 64
      for (int step = 0; step < V::kSteps; ++step) {
#pragma GCC unroll 64
        for (int g = 0; g < kSpans; ++g) {
          typename V::Ints w[kVectors];
#pragma GCC unroll 64
          for (int v = 0; v < kVectors; ++v) w[v] = Source::step(weights[g][v], half, step);
#pragma GCC unroll 64
          for (int i = 0; i < kRows; ++i) {
            const typename V::Ints value = V::broadcast(words[(g * x.rows + i) * kRowWords + step]);
#pragma GCC unroll 64
            for (int v = 0; v < kVectors; ++v) acc[g][i][v] = accumulate<V, kRows>(acc[g][i][v], w[v], value);
          }
        }
      }
    }
  }
#pragma GCC unroll 64
  for (int i = 0; i < kRows; ++i) {
#pragma GCC unroll 64
    for (int v = 0; v < kVectors; ++v) {
      const std::int64_t row = v * V::kLanes;
      float* out = sums + (row / kRowsOfPanel * x.rows + first + i) * kRowsOfPanel + row % kRowsOfPanel;
      typename V::Floats sum = V::load(out);
#pragma GCC unroll 64
      for (int g = 0; g < kSpans; ++g) {
        const float factor = x.factors[(span + g) * x.rows + first + i];
        sum = V::multiply_add(acc[g][i][v], V::broadcast(factor), sum);
      }
      V::store(out, sum);
    }
  }
}

// `blocks` blocks of a panel times 1 to kRows rows. Few rows have few accumulators, each waiting for itself:
// so they take two spans at once.
template <class V, class Source, int kRows>
void multiply_few(const std::uint8_t* packed, std::int64_t blocks, const ExpandedX<V>& x, float* sums) {
  if (x.rows == kRows) {
    constexpr auto kVectors = static_cast<int>(kRowsOfPanel / V::kLanes);
    constexpr int kSpans = kRows * kVectors <= 4 ? 2 : 1;
    const std::int64_t whole = blocks / kSpan;
    const auto multiply = [&]<int kCount>(std::int64_t span) {
      const std::int64_t rest = blocks - span * kSpan;
      multiply_spans<V, Source, kRows, kCount, kVectors>({packed + span * kSpan * Source::kBlockBytes},
                                                         rest < kSpan ? rest : kSpan, x, span, 0, sums);
    };
    std::int64_t span = 0;
    for (; span + kSpans <= whole; span += kSpans) multiply.template operator()<kSpans>(span);
    for (; span * kSpan < blocks; ++span) multiply.template operator()<1>(span);
  } else if constexpr (kRows > 1) {
    multiply_few<V, Source, kRows - 1>(packed, blocks, x, sums);
  }
}

// A span of kPanels panels times 1 to kRows rows.
template <class V, int kPanels, int kRows, class Source>
void multiply_tile(std::int64_t rows, const Source& source, std::int64_t blocks, const ExpandedX<V>& x,
                   std::int64_t span, std::int64_t first, float* sums) {
  if (rows == kRows) {
    constexpr auto kVectors = static_cast<int>(kPanels * kRowsOfPanel / V::kLanes);
    multiply_spans<V, Source, kRows, 1, kVectors>(source, blocks, x, span, first, sums);
  } else if constexpr (kRows > 1) {
    multiply_tile<V, kPanels, kRows - 1>(rows, source, blocks, x, span, first, sums);
  }
}

// `blocks` blocks of kPanels panels, from `offset` bytes on, times more rows. Decoding takes other parts of a
// processor than multiplying, and so goes along with the first tile.
template <class V, class Source, int kPanels>
void multiply_many(const F32Panel* panels, std::int64_t offset, std::int64_t blocks, const ExpandedX<V>& x,
                   float* sums) {
  using Decoded = DecodedSource<V, kPanels>;
  alignas(64) std::uint8_t decoded[kSpan * Decoded::kBlockBytes];
  const std::int64_t tiles = (x.rows + V::kTile - 1) / V::kTile;  // of about equal size
  for (std::int64_t span = 0; span * kSpan < blocks; ++span, offset += kSpan * Source::kBlockBytes) {
    const std::int64_t rest = blocks - span * kSpan, count = rest < kSpan ? rest : kSpan;
    const DecodingSource<V, Source, kPanels> source{panels, offset, decoded};
    multiply_tile<V, kPanels, V::kTile>(x.rows / tiles, source, count, x, span, 0, sums);
    for (std::int64_t t = 1; t < tiles; ++t) {
      const std::int64_t first = x.rows * t / tiles, end = x.rows * (t + 1) / tiles;
      multiply_tile<V, kPanels, V::kTile>(end - first, Decoded{decoded}, count, x, span, first, sums);
    }
  }
}

// kPanels panels of one format, from block `first` on, times x, which begins there.
template <class V, class Source, int kPanels>
void multiply_source(const F32Panel* panels, std::int64_t first, std::int64_t blocks, const ExpandedX<V>& x,
                     float* sums) {
  const std::int64_t offset = first * Source::kBlockBytes;
  if (x.rows > V::kFew) return multiply_many<V, Source, kPanels>(panels, offset, blocks, x, sums);
  for (int p = 0; p < kPanels; ++p) {
    multiply_few<V, Source, V::kFew>(panels[p].packed + offset, blocks, x, sums + p * x.rows * kRowsOfPanel);
  }
}

template <class V, int kPanels>
void multiply_panels(const F32Panel* panels, std::int64_t first, std::int64_t blocks, const ExpandedX<V>& x,
                     float* sums) {
  switch (panels[0].format) {
    case PanelFormat::kF32:
      if constexpr (V::kSteps == 8)
        multiply_source<V, DecodedSource<V, 1>, kPanels>(panels, first, blocks, x, sums);
      break;
    case PanelFormat::kBf16:
      multiply_source<V, Bf16Source<V>, kPanels>(panels, first, blocks, x, sums);
      break;
    case PanelFormat::kNvfp4:
      if constexpr (V::kHasNvfp4)
        multiply_source<V, Nvfp4Source<V, false>, kPanels>(panels, first, blocks, x, sums);
      break;
    case PanelFormat::kFolded:
      multiply_source<V, Nvfp4Source<V, true>, kPanels>(panels, first, blocks, x, sums);
      break;
  }
}

template <class V>
void multiply(const F32Slab& slab) {
  const ExpandedX<V> x = {slab.rows, slab.scratch, reinterpret_cast<float*>(slab.scratch + kExpandedWords)};
  const std::int64_t most_blocks = kExpandedFactors / slab.rows * kSpan;
  for (std::int64_t i = 0; i < slab.num_panels * slab.rows * kRowsOfPanel; ++i) slab.sums[i] = 0.0f;
  for (std::int64_t first = 0; first < slab.blocks; first += most_blocks) {
    const std::int64_t rest = slab.blocks - first, blocks = rest < most_blocks ? rest : most_blocks;
    expand<V>(slab, first, blocks, x);
    for (std::int64_t p = 0; p < slab.num_panels;) {
      const F32Panel* panels = slab.panels + p;
      float* sums = slab.sums + p * slab.rows * kRowsOfPanel;
      bool together = p + V::kPanels <= slab.num_panels;
      for (int i = 1; together && i < V::kPanels; ++i) together = panels[i].format == panels[0].format;
      if (together) {
        multiply_panels<V, V::kPanels>(panels, first, blocks, x, sums);
        p += V::kPanels;
      } else {
        multiply_panels<V, 1>(panels, first, blocks, x, sums);
        ++p;
      }
    }
  }
}

// As in nvfp4_products.h.
template <class V>
std::int64_t only_products(std::int64_t rounds) {
  constexpr int kSums = 12;
  typename V::Floats sums[kSums];
  typename V::Ints w = V::broadcast(0);
  const typename V::Ints x = w;
  for (auto& v : sums) v = V::broadcast(0.0f);
  for (std::int64_t r = 0; r < rounds; ++r) {
    V::keep(w);
#pragma GCC unroll 12
    for (auto& v : sums) v = V::accumulate(v, w, x);
  }
  for (auto& v : sums) V::keep(v);
  return rounds * kSums * V::kLanes * (8 / V::kSteps) * 2;
}

}  // namespace
}  // namespace megamoe::cpu
