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

  // What a thread reads of 64 columns of a weight tile.
  struct Words {
    uint4 codes;
    std::uint32_t scales;  // of its two rows
  };
  // Columns 64 * half .. of own tile t in a stage.
  __device__ __forceinline__ Words load(int stage, int t, int half) const {
    const std::uint32_t at = (stage * Config::kRowTiles + t) * Config::kChunkBytes;
    return {ptx::load_shared16(codes + at + half * (128 * 16)), ptx::load_shared2(scales + at + half * 2)};
  }
  // NOTE: scales have no signs, but what lies where a tile beyond the matrix would be may be anything: cut,
  // for beyond the table others write.
  __device__ __forceinline__ void decode(const Words& from, Operands& to) const {
    constexpr int kEntryBytes = kFoldCopies * sizeof(uint2);
    static_assert(kFoldEntries == 128);
    const uint2 upper = ptx::load_shared8(folds + (from.scales & 0x7F) * kEntryBytes);
    const uint2 lower = ptx::load_shared8(folds + (from.scales >> 8 & 0x7F) * kEntryBytes);
    decode_fp8_word(from.codes.x, upper, to[0][0], to[0][2]);
    decode_fp8_word(from.codes.y, lower, to[0][1], to[0][3]);
    decode_fp8_word(from.codes.z, upper, to[1][0], to[1][2]);
    decode_fp8_word(from.codes.w, lower, to[1][1], to[1][3]);
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
  // decoded was loaded a step before. Rows beyond the last are multiplied by what is found: nobody uses them.
  template <int kN>
  __device__ __forceinline__ void multiply(int chunks, GemmStorage<Config>& s, StageRing& ring,
                                           Accumulators<Config, kN>& acc) const {
    // Two tiles of weights share the scales that one loads, where registers are left for them.
    constexpr bool kKeepScales = Config::kOwnTiles == 2 && kN <= 104;
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
    decode(load(ring.index, 0, 0), first);
    Words words = load(ring.index, 0, 1);
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
        decode(words, second);
        ptx::wgmma_fence();
        ptx::wgmma<ptx::Fp8, kN>(sums, second[0], b + 64);
        ptx::wgmma<ptx::Fp8, kN>(sums, second[1], b + 96);
        ptx::wgmma_commit();
        // After the last chunk: anything.
        if (last && !ready) ptx::mbarrier_wait(&s.full[next.index], next.parity);
        const int next_stage = last && left > 1 ? next.index : ring.index, next_tile = last ? 0 : t + 1;
        words = load(next_stage, next_tile, 0);
        ptx::wgmma_wait<1>();
        decode(words, first);
        words = load(next_stage, next_tile, 1);
        if (kKeepScales && t == 0) load_scales<kN>(ring.index, scales_of_tokens);
        ptx::wgmma_wait<0>();
        ptx::wgmma_pin(sums);
        if (!kKeepScales) load_scales<kN>(ring.index, scales_of_tokens);
        promote<kN>(scales_of_tokens, sums, acc[t]);
      }
      give_back<Config>(&s.empty[ring.index]);
      ring = next;
    }
  }
};

}  // namespace megamoe::sm90
