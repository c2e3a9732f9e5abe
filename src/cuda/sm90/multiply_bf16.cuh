// multiply_bf16.cuh: the consumer whose operands are BF16: every product exact.
#pragma once

#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/grouped_gemm.cuh"

namespace megamoe::sm90 {

// What a consumer thread reads of a chunk of weights.
struct ChunkWords {
  uint4 codes;   // a word for each of the four steps
  uint2 scales;  // of the rows of half 0 and of half 1
};

// A chunk as operands of its four steps.
struct Operands {
  std::uint32_t a[4][4];
};
__device__ inline void decode_chunk(const ChunkWords& chunk, Operands& to) {
  const std::uint32_t early0 = decode_scales<0>(chunk.scales.x);
  const std::uint32_t early1 = decode_scales<0>(chunk.scales.y);
  const std::uint32_t late0 = decode_scales<2>(chunk.scales.x);
  const std::uint32_t late1 = decode_scales<2>(chunk.scales.y);
  decode_word<0>(chunk.codes.x, early0, early1, to.a[0]);
  decode_word<1>(chunk.codes.y, early0, early1, to.a[1]);
  decode_word<0>(chunk.codes.z, late0, late1, to.a[2]);
  decode_word<1>(chunk.codes.w, late0, late1, to.a[3]);
}

// Starts a chunk's products with the token tile `b` describes.
template <int kN>
__device__ inline void start_chunk(const Operands& from, ptx::Descriptor b, float (&acc)[kN / 2]) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 4; ++i)
    ptx::wgmma<ptx::Bf16, kN>(acc, from.a[i], b + i * 32);  // 16 columns are 32 bytes
  ptx::wgmma_commit();
}

template <class Config>
requires(!Config::kFp8) struct Consumer<Config> {
  Place place;
  std::uint32_t codes, scales;  // this thread's shared-memory addresses in stage 0
  ptx::Descriptor tokens;       // of stage 0

  template <class Storage>
  explicit __device__ Consumer(Storage& s) {
    const int thread = thread_index();
    place = place_of<Config>(thread);
    const int warp = thread / 32 % 4, lane = thread % 32;
    const std::uint32_t weights = ptx::shared_address(s.weights[0][place.group][place.part]);
    codes = weights + (warp * 32 + lane) * 16;
    scales = weights + chunk_code_bytes(OperandType::kBf16) + (warp * 8 + lane / 4) * 8;
    tokens = ptx::Descriptor::swizzled(s.tokens[0][place.part]);
  }

  // This thread's share of a chunk of a stage.
  __device__ __forceinline__ ChunkWords load(int stage, int chunk) const {
    const std::uint32_t at =
        (stage * (Config::kRowGroups * Config::kStageChunks) + chunk) * Config::kChunkBytes;
    return {ptx::load_shared16(codes + at), ptx::load_shared8(scales + at)};
  }

  // acc = this warpgroup's 64 weight rows times the tile's tokens over its share of K. A chunk is decoded
  // while the tensor cores work on the one before, so that two sets of operands take turns; a stage is asked
  // for a chunk early, for the answer takes as long as some decoding. It is given back once the first
  // products of the next one are under way.
  template <int kWidth, class Storage>
  __device__ __forceinline__ void multiply(int chunks, Storage& s, StageRing& ring,
                                           Accumulators<Config, kWidth>& accumulators) const {
    auto& acc = accumulators[0];
    constexpr int kOwn = Config::kStageChunks / Config::kSplit;  // of a stage's chunks
    constexpr int kUnroll = kOwn % 2 == 0 ? kOwn : 2 * kOwn;
#pragma unroll
    for (int i = 0; i < kWidth / 2; ++i) acc[i] = 0.0f;
    ptx::wgmma_pin(acc);
    Operands operands[2];
    int held = -1, left = (chunks - place.part + Config::kSplit - 1) / Config::kSplit;
    if (left > 0) {
      ptx::mbarrier_wait(&s.full[ring.index], ring.parity);
      ChunkWords words = load(ring.index, 0);
      // NOTE: left in the middle, never by falling through: the compiler must see which operands are in
      // flight.
    again:
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        const bool turns = u % kOwn == kOwn - 1;  // the stage ends
        StageRing next = ring;
        if (turns && left > 1) next.template advance<Config::kStages>();
        const bool ready = !turns || ptx::mbarrier_test(&s.full[next.index], next.parity);
        decode_chunk(words, operands[u % 2]);
        start_chunk<kWidth>(operands[u % 2],
                            tokens + (ring.index * (Config::kStageChunks * Config::kTokenTileBytes) +
                                      u % kOwn * Config::kSplit * Config::kTokenTileBytes),
                            acc);
        if (turns && !ready) ptx::mbarrier_wait(&s.full[next.index], next.parity);
        words =
            load(next.index, (u + 1) % kOwn * Config::kSplit);  // after the last chunk: anything of its stage
        ptx::wgmma_wait<1>();
        if (u % kOwn == 0) {
          if (held >= 0) give_back<Config>(&s.empty[held]);
          held = ring.index;
        }
        ring = next;
        if (--left <= 0) goto done;
      }
      goto again;
    }
  done:
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc);
    if (held >= 0) {
      give_back<Config>(&s.empty[held]);
      ring.template advance<Config::kStages>();
    }
    // A last stage may hold nothing of this share.
    if (Config::kSplit > 1 && place.part > 0 && (chunks - 1) % Config::kStageChunks < place.part) {
      ptx::mbarrier_wait(&s.full[ring.index], ring.parity);
      give_back<Config>(&s.empty[ring.index]);
      ring.template advance<Config::kStages>();
    }
  }
};

}  // namespace megamoe::sm90
