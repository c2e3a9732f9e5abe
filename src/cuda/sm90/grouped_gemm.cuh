// grouped_gemm.cuh: acc[expert rows of W, tokens] = W[e] * X[rows of e]^T for every expert e, and an epilogue
// on it.
//
// The weights are the first operand: decoded from 4 bits straight into the registers of wgmma. Tokens, in
// BF16 or E4M3 and in expert order, are the second operand, in shared memory; so a tile may have any multiple
// of 8 tokens (beyond 136, of 16), and weights stream. One persistent CTA per SM: producer warps fill a ring
// of stages by the copy engine, consumer warpgroups decode and multiply (multiply_bf16.cuh,
// multiply_fp8.cuh).
//
// Wide tiles are for many tokens, where the tensor cores are the limit and then the L2: such a tile is no
// wider than its expert's rows ask for, and the two CTAs of a cluster read each token once for both.
//
//   Config    tile sizes, stages, threads
//   Params    pointers and sizes
//   Storage   shared memory
//   Helpers   tile walk, producer, epilogue
//   Kernel    set-up and roles
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>
#include <utility>

#include "cuda/launch.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90/decode.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

// ---- Config

// The widths of tiles that a kernel chooses from by an expert's rows, and how many CTAs fetch the tokens
// together, which they multiply by different weights.
struct TileWidths {
  int widest, count, step, cluster;

  MEGAMOE_HD constexpr int width(int index) const { return widest - step * index; }
  // Tokens that each CTA fetches; those in the middle are fetched twice where they do not come out even.
  MEGAMOE_HD constexpr int share(int index) const { return (width(index) / cluster + 7) / 8 * 8; }
};
constexpr TileWidths tile_widths(OperandType type, int tokens) {
  if (tokens <= narrow_tile(type)) return {tokens, 1, 8, 1};
  if (tokens <= wide_tile(type)) return {tokens, (tokens - narrow_tile(type)) / 8 + 1, 8, 2};
  return {tokens, (tokens - wide_tile(type) - 1) / 16 + 1, 16, 2};
}
inline constexpr int kMostWidths = 10;

template <OperandType kType_, int kTokens_, int kRowTiles_, int kSplit_>
struct GemmConfig {
  static constexpr OperandType kType = kType_;
  static constexpr bool kFp8 = kType == OperandType::kFp8;
  static constexpr int kTokens = kTokens_;      // of the widest tile
  static constexpr int kRowTiles = kRowTiles_;  // of 64 weight rows
  static constexpr int kSplit = kSplit_;        // warpgroups that share the K of those rows, chunk by chunk
  static constexpr bool kWide = kTokens > narrow_tile(kType);
  static constexpr TileWidths kTileWidths = tile_widths(kType, kTokens);  // to choose from for wgmma's N
  static constexpr int kNumWidths = kTileWidths.count;
  static constexpr int kCluster = kTileWidths.cluster;
  // Weight tiles of a warpgroup: two where it adds up E4M3 products of many tokens, whose sums of 128 columns
  // need registers of their own.
  static constexpr int kOwnTiles = kFp8 && kWide ? 2 : 1;
  // Warpgroups side by side along the weight rows.
  static constexpr int kRowGroups = kRowTiles / kOwnTiles;
  // While some wait for the tensor cores the others decode. Four keep in step, for with few stages one that
  // is ahead starves the others.
  static constexpr int kConsumers = kRowGroups * kSplit;
  static constexpr bool kInStep = kConsumers == 4;
  static constexpr int kChunkCols = chunk_cols(kType);
  static constexpr int kChunkBytes = chunk_bytes(kType);
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 128;  // the producer's warpgroup is the last
  static constexpr int kTokenTileBytes = kTokens * 128;
  // FP8: scales of a chunk's tokens.
  static constexpr int kTokenScaleBytes = kFp8 ? (kTokens * 4 + 127) / 128 * 128 : 0;
  // Chunks of K in a stage: with few tokens more, so that waiting for a stage is worth it.
  static constexpr int kStageChunks = kFp8            ? 1
                                      : kSplit > 1    ? 2 * kSplit
                                      : kTokens <= 32 ? 4
                                      : kTokens <= 64 ? 2
                                                      : 1;
  // Tokens whose accumulators are in shared memory together on their way to the epilogue; in one go where the
  // registers that hold them are wanted there.
  static constexpr int kPassTokens = !kWide ? kTokens : kConsumers == 3 || kFp8 ? 48 : 32;
  // Weight tiles whose results meet in an epilogue: for FP8, where h has a scale for each 128 columns, all.
  static constexpr int kMeet = kFp8 ? kRowTiles : 1;
  static constexpr int kMeetThreads = kFp8 ? 128 * kConsumers : 128 * kSplit;
  // Floats of a token there: 64 rows, and what keeps banks apart.
  static constexpr int kPitch = kTileRows + 4;
  // Stages: as many as shared memory holds beside the sums and 16 KiB of the rest. Where that is more, what
  // rounding leaves must do for it: launch() asks.
  static constexpr int kStageBytes =
      kStageChunks * (kTokenTileBytes + kTokenScaleBytes + kRowTiles * kChunkBytes);
  static constexpr int kSumBytes = kRowTiles * kSplit * kPassTokens * kPitch * 4;
  static constexpr int kFoldBytes = kFp8 ? kFoldEntries * kFoldCopies * 8 : 0;
  static constexpr int kMostStages = ((227 - 16) * 1024 - kSumBytes - kFoldBytes) / kStageBytes;
  static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
  // Registers: 64K over all threads, and setmaxnreg moves them from the producer to the consumers.
  static constexpr int kProducerRegs = kConsumers == 2 ? 40 : 32;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 232 : kConsumers == 3 ? 160 : 112;
  // What the launch allocates: the bound's registers, in steps of 8, for every thread.
  static constexpr int kLaunchRegs = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegs + kConsumers * kConsumerRegs <= (1 + kConsumers) * kLaunchRegs,
                "more registers than the CTA owns: setmaxnreg would wait for ever");
  static_assert(kTokens % 8 == 0 && kTokens <= 256 && kStages >= 3 && kNumWidths <= kMostWidths);
  static_assert(kSplit == 1 || kRowTiles == 1, "either rows or K are shared among warpgroups");
  static_assert(kCluster == 1 || kStageChunks == 1, "clusters share single chunks");
};

// ---- Params

struct GemmParams {
  const std::uint8_t* weights;  // [experts][tiles][chunks][chunk_bytes()]
  int tiles;                    // of 64 weight rows, per expert
  int cols;                     // K, a multiple of 16
  int experts;
  const std::int64_t* offsets;  // [experts + 1]
  bool offsets_settled;         // as in GroupedInput
  CUtensorMap
      tokens[kMostWidths];   // [rows, cols] in boxes of a chunk's columns by a CTA's share of a tile's tokens
  CUtensorMap token_scales;  // FP8: as fp8_rows.h says, in boxes of the widest tile's tokens
};

// ---- Storage

inline constexpr int kMaxExperts = 1024;

// One piece of work: some tiles of weights and rows of one expert.
struct Tile {
  int expert;
  int rows;          // valid rows
  int first_row;     // of the routed rows
  int scale_place;   // of that row's scales of FP8
  int weight_tile;   // the first one
  int weight_tiles;  // how many: kRowTiles, fewer at the end
};

// What a token's results are multiplied by.
struct TokenScales {
  float in;   // tensor scale of the token
  float out;  // tensor scale of the row of h, where h becomes NVFP4
};
// What the epilogue needs to know of a tile, noted before it is computed: registers are scarce then.
template <class Config>
struct Work {
  Tile tile;
  alignas(16) TokenScales scales[Config::kTokens];
};

template <class Config>
struct alignas(1024) GemmStorage {
  // Stages first: token tiles need 1024-byte boundaries.
  std::uint8_t tokens[Config::kStages][Config::kStageChunks][Config::kTokenTileBytes];
  alignas(128)
      std::uint8_t weights[Config::kStages][Config::kRowTiles][Config::kStageChunks][Config::kChunkBytes];
  alignas(128) float token_scales[Config::kFp8 ? Config::kStages : 1]
                                 [Config::kFp8 ? Config::kTokenScaleBytes / 4 : 32];
  alignas(16) uint2 folds[Config::kFp8 ? kFoldEntries : 1][kFoldCopies];
  // Accumulators in passing.
  alignas(16) float sums[Config::kRowTiles * Config::kSplit][Config::kPassTokens][Config::kPitch];
  alignas(16) std::uint32_t epilogue[64];    // a copy of the epilogue
  Work<Config> work[Config::kRowGroups][2];  // this tile and the last
  std::uint64_t full[Config::kStages];
  std::uint64_t empty[Config::kStages];
  std::int32_t first_row[kMaxExperts + 1];  // offsets
  std::int16_t
      order[Config::kWide ? kMaxExperts : 1];  // wide: experts by the width of their tiles, widest first
  std::int32_t
      width_end[Config::kNumWidths];         // wide: how many experts have tiles of this width or a wider one
  std::int32_t first_tile[kMaxExperts + 1];  // token tiles of the experts before, in that order
};

// ---- Helpers

// value cut to [0, limit].
__device__ inline int clamp_to(int value, int limit) { return value < 0 ? 0 : value < limit ? value : limit; }

// Tiles of an expert's rows, and the rows of all but the last: equal shares, so that the last is not a
// sliver.
struct TokenTiles {
  int count, rows;
};
template <class Config>
__device__ inline TokenTiles token_tiles(int rows) {
  const int count = (rows + Config::kTokens - 1) / Config::kTokens;
  return {count, count == 0 ? 0 : ((rows + count - 1) / count + 7) / 8 * 8};
}
// Which width is enough for so many rows.
template <class Config>
__device__ inline int width_for(int rows) {
  constexpr TileWidths kTileWidths = Config::kTileWidths;
  return min((Config::kTokens - rows) / kTileWidths.step, kTileWidths.count - 1);
}

// The pieces of work of a CTA, or rather of a cluster's CTAs, which have theirs side by side along the weight
// rows.
template <class Config>
class TileWalk {
 public:
  __device__ TileWalk(const GemmParams& p, const GemmStorage<Config>& s) : p_(p), s_(s) {}

  static __device__ int rank() { return static_cast<int>(blockIdx.x % Config::kCluster); }  // in its cluster
  static __device__ int first() { return static_cast<int>(blockIdx.x / Config::kCluster); }
  static __device__ int step() { return static_cast<int>(gridDim.x / Config::kCluster); }
  // The first piece beyond those of this width and of wider ones.
  __device__ int end(int width) const { return s_.first_tile[experts_to(width)] * row_tiles(); }

  // Widths are outermost, then experts, then weight rows, then tokens: CTAs that run together share weights
  // through the L2.
  __device__ Tile at(int index) const {
    int low = 0, high = p_.experts;  // the last expert whose first piece is not beyond index
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s_.first_tile[middle] * row_tiles() <= index ? low : high) = middle;
    }
    const int within = index - s_.first_tile[low] * row_tiles();
    const int expert = Config::kWide ? s_.order[low] : low, begin = s_.first_row[expert],
              rows = s_.first_row[expert + 1] - begin;
    const TokenTiles tiles = token_tiles<Config>(rows);
    const int first = within % tiles.count * tiles.rows;
    // A cluster's CTAs share what is left at the end, but where tiles must meet.
    const int weight_tile = within / tiles.count * kStep, left = p_.tiles - weight_tile;
    const int share = Config::kMeet > 1
                          ? Config::kRowTiles
                          : min((left + Config::kCluster - 1) / Config::kCluster, Config::kRowTiles);
    return {expert,
            clamp_to(rows - first, tiles.rows),
            begin + first,
            static_cast<int>(fp8_scale_place(begin, expert)) + first,
            weight_tile + rank() * share,
            clamp_to(left - rank() * share, share)};
  }

 private:
  static constexpr int kStep = Config::kRowTiles * Config::kCluster;
  // How many experts have tiles of this width or a wider one.
  __device__ int experts_to(int width) const { return Config::kWide ? s_.width_end[width] : p_.experts; }
  // Worked out anew each time: consumers have no register for it.
  __device__ int row_tiles() const { return (p_.tiles + kStep - 1) / kStep; }

  const GemmParams& p_;
  const GemmStorage<Config>& s_;
};

// Copies the offsets, puts the experts in order and sums their token tiles. The whole CTA calls it.
template <class Config>
__device__ void order_experts(const GemmParams& p, GemmStorage<Config>& s) {
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  const auto tiles_of = [](int begin, int end) { return token_tiles<Config>(end - begin); };
  for (int e = thread; e < p.experts; e += Config::kThreads) {
    const auto begin = static_cast<std::int32_t>(__ldcg(p.offsets + e)),
               end = static_cast<std::int32_t>(__ldcg(p.offsets + e + 1));
    s.first_row[e] = begin;
    if (e == p.experts - 1) s.first_row[e + 1] = end;
    if constexpr (!Config::kWide) s.first_tile[e] = tiles_of(begin, end).count;
  }
  if constexpr (Config::kWide) {
    // A warp for each width: counts its experts, then, behind those of the widths before, lists them.
    static_assert(Config::kNumWidths <= Config::kThreads / 32);
    __syncthreads();
    const auto for_own = [&](const auto& visit) {  // visit(mask of the experts base.., base)
      for (int base = 0; base < p.experts; base += 32) {
        const int e = base + lane;
        const bool own =
            e < p.experts && width_for<Config>(tiles_of(s.first_row[e], s.first_row[e + 1]).rows) == warp;
        visit(__ballot_sync(~0u, own), base);
      }
    };
    if (warp < Config::kNumWidths) {
      int count = 0;
      for_own([&](unsigned mask, int) { count += __popc(mask); });
      if (lane == 0) s.width_end[warp] = count;
    }
    __syncthreads();
    int place = 0, end = 0;
    if (warp < Config::kNumWidths) {
      for (int i = 0; i < warp; ++i) place += s.width_end[i];
      end = place + s.width_end[warp];
      for_own([&](unsigned mask, int base) {
        if (mask >> lane & 1) {
          const int e = base + lane, at = place + __popc(mask & ((1u << lane) - 1));
          s.order[at] = static_cast<std::int16_t>(e);
          s.first_tile[at] = tiles_of(s.first_row[e], s.first_row[e + 1]).count;
        }
        place += __popc(mask);
      });
    }
    __syncthreads();
    if (warp < Config::kNumWidths && lane == 0) s.width_end[warp] = end;
  }
  __syncthreads();
  if (warp > 0) return;
  std::int32_t total = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const int i = base + lane;
    const std::int32_t tiles = i < p.experts ? s.first_tile[i] : 0;
    std::int32_t sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t before = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += before;
    }
    if (i < p.experts) s.first_tile[i] = total + sum - tiles;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (lane == 0) s.first_tile[p.experts] = total;
}

struct StageRing {
  int index = 0;
  std::uint32_t parity = 0;
  template <int kStages>
  __device__ void advance() {
    if (++index == kStages) {
      index = 0;
      parity ^= 1;
    }
  }
};

// threadIdx.x, read anew: what is worked out from it else stays in registers from one width to the next.
__device__ inline int thread_index() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// Of all lanes the same, and the compiler told so: loops over it need no masks, addresses no vector
// registers.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// Of a consumer warpgroup.
struct Place {
  int group;  // of the weight rows
  int part;   // of K
};
template <class Config>
__device__ inline Place place_of(int thread) {
  const int index = uniform(thread / 128);
  return {index % Config::kRowGroups, index / Config::kRowGroups};
}

// A consumer warpgroup: its place, and where it finds its share of a stage. Its multiply<kWidth>(chunks,
// storage, ring, acc) makes the accumulators of one tile and moves the ring on.
template <class Config>
struct Consumer;

// A warp gives a stage back, in each CTA that writes to it, after all its lanes got here: what they have read
// is not overwritten before. The fence: the copy engine writes there next, which is another proxy. One lane
// arrives for all. racecheck (compute-sanitizer 2026.4) does not follow
// __syncwarp() from there to the arrival: of what it is to check (gpu_racecheck), each lane arrives itself.
#if defined(MEGAMOE_RACECHECK)
inline constexpr int kLanesArriving = 32;
#else
inline constexpr int kLanesArriving = 1;
#endif
template <class Config>
__device__ inline void give_back(std::uint64_t* barrier) {
  ptx::fence_async_proxy();
  __syncwarp();
  const unsigned lane = threadIdx.x % 32;
  if constexpr (Config::kCluster == 1 || kLanesArriving > 1) {
    if (lane < kLanesArriving) ptx::mbarrier_arrive(barrier);
    if (lane + 1 < Config::kCluster)
      ptx::mbarrier_arrive_at(barrier, (TileWalk<Config>::rank() + lane + 1) % Config::kCluster);
  } else {
    if (lane < Config::kCluster) ptx::mbarrier_arrive_at(barrier, lane);
  }
}
// Arrivals that make a stage free, where `warps` of each CTA give it back.
template <class Config>
constexpr int arrivals_of(int warps) {
  return warps * (kLanesArriving + Config::kCluster - 1);
}

// Gives a piece's stages back untouched: of a warpgroup beyond its last tile.
template <class Config>
__device__ void pass_by(int chunks, GemmStorage<Config>& s, StageRing& ring) {
#pragma unroll 1
  for (int left = chunks; left > 0; left -= Config::kStageChunks) {
    ptx::mbarrier_wait(&s.full[ring.index], ring.parity);
    give_back<Config>(&s.empty[ring.index]);
    ring.template advance<Config::kStages>();
  }
}

// walk.at(index), uniform.
template <class Config>
__device__ Tile uniform_tile(const TileWalk<Config>& walk, int index) {
  const Tile tile = walk.at(index);
  return {uniform(tile.expert),      uniform(tile.rows),        uniform(tile.first_row),
          uniform(tile.scale_place), uniform(tile.weight_tile), uniform(tile.weight_tiles)};
}

// run<i>() for every width, the widest first. One width after the other, each with code of its own. NOTE:
// chosen for each tile instead, the compiler would not know that a warp's lanes go the same way, and have
// wgmma wait.
template <class Config, class Run>
__device__ __forceinline__ void for_widths(const Run& run) {
  [&]<int... kIndices>(std::integer_sequence<int, kIndices...>) __attribute__((always_inline)) {
    (run.template operator()<kIndices>(), ...);
  }
  (std::make_integer_sequence<int, Config::kNumWidths>{});
}

// A producer warp, one of kProducerWarps: starts copies of each stage as soon as it is free. Which: weight
// tiles by turns, tokens (and their scales) the first warp. NOTE: one warp for all was what the others waited
// for. Chunks of weights along K are adjacent in memory and in the stage. A box of tokens is always whole:
// rows beyond the tile's are other experts' or zero, and what comes of them is not used; columns beyond K are
// zero. NOTE: all lanes stay together and one of them is elected for the copies, whose operands are warp-wide
// registers: a branch to a single thread would have the compiler fill those one lane at a time.
inline constexpr int kProducerWarps = 4;
template <class Config>
__device__ void produce(const GemmParams& p, const TileWalk<Config>& walk, GemmStorage<Config>& s,
                        int producer) {
  constexpr int kBytes = Config::kChunkBytes;
  const int chunks = static_cast<int>(chunks_of(Config::kType, p.cols));
  const int stride = chunks * kBytes;  // from tile to tile
  StageRing ring;
  int index = walk.first();
  const auto weights_of = [&](const Tile& tile) {
    return p.weights + static_cast<std::int64_t>(tile.expert * p.tiles + tile.weight_tile) * stride;
  };
  // Chunks `chunk`.. of a tile, which lie at `from`, into a stage that is free: the first warp announces all
  // of its bytes.
  const auto start_weights = [&](const std::uint8_t* from, int tiles, int share, int chunk, int stage) {
    const int present = Config::kStageChunks == 1 ? 1 : clamp_to(chunks - chunk, Config::kStageChunks);
    if (!ptx::elect_one()) return;
    // All of them arrive, with copies or without: so none falls behind by a round of the ring.
    if (producer == 0) {
      ptx::mbarrier_arrive_expect(&s.full[stage],
                                  present * (tiles * kBytes + Config::kCluster * share * 128) +
                                      (Config::kFp8 ? Config::kTokens * 4 : 0));
    } else {
      ptx::mbarrier_arrive(&s.full[stage]);
    }
#pragma unroll 1
    for (int t = (producer + kProducerWarps - 1) % kProducerWarps; t < tiles; t += kProducerWarps)
      ptx::bulk_copy(s.weights[stage][t], from + t * stride, present * kBytes, &s.full[stage]);
  };
  // Weights do not depend on the kernel before: those of the first stages are on their way while it still
  // runs.
  int early = 0;
  if constexpr (!Config::kWide) {
    if (index < walk.end(0)) {
      const Tile tile = uniform_tile(walk, index);
      for (; early < Config::kStages && early * Config::kStageChunks < chunks; ++early) {
        start_weights(weights_of(tile) + early * Config::kStageChunks * kBytes, tile.weight_tiles,
                      Config::kTokens, early * Config::kStageChunks, early);
      }
    }
  }
  cuda::await_previous_kernel();
  for_widths<Config>([&]<int kIndex>() __attribute__((always_inline)) {
    constexpr int kWidth = Config::kTileWidths.width(kIndex), kShare = Config::kTileWidths.share(kIndex);
    for (; index < uniform(walk.end(kIndex)); index += walk.step()) {
      const Tile tile = uniform_tile(walk, index);
      const std::uint8_t* from = weights_of(tile);
      // The tokens that this CTA fetches for its cluster.
      const int first = walk.rank() == 0 ? 0 : kWidth - kShare;
      for (int chunk = 0; chunk < chunks; chunk += Config::kStageChunks) {
        if (!Config::kWide && early > 0) {
          --early;
        } else {
          ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
          start_weights(from, tile.weight_tiles, kShare, chunk, ring.index);
          __syncwarp();
        }
        if (producer == 0 && ptx::elect_one()) {
          std::uint64_t* full = &s.full[ring.index];
#pragma unroll
          for (int part = 0; part < Config::kStageChunks; ++part) {
            if (chunk + part >= chunks) continue;
            ptx::tensor_copy<Config::kCluster>(s.tokens[ring.index][part] + first * 128, &p.tokens[kIndex],
                                               (chunk + part) * Config::kChunkCols, tile.first_row + first,
                                               full);
          }
          if constexpr (Config::kFp8)
            ptx::tensor_copy(s.token_scales[ring.index], &p.token_scales, tile.scale_place, chunk, full);
        }
        __syncwarp();
        from += Config::kStageChunks * kBytes;
        ring.advance<Config::kStages>();
      }
    }
  });
}

// Barriers of consumers, by name: all of them, those of row groups whose results meet, single warpgroups.
template <class Config>
__device__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(Config::kConsumerThreads) : "memory");
}
template <class Config>
__device__ int meeting_barrier(int group) {
  return 2 + (Config::kMeet > 1 ? 0 : group);
}
// Waits for the warpgroups whose results meet in the epilogue of row group `group`.
template <class Config>
__device__ void sync_meeting(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(meeting_barrier<Config>(group)), "n"(Config::kMeetThreads)
               : "memory");
}
// The same, and whether `yes` is true of all of their threads.
template <class Config>
__device__ bool all_meeting(int group, bool yes) {
  std::uint32_t all;
  asm volatile(
      "{\n"
      ".reg .pred yes, all;\n"
      "setp.ne.u32 yes, %2, 0;\n"
      "bar.red.and.pred all, %1, %3, yes;\n"
      "selp.u32 %0, 1, 0, all;\n"
      "}\n"
      : "=r"(all)
      : "r"(meeting_barrier<Config>(group)), "r"(static_cast<std::uint32_t>(yes)), "n"(Config::kMeetThreads)
      : "memory");
  return all != 0;
}
// The threads of a warpgroup.
template <class Config>
__device__ void sync_group(int group) {
  asm volatile("bar.sync %0, 128;" ::"r"(2 + Config::kRowGroups + group) : "memory");
}
// All threads of the cluster.
template <class Config>
__device__ void sync_cluster() {
  if constexpr (Config::kCluster > 1) {
    ptx::cluster_sync();
  } else {
    __syncthreads();
  }
}

// A warpgroup's accumulators: of its weight tiles, as wgmma leaves them.
template <class Config, int kWidth>
using Accumulators = float[Config::kOwnTiles][kWidth / 2];

// Wide: the epilogue in shared memory, looked up anew each time. NOTE: as a kernel's parameter, or looked up
// once, whatever is worked out from it would stay in registers from one item, even one width, to the next.
template <class Config, class Epilogue>
__device__ __forceinline__ const Epilogue& epilogue_of_item(const Epilogue& parameter,
                                                            GemmStorage<Config>& s) {
  if constexpr (!Config::kWide) return parameter;
  int none = 0;  // what the compiler must not know; that it is shared memory it still does
  asm volatile("" : "+r"(none));
  return *reinterpret_cast<const Epilogue*>(s.epilogue + none);
}

// The accumulators of an item in passing, or of kTogether, of tokens kTokenStep apart; `row` of 64, the first
// of four. kItemRows: weight rows of an item.
template <class Config, int kItemRows>
struct ItemSums {
  // Items of a token in a tile of weights, and where tiles meet.
  static constexpr int kTileItems = kTileRows / kItemRows, kItems = Config::kMeet * kTileItems;
  // Two warps on a scheduler do not hide each other's waits: each has two items in hand.
  static constexpr int kTogether = Config::kFp8 && Config::kWide ? 2 : 1;
  static constexpr int kTokenStep = Config::kMeetThreads / kItems;
  // Beyond a tile's rows there may be zeros, which activate_nearly() is not sure of; in small tiles that
  // would be most of a warp. Wide ones have no register to ask.
  static constexpr bool kMindsRows = !Config::kWide;
  static_assert(kTogether == 1 ||
                (Config::kMeetThreads % kItems == 0 && Config::kPassTokens % (kTogether * kTokenStep) == 0 &&
                 Config::kTokens % (kTogether * kTokenStep) == 0));
  float* token;

  __device__ float* at(int k, int row) const { return token + k * kTokenStep * Config::kPitch + row; }
  // The shares of K, added up.
  __device__ float4 total(int k, int row) const {
    float4 sum = *reinterpret_cast<const float4*>(at(k, row));
#pragma unroll
    for (int part = 1; part < Config::kSplit; ++part) {
      constexpr int kPartFloats = Config::kRowTiles * Config::kPassTokens * Config::kPitch;
      const float4 more = *reinterpret_cast<const float4*>(at(k, row) + part * kPartFloats);
      sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
    }
    return sum;
  }
  __device__ void store(int k, int row, const float (&from)[4]) const {
    *reinterpret_cast<float4*>(at(k, row)) = make_float4(from[0], from[1], from[2], from[3]);
  }
  __device__ void load(int k, int row, float (&to)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = at(k, row)[i];
  }
};

// The index of a piece, and in the last bit which of the two notes of work is its: one register. Two pieces
// apart a barrier, of finish(), finish_alone(), finish_hidden() or where a piece is passed by, lies between
// what is written there and what was read before.
class Piece {
 public:
  explicit __device__ Piece(int index) : bits_(2 * index) {}
  __device__ int index() const { return bits_ >> 1; }
  __device__ int turn() const { return bits_ & 1; }
  __device__ void advance(int step) { bits_ = (bits_ + 2 * step) ^ 1; }

 private:
  int bits_;
};

// Accumulators of the kPassTokens tokens from `first` on, as wgmma leaves them, to where they pass through
// shared memory: `to` is this warpgroup's first tile.
template <class Config, int kWidth>
__device__ __forceinline__ void put_sums(float (*to)[Config::kPassTokens][Config::kPitch], int first,
                                         const Accumulators<Config, kWidth>& acc) {
  constexpr int kGroups = Config::kPassTokens / 8;
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  // acc[t][4 j + 2 h + c] is row 16 warp + 8 h + lane / 4 of token 8 j + 2 (lane % 4) + c.
#pragma unroll
  for (int t = 0; t < Config::kOwnTiles; ++t) {
    float* own = &to[t][2 * (lane % 4)][warp * 16 + lane / 4];
#pragma unroll
    for (int j = 0; j < kWidth / 8; ++j) {
      if (j / kGroups * Config::kPassTokens != first) continue;
      float* at = own + j % kGroups * 8 * Config::kPitch;
      at[0] = acc[t][4 * j];
      at[Config::kPitch] = acc[t][4 * j + 1];
      at[8] = acc[t][4 * j + 2];
      at[Config::kPitch + 8] = acc[t][4 * j + 3];
    }
  }
}

// Hands the accumulators to the epilogue: through shared memory, where each thread finds what belongs
// together, and where the shares of K are added in their order. An item is four adjacent weight rows (or four
// of gate and the same of up) of a token; lanes take adjacent items.
template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ void finish(const Epilogue& epilogue, Piece piece, float2 weight_scale,
                                       GemmStorage<Config>& s, const Accumulators<Config, kWidth>& acc) {
  using Sums = ItemSums<Config, Epilogue::kItemRows>;
  const Place place = place_of<Config>(thread_index());
  const Work<Config>& work = s.work[place.group][piece.turn()];
  const int own_tile = place.part * Config::kRowTiles + place.group * Config::kOwnTiles;
  const int first_tile = Config::kMeet == 1 ? place.group : 0;  // of those that meet
  int first = 0, rows = 0;
  do {
    // Before: what was there has been read, and `work` has been written.
    sync_meeting<Config>(place.group);
    rows = uniform(work.tile.rows);
    put_sums<Config, kWidth>(&s.sums[own_tile], first, acc);
    sync_meeting<Config>(place.group);
    const Tile tile = work.tile;
    if constexpr (Config::kWide) {
      weight_scale = epilogue_of_item<Config>(epilogue, s).expert_scales(tile.expert);
    }
    // Whole warps go through the loop together. Beyond the tile's tokens, within a pass, there is something.
    const int tokens = min(rows - first, Config::kPassTokens);
    const int items =
        Sums::kTogether == 1 ? (tokens * Sums::kItems + 31) / 32 * 32 : (tokens + 7) / 8 * 8 * Sums::kItems;
#pragma unroll 1
    for (int i = thread_index() % Config::kMeetThreads; i < items;
         i += Sums::kTogether * Config::kMeetThreads) {
      const int token = i / Sums::kItems, t = first_tile + i % Sums::kItems / Sums::kTileItems;
      epilogue_of_item<Config>(epilogue, s)
          .run(tile, tile.weight_tile + t, first + token, i % Sums::kTileItems, &work.scales[first + token],
               weight_scale, Sums{s.sums[t][token]});
    }
    first += Config::kPassTokens;
    // A single pass is no loop: the accumulators are done with before the epilogue begins.
  } while (kWidth > Config::kPassTokens && first < rows);
}

// Instead, where no element needs another: each warpgroup's accumulators straight from its registers, while
// others still multiply. A warp writes whole sectors, 8 adjacent weight rows of four tokens at a
// time.
template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ void finish_alone(const Epilogue& epilogue, Piece piece, GemmStorage<Config>& s,
                                             const Accumulators<Config, kWidth>& acc) {
  const int thread = thread_index(), lane = thread % 32, warp = thread / 32 % 4;
  const Place place = place_of<Config>(thread);
  sync_group<Config>(place.group);  // the tile has been written
  const Work<Config>& work = s.work[place.group][piece.turn()];
  const Tile tile = work.tile;
  const int first = (tile.weight_tile + place.group * Config::kOwnTiles) * kTileRows + warp * 16 + lane / 4;
  const int first_token = 2 * (lane % 4);
  epilogue_of_item<Config>(epilogue, s).run_all(tile, first, first_token, &work.scales[first_token], acc);
}

// Instead, where Epilogue::from_registers() says so: h without that way (register_epilogue.cuh). False, of
// all threads that meet: the tile is left to finish().
template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ bool finish_hidden(const Epilogue& parameter, Piece piece, GemmStorage<Config>& s,
                                              const Accumulators<Config, kWidth>& acc);

template <class Config, class Epilogue>
__device__ __forceinline__ void consume(const GemmParams& p, const Epilogue& epilogue,
                                        const TileWalk<Config>& walk, GemmStorage<Config>& s) {
  constexpr int kThreads = 128 * Config::kSplit;  // that have the same weight rows
  StageRing ring;
  Piece piece(walk.first());
  for_widths<Config>([&]<int kIndex>() __attribute__((always_inline)) {
    constexpr int kWidth = Config::kTileWidths.width(kIndex);
    for (; piece.index() < walk.end(kIndex); piece.advance(walk.step())) {
      const Consumer<Config> consumer(s);
      Work<Config>& work = s.work[consumer.place.group][piece.turn()];
      const Tile tile = uniform_tile(walk, piece.index());
      const int thread = thread_index() % kThreads;
      if (thread == 0) work.tile = tile;
      for (int token = thread; token < tile.rows; token += kThreads) {
        work.scales[token] = epilogue.token_scales(tile.first_row + token);
      }
      // Loaded early; but where registers are scarcest, tiles are so large that late will do.
      [[maybe_unused]] float2 weight_scale = {};
      if constexpr (!Config::kWide) weight_scale = epilogue.expert_scales(tile.expert);
      const int chunks = static_cast<int>(chunks_of(Config::kType, p.cols));
      if (Config::kMeet == 1 && consumer.place.group >= tile.weight_tiles) {
        pass_by<Config>(chunks, s, ring);
        sync_meeting<Config>(consumer.place.group);
        if constexpr (Config::kInStep) sync_consumers<Config>();
        continue;
      }
      Accumulators<Config, kWidth> acc;
      consumer.template multiply<kWidth>(chunks, s, ring, acc);
      if constexpr (Config::kInStep) sync_consumers<Config>();
      if constexpr (Config::kWide && Epilogue::kByElement) {
        finish_alone<Config, kWidth>(epilogue, piece, s, acc);
      } else if constexpr (Config::kWide && Epilogue::kGated) {
        const bool from_registers = epilogue_of_item<Config>(epilogue, s).template from_registers<Config>();
        if (!from_registers || !finish_hidden<Config, kWidth>(epilogue, piece, s, acc)) {
          finish<Config, kWidth>(epilogue, piece, weight_scale, s, acc);
          if (from_registers) sync_meeting<Config>(consumer.place.group);  // before other things lie there
        }
      } else {
        finish<Config, kWidth>(epilogue, piece, weight_scale, s, acc);
      }
    }
  });
}

// ---- Kernel

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Set-up.
  // NOTE: no rounding up of the address: that would hide from the compiler that this is shared memory.
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& s = *reinterpret_cast<GemmStorage<Config>*>(shared);
  if (threadIdx.x == Config::kConsumerThreads) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&s.full[stage], kProducerWarps);  // and the bytes that the first one announces
      ptx::mbarrier_init(&s.empty[stage], arrivals_of<Config>(4 * Config::kConsumers));
    }
    ptx::mbarrier_init_fence();
  }
  if constexpr (Config::kFp8) {
    if (threadIdx.x < kFoldEntries) s.folds[threadIdx.x][0] = fold_entry(static_cast<int>(threadIdx.x));
    __syncthreads();
    for (int i = static_cast<int>(threadIdx.x); i < kFoldEntries * kFoldCopies; i += Config::kThreads) {
      const int copy = i % kFoldCopies;
      if (copy > 0) s.folds[i / kFoldCopies][copy] = s.folds[i / kFoldCopies][0];
    }
  }
  static_assert(sizeof(Epilogue) <= sizeof(s.epilogue) && std::is_trivially_copyable_v<Epilogue>);
  if (Config::kWide && threadIdx.x == 0) *reinterpret_cast<Epilogue*>(s.epilogue) = epilogue;
  if (!p.offsets_settled) cuda::await_previous_kernel();
  order_experts<Config>(p, s);
  sync_cluster<Config>();
  const TileWalk<Config> walk(p, s);

  // Roles.
  if (threadIdx.x < Config::kConsumerThreads) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegs));
    cuda::await_previous_kernel();
    consume<Config>(p, epilogue, walk, s);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kProducerRegs));
    produce<Config>(p, walk, s, uniform(static_cast<int>(threadIdx.x - Config::kConsumerThreads) / 32));
  }
  // Until nobody writes to this CTA's shared memory any more.
  if constexpr (Config::kCluster > 1) sync_cluster<Config>();
#else
  __trap();
#endif
}

}  // namespace megamoe::sm90
