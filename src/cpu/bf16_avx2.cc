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
// and leave them in the first-level cache for the others. A lone row, where it can, is multiplied as
// integers, which takes two thirds of the instructions, to the same bits.
//
// A doubled code is converted from a lane's highest byte, and so is 2^24 times as large; x is made 2^16 times
// smaller, which is exact for all BF16; the scales come times 2^-8, and are halved. So a block's sum
// overflows from 2^119 on.
#include "cpu/f32_slab.h"
#include "cpu/x86.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

constexpr std::int64_t kBlocksOfSpan = 8, kColumnsOfSpan = 16 * kBlocksOfSpan;
constexpr int kFew = 5, kTile = 6;  // rows

// Accesses to memory stay on their side of this. GCC would load all of a block first, and spill it.
[[gnu::always_inline]] inline void in_order() { asm volatile("" ::: "memory"); }

// Weights of a span of a panel.
struct DecodedSpan {
  alignas(64) float columns[kColumnsOfSpan][kRowsOfPanel];
  float scales[kBlocksOfSpan][kRowsOfPanel];
};

// Adds the products of a block of a panel to the sums of kRows rows of x. Leaves the weights behind, if
// kKeep.
template <int kRows, bool kKeep>
[[gnu::always_inline]] inline void add_packed(const std::uint8_t* codes, const std::uint8_t* scales,
                                              const float* x, __m256 (&sums)[kRows][2],
                                              float (*columns)[kRowsOfPanel], float* kept) {
  __m256 acc[kRows][2];
#pragma GCC unroll 64
  for (int four = 0; four < 4; ++four) {  // columns, whose codes lie in one half of some bytes
    const std::uint8_t* bytes = codes + four / 2 * (kCodesOfBlock / 2);
    __m256i doubled[2];
#pragma GCC unroll 64
    for (int v = 0; v < 2; ++v) {
      doubled[v] =
          four % 2 == 0 ? Ymm::load_low(kDoubled, bytes + v * 32) : Ymm::load_high(kDoubled, bytes + v * 32);
    }
#pragma GCC unroll 64
    for (int i = 0; i < 4; ++i) {
      in_order();
      const int k = four * 4 + i;
      const __m256 w[2] = {Ymm::to_float(Ymm::byte_to_top(doubled[0], i)),
                           Ymm::to_float(Ymm::byte_to_top(doubled[1], i))};
      if constexpr (kKeep) Ymm::store(columns[k], w[0]), Ymm::store(columns[k] + 8, w[1]);
#pragma GCC unroll 64
      for (int r = 0; r < kRows; ++r) {
        const __m256 value = Ymm::broadcast(x[r * kColumnsOfSpan + k]);
#pragma GCC unroll 64
        for (int v = 0; v < 2; ++v)
          acc[r][v] = k == 0 ? Ymm::multiply(w[v], value) : Ymm::multiply_add(w[v], value, acc[r][v]);
      }
    }
#pragma GCC unroll 64
    for (int r = 0; r < kRows; ++r) Ymm::keep(acc[r][0]), Ymm::keep(acc[r][1]);  // not later, behind a branch
  }
  __m256 scale[2];
  Ymm::e4m3_of_panel(scales, scale);
#pragma GCC unroll 64
  for (__m256& of : scale) of = Ymm::multiply(of, Ymm::broadcast(0.5f));
  if constexpr (kKeep) Ymm::store(kept, scale[0]), Ymm::store(kept + 8, scale[1]);
#pragma GCC unroll 64
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 64
    for (int v = 0; v < 2; ++v) sums[r][v] = Ymm::multiply_add(acc[r][v], scale[v], sums[r][v]);
  }
}

// Adds the products of a panel's `blocks` blocks, which begin at a group and, if kKeep, are of one span, with
// kRows rows of x, whose spans are `stride` numbers apart, to sums [kRows, 16].
template <int kRows, bool kKeep>
void multiply_packed(const std::uint8_t* packed, std::int64_t blocks, const float* x, std::int64_t stride,
                     float* sums, DecodedSpan* kept) {
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
    for (std::int64_t b = 0; b < group; ++b) {
      add_packed<kRows, kKeep>(packed + group * kRowsOfPanel + b * kCodesOfBlock, packed + b * kRowsOfPanel,
                               at + b * 16, acc, kKeep ? kept->columns + (first + b) * 16 : nullptr,
                               kKeep ? kept->scales[first + b] : nullptr);
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

// A block of a lone row of x whose numbers are integers of 16 bits times a power of two. Then all sums of
// their products with codes are integers below 2^23, which FP32 has, too: whichever way they are added up,
// the bits are those of add_packed().
struct IntegerBlock {
  std::int32_t high[4], low[4];  // the integers' digits to the base 256, both signed, of 4 columns each
  std::int32_t seed;             // 12 times their sum
  float unit;                    // what 1 is worth in add_packed(), halved; 0 if the block is none
};

IntegerBlock integer_block(const std::uint8_t* x) {
  constexpr int kLeast = 32, kMost = 200;  // exponents with which no sum is subnormal or infinite
  const __m256i magnitudes = _mm256_and_si256(Ymm::bytes(x), _mm256_set1_epi16(0x7FFF));
  const __m128i negated = _mm_sub_epi16(  // so that the least is of the largest
      _mm_set1_epi16(0x7FFF),
      _mm_max_epi16(_mm256_castsi256_si128(magnitudes), _mm256_extracti128_si256(magnitudes, 1)));
  const int largest = 0x7FFF - _mm_extract_epi16(_mm_minpos_epu16(negated), 0);
  const int exponent = largest == 0 ? kLeast : largest >> 7;
  if (exponent < kLeast || exponent > kMost) return {};
  const auto power = [](int of) { return __builtin_bit_cast(float, (127 + of) << 23); };
  const __m256 to_integer = Ymm::broadcast(power(127 + 14 - exponent));  // then below 2^15
  const __m256 values[2] = {Ymm::multiply(Ymm::bf16(x), to_integer),
                            Ymm::multiply(Ymm::bf16(x + 16), to_integer)};
  const __m256i first = _mm256_cvtps_epi32(values[0]), second = _mm256_cvtps_epi32(values[1]);
  const __m256 same = _mm256_and_ps(_mm256_cmp_ps(Ymm::to_float(first), values[0], _CMP_EQ_OQ),
                                    _mm256_cmp_ps(Ymm::to_float(second), values[1], _CMP_EQ_OQ));
  const bool fits = largest % 128 != 127;  // else the higher digit may be 128
  if (_mm256_movemask_ps(same) != 0xFF || !fits) return {};
  const __m256i integers = _mm256_permute4x64_epi64(_mm256_packs_epi32(first, second), 0xD8);
  const __m256i low = _mm256_srai_epi16(_mm256_slli_epi16(integers, 8), 8);
  const __m256i high = _mm256_srai_epi16(_mm256_sub_epi16(integers, low), 8);
  IntegerBlock out;
  const auto store = [](__m256i digits, std::int32_t(&to)[4]) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to),
                     _mm_packs_epi16(_mm256_castsi256_si128(digits), _mm256_extracti128_si256(digits, 1)));
  };
  store(high, out.high), store(low, out.low);
  const __m256i pairs = _mm256_madd_epi16(integers, _mm256_set1_epi16(12));
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
  sums = _mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0x4E));
  out.seed = _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_shuffle_epi32(sums, 0xB1)));
  out.unit = power(exponent - 127 - 14 + 24 - 16 - 1);
  return out;
}

// As add_packed(), by products of bytes.
[[gnu::always_inline]] inline void add_integers(const std::uint8_t* codes, const std::uint8_t* scales,
                                                const IntegerBlock& x, __m256 (&sums)[1][2]) {
  __m256i high[2], low[2];  // in 16 bits: 8 products of at most 24 * 128
#pragma GCC unroll 64
  for (int four = 0; four < 4; ++four) {
    const std::uint8_t* bytes = codes + four / 2 * (kCodesOfBlock / 2);
    const __m256i of_high = Ymm::broadcast(x.high[four]), of_low = Ymm::broadcast(x.low[four]);
#pragma GCC unroll 64
    for (int v = 0; v < 2; ++v) {
      const __m256i w = four % 2 == 0 ? Ymm::load_low(kDoubledPlus12, bytes + v * 32)
                                      : Ymm::load_high(kDoubledPlus12, bytes + v * 32);
      const __m256i more_high = _mm256_maddubs_epi16(w, of_high), more_low = _mm256_maddubs_epi16(w, of_low);
      high[v] = four == 0 ? more_high : _mm256_add_epi16(high[v], more_high);
      low[v] = four == 0 ? more_low : _mm256_add_epi16(low[v], more_low);
    }
  }
  __m256 scale[2];
  Ymm::e4m3_of_panel(scales, scale);
#pragma GCC unroll 64
  for (int v = 0; v < 2; ++v) {
    const __m256i dot = _mm256_sub_epi32(_mm256_add_epi32(_mm256_madd_epi16(high[v], _mm256_set1_epi16(256)),
                                                          _mm256_madd_epi16(low[v], _mm256_set1_epi16(1))),
                                         Ymm::broadcast(x.seed));
    sums[0][v] =
        Ymm::multiply_add(Ymm::multiply(Ymm::to_float(dot), Ymm::broadcast(x.unit)), scale[v], sums[0][v]);
  }
}

// Adds the products of a panel's `blocks` blocks with a row of x to its sums [16].
void multiply_row(const std::uint8_t* packed, std::int64_t blocks, const float* x,
                  const IntegerBlock* integers, float* sums) {
  __m256 acc[1][2] = {{Ymm::load(sums), Ymm::load(sums + 8)}};
  for_each_block(
      packed,
      blocks, [&](const std::uint8_t* codes, const std::uint8_t* scales) __attribute__((always_inline)) {
        if (integers->unit != 0.0f) {
          add_integers(codes, scales, *integers, acc);
        } else {
          add_packed<1, false>(codes, scales, x, acc, nullptr, nullptr);
        }
        ++integers, x += 16;
      });
  Ymm::store(sums, acc[0][0]), Ymm::store(sums + 8, acc[0][1]);
}

// From 2 rows on.
using MultiplyPacked = void (*)(const std::uint8_t* packed, std::int64_t blocks, const float* x,
                                std::int64_t stride, float* sums, DecodedSpan* kept);
constexpr MultiplyPacked kMultiplyFew[kFew - 1] = {multiply_packed<2, false>, multiply_packed<3, false>,
                                                   multiply_packed<4, false>, multiply_packed<5, false>};
constexpr MultiplyPacked kMultiplyFirst[kFew - 1] = {multiply_packed<2, true>, multiply_packed<3, true>,
                                                     multiply_packed<4, true>, multiply_packed<5, true>};
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
    kMultiplyFirst[first - 2](packed + b * kBlockOfPanel, count, x, 0, sums, &span);
    for (std::int64_t t = 0; t < tiles; ++t) {
      const std::int64_t begin = first + others * t / tiles, end = first + others * (t + 1) / tiles;
      kMultiplyDecoded[end - begin - 1](span, count, x + begin * kColumnsOfSpan, sums + begin * kRowsOfPanel);
    }
  }
}

}  // namespace

void multiply_bf16_avx2(const F32Slab& slab) {
  const std::int64_t rows = slab.rows, sums_of_panel = rows * kRowsOfPanel;
  constexpr std::int64_t kMostOfRow = kExpandedWords / (16 + sizeof(IntegerBlock) / 4) / kGroup * kGroup;
  const std::int64_t most_blocks =
      rows == 1 ? kMostOfRow : kExpandedWords / (rows * kColumnsOfSpan) * kBlocksOfSpan;
  auto* x = reinterpret_cast<float*>(slab.scratch);
  auto* integers = reinterpret_cast<IntegerBlock*>(slab.scratch + kMostOfRow * 16);  // of a lone row
  for (std::int64_t first = 0; first < slab.blocks; first += most_blocks) {
    const std::int64_t rest = slab.blocks - first, blocks = rest < most_blocks ? rest : most_blocks;
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t i = 0; i < 2 * blocks; ++i) {  // 8 columns each
        constexpr std::int64_t kOfSpan = kColumnsOfSpan / 8;
        Ymm::store(x + (i / kOfSpan * rows + r) * kColumnsOfSpan + i % kOfSpan * 8,
                   Ymm::multiply(Ymm::bf16(slab.x[r] + first * 32 + i * 16), Ymm::broadcast(0x1p-16f)));
      }
    }
    if (rows == 1) {
      for (std::int64_t b = 0; b < blocks; ++b) integers[b] = integer_block(slab.x[0] + (first + b) * 32);
    }
    for (std::int64_t p = 0; p < slab.num_panels; ++p) {
      const std::uint8_t* packed = slab.panels[p].packed + first * kBlockOfPanel;
      float* sums = slab.sums + p * sums_of_panel;
      for (std::int64_t i = 0; first == 0 && i < sums_of_panel; ++i) sums[i] = 0.0f;
      if (rows == 1) {
        multiply_row(packed, blocks, x, integers, sums);
      } else if (rows > kFew) {
        multiply_many(packed, blocks, x, rows, sums);
      } else {
        kMultiplyFew[rows - 2](packed, blocks, x, rows * kColumnsOfSpan, sums, nullptr);
      }
    }
  }
}

}  // namespace megamoe::cpu
