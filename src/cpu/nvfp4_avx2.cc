// nvfp4_avx2.cc: the NVFP4 kernel for AVX2, which has the products of bytes that nvfp4_kernel.h begins with,
// but only sums of two of them, in 16 bits, and 16 registers.
//
// A block of a panel is decoded into registers, and all rows of x go past it, their sums in the first-level
// cache. The scale of x is an integer (times 2^9), and so its product with the sums of 16 bits, which adds
// two of them up in 32, costs nothing; a conversion and one fused multiply-add by the scale of w end the
// block. All of it but that addition is exact.
#include "cpu/nvfp4_products.h"
#include "cpu/nvfp4_slab.h"
#include "cpu/x86.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

// A block of a row of x.
struct XBlock {
  std::int32_t values[4];  // doubled codes, 8 times them where the scale takes more than 16 bits otherwise
  std::int32_t seeds;      // 12 times the sums of the values that each of two words adds up
  std::int32_t scale;      // in both words
};
static_assert(sizeof(XBlock) == kExpandedBlockBytes);

// What is left of the scales' powers of two when w's come times 2^-8 and both codes are doubled.
constexpr float kScaleOfW = 0x1p-3f;

// A block of 8 rows of weights, 12 added to their doubled codes.
struct Weights {
  __m256i w[4];
  __m256 scales;
};

[[gnu::always_inline]] inline void decode_block(const std::uint8_t* codes, const std::uint8_t* scales,
                                                Weights (&out)[2]) {
  __m256 of_w[2];
  Ymm::e4m3_of_panel(scales, of_w);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h, codes += 32) {
    out[h] = {{Ymm::load_low(kDoubledPlus12, codes), Ymm::load_high(kDoubledPlus12, codes),
               Ymm::load_low(kDoubledPlus12, codes + 64), Ymm::load_high(kDoubledPlus12, codes + 64)},
              Ymm::multiply(of_w[h], Ymm::broadcast(kScaleOfW))};
  }
}

// The sums of 16 rows of weights and a row of x, a block of them added.
[[gnu::always_inline]] inline void add_block(const Weights (&weights)[2], const XBlock& x,
                                             __m256 (&sums)[2]) {
  __m256i words[2];  // 8 products in each of 16 bits: at most 8 * 24 * 96
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const __m256i values = Ymm::broadcast(x.values[j]);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h) {
      const __m256i pairs = _mm256_maddubs_epi16(weights[h].w[j], values);
      words[h] = j == 0 ? pairs : _mm256_add_epi16(words[h], pairs);
      Ymm::keep(words[h]);  // in this order, which all of the weights' registers outlive
    }
  }
  const __m256i seeds = Ymm::broadcast(x.seeds), scale = Ymm::broadcast(x.scale);
#pragma GCC unroll 2
  for (int h = 0; h < 2; ++h) {
    const __m256i dots = _mm256_madd_epi16(_mm256_sub_epi16(words[h], seeds), scale);
    sums[h] = Ymm::multiply_add(Ymm::to_float(dots), weights[h].scales, sums[h]);
  }
}

// Calls add_rows(weights) for `count` blocks of a panel, which begin at a group.
template <class AddRows>
[[gnu::always_inline]] inline void for_each_decoded(const std::uint8_t* panel, std::int64_t count,
                                                    const AddRows& add_rows) {
  for_each_block(
      panel,
      count, [&](const std::uint8_t* codes, const std::uint8_t* scales) __attribute__((always_inline)) {
        Weights weights[2];
        decode_block(codes, scales, weights);
        add_rows(weights);
      });
}

// Adds the products of `count` blocks of a panel with one row of x, [count], to its sums [16].
void multiply_row(const std::uint8_t* panel, std::int64_t count, const XBlock* x, float* sums) {
  __m256 of_row[2] = {Ymm::load(sums), Ymm::load(sums + 8)};
  for_each_decoded(panel, count, [&](const Weights(&weights)[2]) { add_block(weights, *x++, of_row); });
  Ymm::store(sums, of_row[0]), Ymm::store(sums + 8, of_row[1]);
}

constexpr std::int64_t kRows = 4;  // at a time

// Likewise for more rows, x [count, rows] and sums [rows, 16], in the cache: kRest rows beyond a multiple of
// kRows.
template <int kRest>
void multiply_rows(const std::uint8_t* panel, std::int64_t count, const XBlock* x, std::int64_t rows,
                   float* sums) {
  for_each_decoded(panel, count, [&](const Weights(&weights)[2]) {
    float* to = sums;
    const auto add_rows = [&]<int kCount> {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i, ++x, to += kRowsOfPanel) {
        __m256 of_row[2] = {Ymm::load(to), Ymm::load(to + 8)};
        add_block(weights, *x, of_row);
        Ymm::store(to, of_row[0]), Ymm::store(to + 8, of_row[1]);
      }
    };
    const float* end = sums + (rows - kRest) * kRowsOfPanel;
    while (to != end) add_rows.template operator()<kRows>();
    add_rows.template operator()<kRest>();
  });
}

using MultiplyRows = void (*)(const std::uint8_t* panel, std::int64_t count, const XBlock* x,
                              std::int64_t rows, float* sums);
constexpr MultiplyRows kMultiplyRows[kRows] = {multiply_rows<0>, multiply_rows<1>, multiply_rows<2>,
                                               multiply_rows<3>};

// The values of E4M3 codes times 2^9, from kLarge on, where that takes more than 16 bits, times 2^6; in both
// words. 0 for NaN.
constexpr int kNaN = 0x7F, kLarge = 0x68;
struct ScalesOfX {
  std::int32_t of[256];
};
constexpr ScalesOfX kScalesOfX = [] {
  ScalesOfX out{};
  for (int code = 0; code < 256; ++code) {
    const int magnitude = code & kNaN, exponent = magnitude >> 3, mantissa = code & 7;
    int scale = exponent == 0 ? mantissa : (8 + mantissa) << (exponent - 1);
    if (magnitude >= kLarge) scale >>= 3;
    if (magnitude == kNaN) scale = 0;
    if (code != magnitude) scale = -scale;
    out.of[code] = static_cast<std::int32_t>(static_cast<std::uint16_t>(scale) * 0x10001u);
  }
  return out;
}();
// The doubled codes for scales below kLarge and from there on.
alignas(16) constexpr std::int8_t kValuesOfX[2][16] = {
    {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12},
    {0, 8, 16, 24, 32, 48, 64, 96, 0, -8, -16, -24, -32, -48, -64, -96}};

// `blocks` blocks of a row of x, `rows` apart. Returns whether a scale is NaN, and so all sums of the row.
bool expand(const std::uint8_t* codes, const std::uint8_t* scales, std::int64_t blocks, std::int64_t rows,
            XBlock* out) {
  bool nan = false;
  for (std::int64_t b = 0; b < blocks; ++b, codes += 8, out += rows) {
    const int magnitude = scales[b] & kNaN;
    nan |= magnitude == kNaN;
    const __m128i low = _mm_set1_epi8(15), bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes));
    const __m128i nibbles =
        _mm_unpacklo_epi8(_mm_and_si128(bytes, low), _mm_and_si128(_mm_srli_epi16(bytes, 4), low));
    const __m128i values = _mm_shuffle_epi8(table(kValuesOfX[magnitude >= kLarge]), nibbles);
    __m128i seeds = _mm_maddubs_epi16(_mm_set1_epi8(12), values);
    seeds = _mm_add_epi16(seeds, _mm_shuffle_epi32(seeds, 0x4E));
    seeds = _mm_add_epi16(seeds, _mm_shuffle_epi32(seeds, 0xB1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out->values), values);
    out->seeds = _mm_cvtsi128_si32(seeds);
    out->scale = kScalesOfX.of[scales[b]];
  }
  return nan;
}

// Those of a block, without its scales.
struct Products : Ymm {
  static Ints dot(const Ints (&w)[4], const Ints (&x)[4], Ints sum) {
    Ints words = _mm256_maddubs_epi16(w[0], x[0]);
    for (int j = 1; j < 4; ++j) words = _mm256_add_epi16(words, _mm256_maddubs_epi16(w[j], x[j]));
    return _mm256_add_epi32(_mm256_madd_epi16(words, _mm256_set1_epi16(1)), sum);
  }
};

}  // namespace

void multiply_avx2(const Nvfp4Slab& slab) {
  auto* x = reinterpret_cast<XBlock*>(slab.scratch);
  const std::int64_t rows = slab.rows, most_blocks = kExpandedBlocks / rows / kGroup * kGroup;
  const std::int64_t sums_of_panel = rows * kRowsOfPanel;
  for (std::int64_t i = 0; i < slab.num_panels * sums_of_panel; ++i) slab.sums[i] = 0.0f;
  for (std::int64_t first = 0; first < slab.blocks; first += most_blocks) {
    const std::int64_t rest = slab.blocks - first, blocks = rest < most_blocks ? rest : most_blocks;
    for (std::int64_t i = 0; i < rows; ++i) {
      if (!expand(slab.x_codes[i] + first * 8, slab.x_scales[i] + first, blocks, rows, x + i)) continue;
      for (std::int64_t p = 0; p < slab.num_panels; ++p) {
        float* sums = slab.sums + p * sums_of_panel + i * kRowsOfPanel;
        for (std::int64_t r = 0; r < kRowsOfPanel; ++r) sums[r] = __builtin_nanf("");
      }
    }
    for (std::int64_t p = 0; p < slab.num_panels; ++p) {
      const std::uint8_t* panel = slab.panels[p] + first * kBlockOfPanel;
      float* sums = slab.sums + p * sums_of_panel;
      if (rows == 1) {
        multiply_row(panel, blocks, x, sums);
      } else {
        kMultiplyRows[rows % kRows](panel, blocks, x, rows, sums);
      }
    }
  }
}

std::int64_t only_products_avx2(std::int64_t rounds) { return only_products<Products>(rounds); }

}  // namespace megamoe::cpu
