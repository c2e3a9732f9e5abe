// nvfp4_kernel.h: the NVFP4 kernel for x86, written once over a vector type; nvfp4_<set>.cc compiles it for
// one instruction set. All of it has internal linkage. nvfp4_avx2.cc has a kernel of its own.
//
// Weights become w + 12 (w a doubled code, 0 .. 24 then), because the byte products of x86 take an unsigned
// and a signed factor; sum (w + 12) * x  -  12 * sum x  is the dot product. x is expanded once for all
// panels. Tile by tile, for each block of 16 columns, its rows stand together:
//
//   | doubled codes, 16 bytes a row | scales, FP32 | seeds, int32 |
//
// The seed, which the sum begins with, is -12 * sum x plus the bits of kOne23: so the sum is an FP32 number
// as it stands, kOne23 + dot, and no conversion is needed. A fused multiply-add by the scale of w takes
// kOne23 off again; what it gives is dot * scale, exact, and so nothing is rounded before the addition to the
// accumulator. (nvfp4_avx512_bf16.cc has another way to the same bits.) A lane is a row of weights, its
// accumulator one register; so the order of the additions is that of gemm.h.
//
// Each load of x serves kPanels panels, each vector of weights kTile rows.
//
// A Vector is a Ymm or a Zmm (ymm.h, zmm.h) that has
//   Scales           how scales are multiplied by: FusedScales or likewise
//   kTile, kPanels   as above, as many as its registers hold
//   kDecodeOnce      whether what meets more than one tile is decoded once for all of them
//   dot(w, x, seed)  4 columns of each of w[4] times those of x[4], plus the seed; perhaps also from memory
#pragma once

#include "cpu/nvfp4_slab.h"
#include "cpu/x86.h"

namespace megamoe::cpu {
namespace {

// What x's scales are multiplied by: 2^-2 undoes both doublings, 2^8 is missing in the weights' scales.
constexpr float kScaleOfX = 0x1p6f;
// Its last bit is worth 1: an integer below 2^22 added to its bits is added to its value.
constexpr float kOne23 = 0x1.8p23f;
constexpr std::int32_t kBitsOfOne23 = __builtin_bit_cast(std::int32_t, kOne23);

// Up to kGroup blocks of a row of x, as row `i` of a tile of `rows`. 8 * kGroup bytes of codes are read.
template <class V>
void expand_group(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t blocks,
                  const float* e4m3, std::int64_t rows, std::int64_t i, std::uint8_t* tile) {
  const __m256i low = _mm256_set1_epi8(15), doubled = _mm256_broadcastsi128_si256(table(kDoubled));
  const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes));
  const __m256i evens = _mm256_and_si256(bytes, low),
                odds = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low);
  const __m256i values[2] = {// of blocks 0 and 2, of 1 and 3
                             _mm256_shuffle_epi8(doubled, _mm256_unpacklo_epi8(evens, odds)),
                             _mm256_shuffle_epi8(doubled, _mm256_unpackhi_epi8(evens, odds))};
  const auto halves = [](__m256i v) {  // of 8 values and 12 for each
    return _mm256_sad_epu8(_mm256_add_epi8(v, _mm256_set1_epi8(12)), _mm256_setzero_si256());
  };
  const __m256i a = halves(values[0]), b = halves(values[1]);
  alignas(32) std::int64_t sums[kGroup];
  _mm256_store_si256(reinterpret_cast<__m256i*>(sums),
                     _mm256_add_epi64(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b)));
  alignas(32) std::uint8_t of_blocks[kGroup][16];
  _mm256_store_si256(reinterpret_cast<__m256i*>(of_blocks[0]),
                     _mm256_permute2x128_si256(values[0], values[1], 0x20));
  _mm256_store_si256(reinterpret_cast<__m256i*>(of_blocks[2]),
                     _mm256_permute2x128_si256(values[0], values[1], 0x31));
  for (std::int64_t block = 0; block < blocks; ++block, tile += rows * kExpandedBlockBytes) {
    __m128i of_block = _mm_load_si128(reinterpret_cast<const __m128i*>(of_blocks[block]));
    std::int32_t seed = kBitsOfOne23 - 12 * (static_cast<int>(sums[block]) - 16 * 12);
    reinterpret_cast<std::int32_t*>(tile + rows * 16)[i] =
        V::Scales::of_x(e4m3, scales[block], of_block, seed);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(tile + i * 16), of_block);
    reinterpret_cast<std::int32_t*>(tile + rows * 20)[i] = seed;
  }
}

// One row of x, as row `i` of a tile of `rows`.
template <class V>
void expand_row(const Nvfp4Slab& slab, std::int64_t row, std::int64_t first_block, std::int64_t blocks,
                std::int64_t rows, std::int64_t i, std::uint8_t* tile) {
  const std::uint8_t* codes = slab.x_codes[row] + first_block * 8;
  const std::uint8_t* scales = slab.x_scales[row] + first_block;
  std::int64_t b = 0;
  for (; b + kGroup <= blocks; b += kGroup, tile += kGroup * rows * kExpandedBlockBytes) {
    expand_group<V>(codes + b * 8, scales + b, kGroup, slab.e4m3, rows, i, tile);
  }
  if (b == blocks) return;
  std::uint8_t last[kGroup * 8] = {};
  for (std::int64_t j = 0; j < (blocks - b) * 8; ++j) last[j] = codes[b * 8 + j];
  expand_group<V>(last, scales + b, blocks - b, slab.e4m3, rows, i, tile);
}

// The scales of a block of kLanes rows of weights, for two fused multiply-adds.
template <class V>
struct FusedScales {
  typename V::Floats scales, minus_one23;  // -kOne23 * scales

  FusedScales() = default;
  FusedScales(const std::uint8_t* codes, const typename V::Ints (&)[4])
      : scales(V::e4m3(codes)), minus_one23(V::multiply(scales, V::broadcast(-kOne23))) {}
  // How x's scale stands in a tile, and what else of the block depends on it.
  static std::int32_t of_x(const float* e4m3, std::uint8_t code, __m128i&, std::int32_t&) {
    return __builtin_bit_cast(std::int32_t, e4m3[code] * kScaleOfX);
  }
  typename V::Floats add(typename V::Ints dot, const std::int32_t* x, typename V::Floats acc) const {
    const typename V::Floats x_scale = V::broadcast(*reinterpret_cast<const float*>(x));
    return V::multiply_add(V::multiply_add(V::as_floats(dot), scales, minus_one23), x_scale, acc);
  }
};

// A block of kLanes rows of weights.
template <class V>
struct BlockOfWeights {
  typename V::Ints w[4];
  typename V::Scales scales;
};

// From codes and scales of a panel's block that begin with the first of the rows.
template <class V>
[[gnu::always_inline]] inline BlockOfWeights<V> decode_block(const std::uint8_t* codes,
                                                             const std::uint8_t* scales) {
  BlockOfWeights<V> out;
  out.w[0] = V::load_low(kDoubledPlus12, codes), out.w[1] = V::load_high(kDoubledPlus12, codes);
  out.w[2] = V::load_low(kDoubledPlus12, codes + 64), out.w[3] = V::load_high(kDoubledPlus12, codes + 64);
  out.scales = typename V::Scales(scales, out.w);
  return out;
}

// The products with the columns at x.
template <class V>
typename V::Ints dot_at(const typename V::Ints (&w)[4], const std::int32_t* x, typename V::Ints seed) {
  if constexpr (requires { V::dot(w, x, seed); }) {
    return V::dot(w, x, seed);
  } else {
    return V::dot(w, {V::broadcast(x[0]), V::broadcast(x[1]), V::broadcast(x[2]), V::broadcast(x[3])}, seed);
  }
}

// The sums of kRows rows of x for kLanes rows of kPanels panels. They come from sums [kPanels, kRows, 16],
// the panels `stride` apart, or begin, and go there.
template <class V, int kRows, int kPanels>
class Accumulators {
 public:
  Accumulators(bool begin, float* sums, std::int64_t stride) : sums_(sums), stride_(stride) {
    for_each(
        [&](typename V::Floats& acc, const float* at) { acc = begin ? V::broadcast(0.0f) : V::load(at); });
  }
  void add(const BlockOfWeights<V> (&weights)[kPanels], const std::uint8_t* x) {
    const std::int32_t* x_scales = reinterpret_cast<const std::int32_t*>(x + kRows * 16);
    const std::int32_t* seeds = reinterpret_cast<const std::int32_t*>(x + kRows * 20);
#pragma GCC unroll 32
    for (int i = 0; i < kRows; ++i) {
      const auto* columns = reinterpret_cast<const std::int32_t*>(x + i * 16);
      const typename V::Ints seed = V::broadcast(seeds[i]);
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        acc_[p][i] = weights[p].scales.add(dot_at<V>(weights[p].w, columns, seed), x_scales + i, acc_[p][i]);
      }
    }
  }
  void store() {
    for_each([](const typename V::Floats& acc, float* at) { V::store(at, acc); });
  }

 private:
  template <class Body>
  [[gnu::always_inline]] void for_each(const Body& body) {
#pragma GCC unroll 2
    for (int p = 0; p < kPanels; ++p) {
#pragma GCC unroll 32
      for (int i = 0; i < kRows; ++i) body(acc_[p][i], sums_ + p * stride_ + i * kRowsOfPanel);
    }
  }

  typename V::Floats acc_[kPanels][kRows];
  float* sums_;
  std::int64_t stride_;
};

// Blocks first .. first + count of kLanes rows, from row `lane` on, of some panels; `first` begins a group.
struct Strip {
  const std::uint8_t* const* panels;
  std::int64_t first, count, lane;
};

// Calls body(number, weights) for each block of a strip, in ascending order, the weights decoded.
template <class V, int kPanels, bool kPrefetch, class Body>
[[gnu::always_inline]] inline void for_each_decoded(const Strip& strip, const Body& body) {
  std::int64_t offset = strip.first * kBlockOfPanel;
  for (std::int64_t first = 0; first < strip.count; first += kGroup, offset += kGroup * kBlockOfPanel) {
    const std::int64_t rest = strip.count - first, group = rest < kGroup ? rest : kGroup;
    for (std::int64_t b = 0; b < group; ++b) {
      BlockOfWeights<V> weights[kPanels];
#pragma GCC unroll 2
      for (int p = 0; p < kPanels; ++p) {
        const std::uint8_t* scales = strip.panels[p] + offset + b * kRowsOfPanel;
        const std::uint8_t* codes = strip.panels[p] + offset + group * kRowsOfPanel + b * kCodesOfBlock;
        if constexpr (kPrefetch) {
          if (b == 0) prefetch(scales + kAhead);
          prefetch(codes + kAhead);
          prefetch(codes + kAhead + 64);
        }
        weights[p] = decode_block<V>(codes + strip.lane * 4, scales + strip.lane);
      }
      body(first + b, weights);
    }
  }
}

// A strip of one panel times rows of x. One, as this waits for memory, which gives one stream sooner than
// two.
template <class V, int kRows>
void multiply_packed(const Strip& strip, const std::uint8_t* x, bool begin, float* sums) {
  Accumulators<V, kRows, 1> acc(begin, sums, 0);
  for_each_decoded<V, 1, true>(strip, [&](std::int64_t b, const BlockOfWeights<V>(&weights)[1]) {
    acc.add(weights, x + b * kRows * kExpandedBlockBytes);
  });
  acc.store();
}

constexpr std::int64_t kDecodedBlocks = 16;  // in whole groups, few enough for the first-level cache

template <class V, int kPanels>
struct DecodedStrip {
  BlockOfWeights<V> blocks[kDecodedBlocks][kPanels];
};

template <class V, int kPanels>
void decode(const Strip& strip, DecodedStrip<V, kPanels>& out) {
  for_each_decoded<V, kPanels, false>(strip, [&](std::int64_t b, const BlockOfWeights<V>(&weights)[kPanels]) {
    for (int p = 0; p < kPanels; ++p) out.blocks[b][p] = weights[p];
  });
}

// Memory that is to be in the cache soon: kPanels pieces of it, `stride` apart, of which each step asks for
// `step` bytes more.
template <int kPanels>
class Ahead {
 public:
  Ahead(const std::uint8_t* at, std::int64_t stride, std::int64_t step)
      : at_(at), stride_(stride), step_(step) {}
  [[gnu::always_inline]] void operator()() {
    for (std::int64_t i = 0; i < step_; i += 64) {
      for (int p = 0; p < kPanels; ++p) prefetch(at_ + p * stride_ + i);
    }
    at_ += step_;
  }

 private:
  const std::uint8_t* at_;
  std::int64_t stride_, step_;
};

// A strip times rows of x, with weights that are decoded.
template <class V, int kRows, int kPanels>
void multiply_decoded(const DecodedStrip<V, kPanels>& strip, std::int64_t blocks, const std::uint8_t* x,
                      bool begin, float* sums, std::int64_t stride, Ahead<kPanels> ahead) {
  Accumulators<V, kRows, kPanels> acc(begin, sums, stride);
  for (std::int64_t b = 0; b < blocks; ++b) {
    ahead();
    acc.add(strip.blocks[b], x + b * kRows * kExpandedBlockBytes);
  }
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

// Rows of x that are expanded, some blocks of them, in tiles of about equal size.
template <class V>
class Tiles {
 public:
  Tiles(const Nvfp4Slab& slab, std::int64_t first_block, std::int64_t blocks)
      : rows_(slab.rows), count_((slab.rows + V::kTile - 1) / V::kTile), blocks_(blocks), x_(slab.scratch) {
    for (std::int64_t t = 0; t < count_; ++t) {
      const std::int64_t rows = first(t + 1) - first(t);
      for (std::int64_t i = 0; i < rows; ++i) {
        expand_row<V>(slab, first(t) + i, first_block, blocks, rows, i, slab.scratch + offset(t));
      }
    }
  }
  std::int64_t rows() const { return rows_; }
  std::int64_t blocks() const { return blocks_; }
  std::int64_t count() const { return count_; }
  std::int64_t first(std::int64_t tile) const { return rows_ * tile / count_; }  // row
  const std::uint8_t* at(std::int64_t tile, std::int64_t block) const {
    return x_ + offset(tile) + block * (first(tile + 1) - first(tile)) * kExpandedBlockBytes;
  }

 private:
  std::int64_t offset(std::int64_t tile) const { return first(tile) * blocks_ * kExpandedBlockBytes; }

  std::int64_t rows_, count_, blocks_;
  const std::uint8_t* x_;
};

// A strip times all rows of x, whose weights are decoded once for all tiles. `begin` as above, sums [kPanels,
// rows, 16] at the strip's lane. Meanwhile `next`, which follows the strip, is fetched, the panels `panel`
// bytes apart: in small portions, as a processor waits where it has asked memory for too much at once.
template <class V, int kPanels>
void multiply_strip(const Strip& strip, const Tiles<V>& x, std::int64_t block, bool begin, float* sums,
                    const std::uint8_t* next, std::int64_t panel) {
  DecodedStrip<V, kPanels> weights;
  decode(strip, weights);
  const std::int64_t step = (kBlockOfPanel + x.count() - 1) / x.count();
  for (std::int64_t t = 0; t < x.count(); ++t) {
    with_rows<V::kTile>(x.first(t + 1) - x.first(t), [&]<int kRows> {
      multiply_decoded<V, kRows, kPanels>(weights, strip.count, x.at(t, block), begin,
                                          sums + x.first(t) * kRowsOfPanel, x.rows() * kRowsOfPanel,
                                          Ahead<kPanels>(next + t * kDecodedBlocks * step, panel, step));
    });
  }
}

// kPanels panels that follow one another in memory, from block `first` on, times x, which begins there.
template <class V, int kPanels>
void multiply_panels(const Nvfp4Slab& slab, std::int64_t p, const Tiles<V>& x, std::int64_t first) {
  const std::int64_t panel = slab.blocks * kBlockOfPanel;
  float* sums = slab.sums + p * slab.rows * kRowsOfPanel;
  for (std::int64_t at = 0; at < x.blocks(); at += kDecodedBlocks) {
    const std::int64_t rest = x.blocks() - at, count = rest < kDecodedBlocks ? rest : kDecodedBlocks;
    const std::int64_t end = (first + at + count) * kBlockOfPanel;
    const std::uint8_t* next = slab.panels[p] + (end < panel ? end : kPanels * panel);
    for (std::int64_t lane = 0; lane < kRowsOfPanel; lane += V::kLanes) {
      multiply_strip<V, kPanels>({slab.panels + p, first + at, count, lane}, x, at, first + at == 0,
                                 sums + lane, next, panel);
    }
  }
}

template <class V>
void multiply(const Nvfp4Slab& slab) {
  const std::int64_t most_blocks = kExpandedBlocks / slab.rows / kGroup * kGroup;
  for (std::int64_t first = 0; first < slab.blocks; first += most_blocks) {
    const std::int64_t rest = slab.blocks - first;
    const Tiles<V> x(slab, first, rest < most_blocks ? rest : most_blocks);
    std::int64_t p = 0;
    if (!V::kDecodeOnce || x.count() == 1) {
      for (; p < slab.num_panels; ++p) {
        for (std::int64_t t = 0; t < x.count(); ++t) {
          for (std::int64_t lane = 0; lane < kRowsOfPanel; lane += V::kLanes) {
            with_rows<V::kTile>(x.first(t + 1) - x.first(t), [&]<int kRows> {
              multiply_packed<V, kRows>({slab.panels + p, first, x.blocks(), lane}, x.at(t, 0), first == 0,
                                        slab.sums + (p * slab.rows + x.first(t)) * kRowsOfPanel + lane);
            });
          }
        }
      }
      continue;
    }
    for (; p + V::kPanels <= slab.num_panels; p += V::kPanels)
      multiply_panels<V, V::kPanels>(slab, p, x, first);
    for (; p < slab.num_panels; ++p) multiply_panels<V, 1>(slab, p, x, first);
  }
}

}  // namespace
}  // namespace megamoe::cpu
