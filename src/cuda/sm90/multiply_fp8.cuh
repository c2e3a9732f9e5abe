// multiply_fp8.cuh: the consumer whose operands are E4M3. The tensor cores add up a chunk, 128 columns; its
// sums, times each token's scale, are added in FP32.
#pragma once

#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/grouped_gemm.cuh"

namespace megamoe::sm90 {

template <class Config>
requires(Config::kFp8) struct Consumer<Config> {
  // Operands of 64 columns: two steps.
  using Operands = std::uint32_t[2][4];

  Place place;                         // kOwnTiles tiles of weight rows, all of K
  std::uint32_t codes, scales, folds;  // this thread's shared-memory addresses in stage 0
  std::uint32_t token_scales;          // likewise
  ptx::Descriptor tokens;              // of stage 0

  __device__ Consumer(GemmStorage<Config>& s) {
    const int all = thread_index(), thread = all % 128;
    place = place_of<Config>(all);
    const std::uint32_t weights = ptx::shared_address(s.weights[0][place.group * Config::kOwnTiles][0]);
    codes = weights + thread * 16;
    scales = weights + chunk_code_bytes(Config::kType) + thread * 4;
    folds = ptx::shared_address(s.folds) + all % kFoldCopies * sizeof(uint2);
    token_scales = ptx::shared_address(s.token_scales[0]) + all % 4 * 8;
    tokens = ptx::Descriptor::swizzled(s.tokens[0][0]);
  }

  // Where own tile t has its chunk of a stage.
  __device__ __forceinline__ std::uint32_t tile_at(int stage, int t) const {
    return (stage * Config::kRowTiles + t) * Config::kChunkBytes;
  }
  // This thread's codes of columns 64 * half .. of a chunk.
  __device__ __forceinline__ uint4 load_codes(std::uint32_t tile, int half) const {
    return ptx::load_shared16(codes + tile + half * (128 * 16));
  }
  // What folding makes of the magnitudes under the scales of the thread's two rows.
  struct Folds {
    uint2 upper, lower;
  };
  // `word` has the scales of a chunk: of both rows for columns 0 .., then for 64 ... NOTE: scales have no signs,
  // but what lies where a tile beyond the matrix would be may be anything: cut, for beyond the table others
  // write.
  __device__ __forceinline__ Folds look_up(std::uint32_t word, int half) const {
    constexpr int kEntryBytes = kFoldCopies * sizeof(uint2);
    static_assert(kFoldEntries == 128);
    return {ptx::load_shared8(folds + (word >> (16 * half) & 0x7F) * kEntryBytes),
            ptx::load_shared8(folds + (word >> (16 * half + 8) & 0x7F) * kEntryBytes)};
  }
  __device__ __forceinline__ static void decode(const uint4& words, const Folds& by, Operands& to) {
    decode_fp8_word(words.x, by.upper, to[0][0], to[0][2]);
    decode_fp8_word(words.y, by.lower, to[0][1], to[0][3]);
    decode_fp8_word(words.z, by.upper, to[1][0], to[1][2]);
    decode_fp8_word(words.w, by.lower, to[1][1], to[1][3]);
  }

  // NOTE: ptxas would decode behind the wait for the tensor cores that follows, when they rest. So operands are
  // stored, where an address is what it never is.
  __device__ __forceinline__ void finish_decoding(const Operands& operands) const {
#pragma unroll
    for (const auto& step : operands) {
      asm volatile(
          "{ .reg .pred never; setp.eq.u32 never, %0, 0xFFFFFFF0;"
          " @never st.volatile.shared.v4.u32 [%0], {%1, %2, %3, %4}; }" ::"r"(codes),
          "r"(step[0]), "r"(step[1]), "r"(step[2]), "r"(step[3])
          : "memory");
    }
  }

  // The scales of a stage's tokens in this thread's columns of the accumulators: 8 j + 2 (lane % 4) + {0, 1}.
  template <int kN>
  using ColumnScales = uint2[kN / 8];
  template <int kN>
  __device__ __forceinline__ void load_scales(int stage, ColumnScales<kN>& to) const {
#pragma unroll
    for (int j = 0; j < kN / 8; ++j) {
      to[j] = ptx::load_shared8(token_scales + stage * Config::kTokenScaleBytes + j * 32);
    }
  }
  // acc += sums * token scales.
  template <int kN>
  __device__ static __forceinline__ void promote(const ColumnScales<kN>& scales, const float (&sums)[kN / 2],
                                                 float (&acc)[kN / 2]) {
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      const uint2 pair = scales[i / 4];
      acc[i] = fmaf(__uint_as_float(i % 2 == 0 ? pair.x : pair.y), sums[i], acc[i]);
    }
  }

  // acc = this warpgroup's weight rows times the tile's tokens. Half a chunk is decoded while the tensor
  // cores work on the other half; the first half of what comes next, before the sums are added. What is
  // decoded was loaded a step before, and what folding makes of it looked up. Rows beyond the last are
  // multiplied by what is found: nobody uses them.
  template <int kN>
  __device__ __forceinline__ void multiply(int chunks, GemmStorage<Config>& s, StageRing& ring,
                                           Accumulators<Config, kN>& acc) const {
    // Two tiles of weights share the scales that one loads, where registers are left for them.
    constexpr bool kKeepScales = Config::kOwnTiles == 2 && kN <= kMostKeptScales;
    float sums[kN / 2];
#pragma unroll
    for (int i = 0; i < kN / 2; ++i) {
      sums[i] = 0.0f;
#pragma unroll
      for (int t = 0; t < Config::kOwnTiles; ++t) acc[t][i] = 0.0f;
    }
    Operands first, second;
    ColumnScales<kN> scales_of_tokens;
    ptx::mbarrier_wait(&s.full[ring.index], ring.parity);
    std::uint32_t tile = tile_at(ring.index, 0), scale_word = ptx::load_shared4(scales + tile);
    uint4 late_codes = load_codes(tile, 1);
    Folds late_folds = look_up(scale_word, 1);
    decode(load_codes(tile, 0), look_up(scale_word, 0), first);
    for (int left = chunks; left > 0; --left) {
      const ptx::Descriptor b = tokens + ring.index * Config::kTokenTileBytes;
      StageRing next = ring;
      next.template advance<Config::kStages>();
      // Asked early: the answer takes as long as some decoding.
      const bool ready = left == 1 || ptx::mbarrier_test(&s.full[next.index], next.parity);
#pragma unroll
      for (int t = 0; t < Config::kOwnTiles; ++t) {
        const bool last = t + 1 == Config::kOwnTiles;
        ptx::wgmma_pin(sums);
        ptx::wgmma_fence();
        ptx::wgmma<ptx::Fp8, kN, true>(sums, first[0], b);
        ptx::wgmma<ptx::Fp8, kN>(sums, first[1], b + 32);
        ptx::wgmma_commit();
        // What comes next; after the last chunk: anything.
        if (last && !ready) ptx::mbarrier_wait(&s.full[next.index], next.parity);
        tile = tile_at(last && left > 1 ? next.index : ring.index, last ? 0 : t + 1);
        scale_word = ptx::load_shared4(scales + tile);
        const uint4 early_codes = load_codes(tile, 0);
        decode(late_codes, late_folds, second);
        ptx::wgmma_fence();
        ptx::wgmma<ptx::Fp8, kN>(sums, second[0], b + 64);
        ptx::wgmma<ptx::Fp8, kN>(sums, second[1], b + 96);
        ptx::wgmma_commit();
        const Folds early_folds = look_up(scale_word, 0);
        late_codes = load_codes(tile, 1);
        late_folds = look_up(scale_word, 1);
        if (kKeepScales && t == 0) load_scales<kN>(ring.index, scales_of_tokens);
        ptx::wgmma_wait<1>();
        decode(early_codes, early_folds, first);
        finish_decoding(first);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(sums);
        if (!kKeepScales) load_scales<kN>(ring.index, scales_of_tokens);
        promote<kN>(scales_of_tokens, sums, acc[t]);
      }
      give_back<Config>(&s.empty[ring.index]);
      ring = next;
    }
  }

 private:
  static constexpr int kMostKeptScales = 96;
};

}  // namespace megamoe::sm90
