// exact.h: holds the outputs of the two GEMMs against sums in FP64, where a backend adds in FP32 in an order
// of its own.
//
// Sum    of the products of decoded codes, which are exact in FP64; off by nothing that matters here.
// Error  what a tensor core may lose. It adds 16 products to an accumulator at a time: the 17 addends are
//        shifted to the largest of them, cut behind its 24th bit and added, and the sum is cut to 24 bits. A
//        cut loses less than 2^-23 of the largest magnitude M that a product or a partial sum takes; so
//          |got - sum| <= (K + K / 16 + 8) * 2^-23 * M,
//        the 8 for partial sums of warps that share K, and for roundings. One that rounds to nearest, in any
//        order, loses half as much. M is at most the sum of magnitudes. Where signs are independent and
//        random, as in every random layer, it also stays below 8 times the root of the sum of squares, but
//        for once in 10^13 outputs (Hoeffding, and Levy for the largest of the partial sums: 4 exp(-8^2 /
//        2)); this is the smaller one from K = 130.
// FP8    of E4M3 operands the tensor core keeps fewer bits: 32 products and the sum of those before are cut
//        behind the 13th bit of the largest of them, less than 2^-12 of it; a group of 128 columns is summed
//        so, 132 cuts, and the groups, times their scales, are added in FP32.
// h      the intervals of gate and up go through the activation at their ends (and at silu's minimum),
//        widened by the roundings of its FP32 steps; rounding to BF16 keeps their order.
// NVFP4  the ends of a block's magnitudes give the ends of its scale; under the scale that was found, the
//        ends of h give the ends of each code. Most codes are left no choice by that.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "tests/harness.h"

namespace megamoe::testing {

// FP8: what a group may lose, as a part of the largest magnitude in it.
inline constexpr double kFp8GroupError = (128 + 4) * 0x1p-12;

// What a GEMM reads, in host memory.
struct GemmCall {
  const LayerWeights& layer;
  ActivationRows x;
  const std::int64_t* offsets = nullptr;  // [experts + 1]
  const std::int32_t* gather = nullptr;   // row r reads row gather[r] of x; null: r itself
};

// Codes that may differ from the FP64 sum's, all of them within the error of a tie.
inline constexpr double kDifferentShare = 0.001;

struct Verdict {
  std::int64_t checked = 0;     // outputs: values or codes
  std::int64_t different = 0;   // of them not what the FP64 sum gives, all later steps as defined
  std::int64_t zero_signs = 0;  // zeros of the other sign, which are not counted as different
  std::int64_t open = 0;        // h: the error leaves more than one value or code
  std::int64_t beyond = 0;      // farther from the FP64 sum than the error allows
  std::int64_t scales = 0, different_scales = 0;  // kNvfp4: bytes of block scales
  double worst = 0;                               // second GEMM: the largest part of its error an output used
  // Of magnitudes of products, without tensor scales. FP8: of a group of 128 columns, times kExactLimit /
  // kFp8ExactLimit.
  double largest_sum = 0;
  std::string first_beyond, first_different;

  double different_share() const {
    return checked == 0 ? 0.0 : static_cast<double>(different) / static_cast<double>(checked);
  }
  void add(const Verdict& other);
};

// About `samples` outputs: some of each row, spread over its columns, the corners among them; or all where
// there are no more. kNvfp4 takes whole blocks of 16 columns, kInterleavedBf16 counts gate and h columns
// alike. h [R, I] (kInterleavedBf16: [R, 2I]); y [R, H].
Verdict check_gemm1(const GemmCall& call, L1Output mode, const ActivationRows& h, std::int64_t samples);
Verdict check_gemm2(const GemmCall& call, const float* y, std::int64_t samples);

// ---- Layers and rows for it

// kRandom: all codes; scales over several powers of two, with some 0 and some extreme. kExact: so few bits
// that products are multiples of kExactUnit, and FP32 adds them up exactly in any order while largest_sum
// stays below kExactLimit.
enum class Operands { kRandom, kExact };
inline constexpr double kExactUnit = 0x1p-6;
inline constexpr double kExactLimit = kExactUnit * 0x1p23;
// The same of a group of 128 columns of FP8 operands, which are multiples of 2^-7 then.
inline constexpr double kFp8ExactLimit = 0x1p-7 * 0x1p12;

// Gate and up have the size of x; every matrix a tensor scale of its own.
std::unique_ptr<TestLayer> wide_layer(const LayerConfig& config, Operands operands, bool bias,
                                      std::uint64_t seed);
// Tensor scales (kNvfp4) differ by row; some rows are several times larger than others.
Rows wide_rows(ActivationFormat format, std::int64_t rows, std::int64_t cols, Operands operands,
               std::uint64_t seed);
// Tensor scales of `rows` rows of h: few of its blocks saturate.
std::vector<float> h_scales(std::int64_t rows, std::uint64_t seed);

}  // namespace megamoe::testing
