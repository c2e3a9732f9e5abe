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
// A Vector is a Ymm or a Zmm (ymm.h, zmm.h) that has
//   kTile                  rows of x that share a load of the weights
//   dot(w, x, correction)  4 columns of each of w[4] times those of x[4], plus the correction
#pragma once

#include "cpu/nvfp4_slab.h"
#include "cpu/x86.h"

namespace megamoe::cpu {
namespace {

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

// A block of kLanes rows of weights.
template <class V>
struct BlockOfWeights {
  typename V::Ints w[4];
  typename V::Floats scales;
};

// From codes and scales of a panel's block that begin with the first of the rows.
template <class V>
BlockOfWeights<V> decode_block(const std::uint8_t* codes, const std::uint8_t* scales) {
  return {{V::load_low(kDoubledPlus12, codes), V::load_high(kDoubledPlus12, codes),
           V::load_low(kDoubledPlus12, codes + 64), V::load_high(kDoubledPlus12, codes + 64)},
          V::e4m3(scales)};
}

// The sums of kRows rows of x for kLanes rows of weights. They come from sums [kRows, 16], or begin, and go
// there.
template <class V, int kRows>
class Accumulators {
 public:
  Accumulators(bool begin, float* sums) : sums_(sums) {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) acc_[i] = begin ? V::broadcast(0.0f) : V::load(sums + i * kRowsOfPanel);
  }
  void add(const BlockOfWeights<V>& weights, const std::uint8_t* x) {
    const float* x_scales = reinterpret_cast<const float*>(x + kRows * 16);
    const std::int32_t* corrections = reinterpret_cast<const std::int32_t*>(x + kRows * 20);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const auto* columns = reinterpret_cast<const std::int32_t*>(x + i * 16);
      const typename V::Ints values[4] = {V::broadcast(columns[0]), V::broadcast(columns[1]),
                                          V::broadcast(columns[2]), V::broadcast(columns[3])};
      const typename V::Ints dot = V::dot(weights.w, values, V::broadcast(corrections[i]));
      acc_[i] =
          V::multiply_add(V::to_float(dot), V::multiply(weights.scales, V::broadcast(x_scales[i])), acc_[i]);
    }
  }
  void store() const {
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) V::store(sums_ + i * kRowsOfPanel, acc_[i]);
  }

 private:
  typename V::Floats acc_[kRows];
  float* sums_;
};

// Rows of x times kLanes rows of a panel, over `blocks` blocks; `lane` is the first row of the panel.
// `packed` begins at a group.
template <class V, int kRows>
void multiply_packed(const std::uint8_t* packed, std::int64_t blocks, std::int64_t lane,
                     const std::uint8_t* x, bool begin, float* sums) {
  Accumulators<V, kRows> acc(begin, sums + lane);
  while (blocks > 0) {
    const std::int64_t group = blocks < kGroup ? blocks : kGroup;
    const std::uint8_t* codes = packed + group * kRowsOfPanel + lane * 4;
    prefetch(packed + kAhead);
    for (std::int64_t b = 0; b < group; ++b, codes += kCodesOfBlock, x += kRows * kExpandedBlockBytes) {
      prefetch(codes + kAhead);
      prefetch(codes + kAhead + 64);
      acc.add(decode_block<V>(codes, packed + b * kRowsOfPanel + lane), x);
    }
    packed += group * kBlockOfPanel;
    blocks -= group;
  }
  acc.store();
}

constexpr std::int64_t kDecodedBlocks = 16;  // in whole groups, few enough for the first-level cache

template <class V>
void decode_blocks(const std::uint8_t* packed, std::int64_t blocks, std::int64_t lane,
                   BlockOfWeights<V>* out) {
  for (std::int64_t first = 0; first < blocks; first += kGroup, packed += kGroup * kBlockOfPanel) {
    const std::int64_t group = blocks - first < kGroup ? blocks - first : kGroup;
    for (std::int64_t b = 0; b < group; ++b) {
      const std::uint8_t* codes = packed + group * kRowsOfPanel + b * kCodesOfBlock + lane * 4;
      prefetch(codes + kAhead);
      prefetch(codes + kAhead + 64);
      *out++ = decode_block<V>(codes, packed + b * kRowsOfPanel + lane);
    }
  }
}

// Likewise, with weights that are decoded.
template <class V, int kRows>
void multiply_decoded(const BlockOfWeights<V>* weights, std::int64_t blocks, const std::uint8_t* x,
                      bool begin, float* sums) {
  Accumulators<V, kRows> acc(begin, sums);
  for (std::int64_t b = 0; b < blocks; ++b, x += kRows * kExpandedBlockBytes) acc.add(weights[b], x);
  acc.store();
}

// body.operator()<rows>() for 1 to kRows rows.
template <int kRows, class Body>
void with_rows(std::int64_t rows, const Body& body) {
  if (rows == kRows) {
    body.template operator()<kRows>();
  } else if constexpr (kRows > 1) {
    with_rows<kRows - 1>(rows, body);
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
      const std::uint8_t* packed = slab.panels[p] + first * kBlockOfPanel;
      float* sums = slab.sums + p * slab.rows * kRowsOfPanel;
      for (std::int64_t lane = 0; lane < kRowsOfPanel; lane += V::kLanes) {
        if (tiles == 1) {
          with_rows<V::kTile>(slab.rows, [&]<int kRows> {
            multiply_packed<V, kRows>(packed, blocks, lane, slab.scratch, first == 0, sums);
          });
          continue;
        }
        // Several tiles: weights are decoded once for all.
        for (std::int64_t at = 0; at < blocks; at += kDecodedBlocks) {
          BlockOfWeights<V> weights[kDecodedBlocks];
          const std::int64_t count = blocks - at < kDecodedBlocks ? blocks - at : kDecodedBlocks;
          decode_blocks<V>(packed + at * kBlockOfPanel, count, lane, weights);
          for (std::int64_t t = 0; t < tiles; ++t) {
            const std::int64_t row = first_of(t), rows = first_of(t + 1) - row;
            with_rows<V::kTile>(rows, [&]<int kRows> {
              multiply_decoded<V, kRows>(weights, count, expanded(row) + at * kRows * kExpandedBlockBytes,
                                         first + at == 0, sums + row * kRowsOfPanel + lane);
            });
          }
        }
      }
    }
  }
}

// `rounds` rounds of the products alone, out of registers; returns the multiplications and additions.
template <class V>
std::int64_t only_products(std::int64_t rounds) {
  constexpr int kSums = 4;
  typename V::Ints sums[kSums], w[4], x[4];
  for (auto& v : sums) v = V::broadcast(0);
  for (int j = 0; j < 4; ++j) w[j] = x[j] = V::broadcast(0);
  for (auto& v : w) V::keep(v);
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 4
    for (auto& sum : sums) {
      for (auto& v : x) V::keep(v);
      sum = V::dot(w, x, sum);
    }
  }
  for (auto& v : sums) V::keep(v);
  return rounds * kSums * V::kLanes * 16 * 2;
}

}  // namespace
}  // namespace megamoe::cpu
