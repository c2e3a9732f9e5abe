// quantize_loops.h: a row to NVFP4, some blocks at a time, written once over a vector type for
// quantize_<set>.cc. All of it has internal linkage.
//
// A Vector has
//   kBlocks                        blocks that are scaled at once, a divisor of kMostBlocks
//   choose_scales(x, g, d, scales) their scales as codes, and as what they are divided by
//   kStored                        blocks whose codes are stored at once, a divisor of kBlocks
//   store_codes(x, d, out)         the codes of so many, each divided by its d
#pragma once

#include <immintrin.h>

#include <cstring>

#include "numerics/quantize_x86.h"

namespace megamoe {
namespace {

constexpr int kBlock = 16;

// Of some blocks, masks of those that saturate and of those with a NaN or an infinity.
struct Faults {
  std::uint64_t saturated, nonfinite;
};

// V::kBlocks to kMostBlocks blocks, a multiple of the first: all scales first, so that no code waits for one.
constexpr std::int64_t kMostBlocks = 64;
template <class V, class T>
BlockCounts quantize_blocks(const T* x, float g, std::int64_t blocks, std::uint8_t* codes,
                            std::uint8_t* scales) {
  float d[kMostBlocks];
  Faults all = {0, 0};
  for (std::int64_t b = 0; b < blocks; b += V::kBlocks) {
    const Faults faults = V::choose_scales(x + b * kBlock, g, d + b, scales + b);
    all.saturated |= faults.saturated << b;
    all.nonfinite |= faults.nonfinite << b;
  }
  for (std::int64_t b = 0; b < blocks; b += V::kStored) {
    const T* some = x + b * kBlock;
    for (std::size_t line = 0; line < V::kStored * kBlock * sizeof(T); line += 64) {  // of the next blocks
      _mm_prefetch(reinterpret_cast<const char*>(some + kMostBlocks * kBlock) + line, _MM_HINT_T0);
    }
    V::store_codes(some, d + b, codes + b * kBlock / 2);
  }
  for (std::uint64_t rest = all.nonfinite; rest != 0; rest &= rest - 1) {
    const int b = __builtin_ctzll(rest);
    scales[b] = 0x7F;
    std::memset(codes + b * kBlock / 2, 0, kBlock / 2);
  }
  return {__builtin_popcountll(all.saturated), __builtin_popcountll(all.nonfinite)};
}

template <class V, class T>
BlockCounts quantize_row(const T* x, float g, std::int64_t blocks, std::uint8_t* codes,
                         std::uint8_t* scales) {
  BlockCounts counts;
  const auto add = [&](BlockCounts more) {
    counts.saturated += more.saturated;
    counts.nonfinite += more.nonfinite;
  };
  const std::int64_t whole = blocks / V::kBlocks * V::kBlocks;
  for (std::int64_t b = 0; b < whole; b += kMostBlocks) {
    add(quantize_blocks<V>(x + b * kBlock, g, whole - b < kMostBlocks ? whole - b : kMostBlocks,
                           codes + b * kBlock / 2, scales + b));
  }
  if (const auto rest = static_cast<std::size_t>(blocks - whole); rest != 0) {  // they and blocks of zeros
    T last[V::kBlocks * kBlock] = {};
    std::uint8_t last_codes[V::kBlocks * kBlock / 2], last_scales[V::kBlocks];
    std::memcpy(last, x + whole * kBlock, rest * kBlock * sizeof(T));
    add(quantize_blocks<V>(last, g, V::kBlocks, last_codes, last_scales));
    std::memcpy(codes + whole * kBlock / 2, last_codes, rest * kBlock / 2);
    std::memcpy(scales + whole, last_scales, rest);
  }
  return counts;
}

}  // namespace
}  // namespace megamoe
