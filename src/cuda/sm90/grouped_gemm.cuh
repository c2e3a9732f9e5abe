// grouped_gemm.cuh: acc[expert rows of W, tokens] = W[e] * X[rows of e]^T for every expert e, and an epilogue
// on it.
//
// The weights are the first operand: decoded from 4 bits straight into the registers of wgmma. Tokens, in
// BF16 or E4M3 and in expert order, are the second operand, in shared memory; so a tile may have any multiple
// of 8 tokens, and weights stream. One persistent CTA per SM: a producer warp fills a ring of stages by the
// copy engine, consumer warpgroups decode and multiply (multiply_bf16.cuh, multiply_fp8.cuh).
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

#include "cuda/launch.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90/decode.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

// ---- Config

// The width is the kernel's, not the tile's: with several to choose from inside it, the compiler no longer
// knows that a warp's lanes go the same way.
template <OperandType kType_, int kTokens_, int kRowTiles_, int kSplit_>
struct GemmConfig {
  static constexpr OperandType kType = kType_;
  static constexpr bool kFp8 = kType == OperandType::kFp8;
  static constexpr int kTokens = kTokens_;      // of a tile: wgmma's N
  static constexpr int kRowTiles = kRowTiles_;  // of 64 weight rows
  static constexpr int kSplit = kSplit_;        // warpgroups that share the K of those rows, chunk by chunk
  // Weight tiles of a warpgroup: two where it adds up E4M3 products of many tokens, whose sums of 128 columns
  // need registers of their own.
  static constexpr int kOwnTiles = kFp8 && kTokens > narrow_tile(kType) ? 2 : 1;
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
  static constexpr int kPassTokens = kTokens <= narrow_tile(kType) ? kTokens : kFp8 ? 32 : 48;
  // Weight tiles whose results meet in an epilogue: for FP8, where h has a scale for each 128 columns, all.
  static constexpr int kMeet = kFp8 ? kRowTiles : 1;
  static constexpr int kMeetThreads = kFp8 ? 128 * kConsumers : 128 * kSplit;
  // Floats of a token there: 64 rows, and what keeps banks apart.
  static constexpr int kPitch = kTileRows + 4;
  // Stages: as many as shared memory holds beside the sums and 16 KiB for the rest.
  static constexpr int kStageBytes =
      kStageChunks * (kTokenTileBytes + kTokenScaleBytes + kRowTiles * kChunkBytes);
  static constexpr int kSumBytes = kRowTiles * kSplit * kPassTokens * kPitch * 4;
  static constexpr int kFoldBytes = kFp8 ? kFoldEntries * kFoldCopies * 8 : 0;
  static constexpr int kMostStages = ((227 - 16) * 1024 - kSumBytes - kFoldBytes) / kStageBytes;
  static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
  // Registers: 64K over all threads, and setmaxnreg moves them from the producer to the consumers.
  static constexpr int kProducerRegs = kConsumers == 2 ? 24 : 32;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 240 : kConsumers == 3 ? 160 : 112;
  // What the launch allocates: the bound's registers, in steps of 8, for every thread.
  static constexpr int kLaunchRegs = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegs + kConsumers * kConsumerRegs <= (1 + kConsumers) * kLaunchRegs,
                "more registers than the CTA owns: setmaxnreg would wait for ever");
  static_assert(kTokens % 8 == 0 && kTokens <= 256 && kStages >= 3);
  static_assert(kSplit == 1 || kRowTiles == 1, "either rows or K are shared among warpgroups");
};

// ---- Params

struct GemmParams {
  const std::uint8_t* weights;  // [experts][tiles][chunks][chunk_bytes()]
  int tiles;                    // of 64 weight rows, per expert
  int cols;                     // K, a multiple of 16
  int experts;
  const std::int64_t* offsets;  // [experts + 1]
  CUtensorMap tokens;           // [rows, cols] in boxes of a chunk's columns by a tile's tokens
  CUtensorMap token_scales;     // FP8: as fp8_rows.h says, in boxes of a tile's tokens
};

// ---- Storage

inline constexpr int kMaxExperts = 1024;

// What the epilogue multiplies a token's results by, read while the tensor cores are busy.
struct TokenScales {
  float in;   // tensor scale of the token
  float out;  // tensor scale of the row of h, where h becomes NVFP4
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
  TokenScales scales[Config::kRowGroups][2][Config::kTokens];  // of this tile and of the last
  std::uint64_t full[Config::kStages];
  std::uint64_t empty[Config::kStages];
  std::int32_t first_tile[kMaxExperts + 1];  // token tiles of the experts before e
  std::int32_t first_row[kMaxExperts + 1];   // offsets
};

// ---- Helpers

// value cut to [0, limit].
__device__ inline int clamp_to(int value, int limit) { return value < 0 ? 0 : value < limit ? value : limit; }

// One piece of work: kRowTiles tiles of weights and up to kTokens rows of one expert.
struct Tile {
  int expert;
  int rows;         // valid rows, at most kTokens
  int first_row;    // of the routed rows
  int scale_place;  // of that row's scales of FP8
  int weight_tile;  // first of kRowTiles tiles
};

template <class Config>
class TileWalk {
 public:
  __device__ TileWalk(const GemmParams& p, const GemmStorage<Config>& s)
      : s_(s), experts_(p.experts), row_tiles_((p.tiles + Config::kRowTiles - 1) / Config::kRowTiles) {}

  __device__ int count() const { return s_.first_tile[experts_] * row_tiles_; }

  // Experts are outermost, then weight rows, then tokens: CTAs that run together share weights through the
  // L2.
  __device__ Tile at(int index) const {
    int low = 0, high = experts_;  // the last expert whose first piece is not beyond index
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s_.first_tile[middle] * row_tiles_ <= index ? low : high) = middle;
    }
    const int within = index - s_.first_tile[low] * row_tiles_;
    const int token_tiles = s_.first_tile[low + 1] - s_.first_tile[low];
    const int begin = s_.first_row[low], rows = s_.first_row[low + 1] - begin;
    // Equal shares, so that the last tile is not a sliver.
    const int share = ((rows + token_tiles - 1) / token_tiles + 7) / 8 * 8;
    const int first = within % token_tiles * share;
    return {low, clamp_to(rows - first, share), begin + first,
            static_cast<int>(fp8_scale_place(begin, low)) + first, within / token_tiles * Config::kRowTiles};
  }

 private:
  const GemmStorage<Config>& s_;
  int experts_;
  int row_tiles_;
};

// Copies the offsets and sums the experts' token tiles. The whole CTA calls it.
template <class Config>
__device__ void sum_token_tiles(const GemmParams& p, GemmStorage<Config>& s) {
  for (int e = static_cast<int>(threadIdx.x); e < p.experts; e += Config::kThreads) {
    const auto begin = static_cast<std::int32_t>(p.offsets[e]),
               end = static_cast<std::int32_t>(p.offsets[e + 1]);
    s.first_row[e] = begin;
    if (e == p.experts - 1) s.first_row[e + 1] = end;
    s.first_tile[e] = (end - begin + Config::kTokens - 1) / Config::kTokens;
  }
  __syncthreads();
  if (threadIdx.x >= 32) return;
  std::int32_t total = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const int e = base + static_cast<int>(threadIdx.x);
    const std::int32_t tiles = e < p.experts ? s.first_tile[e] : 0;
    std::int32_t sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t before = __shfl_up_sync(~0u, sum, step);
      if (static_cast<int>(threadIdx.x) >= step) sum += before;
    }
    if (e < p.experts) s.first_tile[e] = total + sum - tiles;
    total += __shfl_sync(~0u, sum, 31);
  }
  if (threadIdx.x == 0) s.first_tile[p.experts] = total;
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

// A consumer warpgroup: its place, and the stages it reads. Its multiply(chunks, storage, acc) makes the
// accumulators of one tile.
template <class Config>
struct Consumer;

// One arrival for a warp, after all its lanes got here.
__device__ inline void warp_arrive(std::uint64_t* barrier) {
  __syncwarp();
  if (threadIdx.x % 32 == 0) ptx::mbarrier_arrive(barrier);
}

// Of all lanes the same, and the compiler told so: loops over it need no masks, addresses no vector
// registers.
__device__ inline int uniform(int value) { return __shfl_sync(~0u, value, 0); }

// walk.at(index), uniform.
template <class Config>
__device__ Tile uniform_tile(const TileWalk<Config>& walk, int index) {
  const Tile tile = walk.at(index);
  return {uniform(tile.expert), uniform(tile.rows), uniform(tile.first_row), uniform(tile.scale_place),
          uniform(tile.weight_tile)};
}

// The producer, a warp: starts the copies of each stage as soon as it is free. Chunks of weights along K are
// adjacent in memory and in the stage. A box of tokens is always whole: rows beyond the tile's are other
// experts' or zero, and what comes of them is not used; columns beyond K are zero. NOTE: all lanes stay
// together and one of them is elected for the copies, whose operands are warp-wide registers: a branch to a
// single thread would have the compiler fill those one lane at a time.
template <class Config>
__device__ void produce(const GemmParams& p, const TileWalk<Config>& walk, GemmStorage<Config>& s) {
  constexpr int kBytes = Config::kChunkBytes;
  const int chunks = static_cast<int>(chunks_of(Config::kType, p.cols)), count = uniform(walk.count());
  const std::int64_t stride = static_cast<std::int64_t>(chunks) * kBytes;  // from tile to tile
  StageRing ring;
  for (int index = blockIdx.x; index < count; index += gridDim.x) {
    const Tile tile = uniform_tile(walk, index);
    const int tiles = clamp_to(p.tiles - tile.weight_tile, Config::kRowTiles);
    const std::uint8_t* from = p.weights + (tile.expert * p.tiles + tile.weight_tile) * stride;
    for (int chunk = 0; chunk < chunks; chunk += Config::kStageChunks) {
      const int present = Config::kStageChunks == 1 ? 1 : clamp_to(chunks - chunk, Config::kStageChunks);
      const int bytes = present * kBytes;
      ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
      if (ptx::elect_one()) {
        std::uint64_t* full = &s.full[ring.index];
        ptx::mbarrier_arrive_expect(full, tiles * bytes + present * Config::kTokenTileBytes +
                                              (Config::kFp8 ? Config::kTokens * 4 : 0));
#pragma unroll
        for (int t = 0; t < Config::kRowTiles; ++t) {
          if (t < tiles) ptx::bulk_copy(s.weights[ring.index][t], from + t * stride, bytes, full);
        }
#pragma unroll
        for (int part = 0; part < Config::kStageChunks; ++part) {
          if (part < present)
            ptx::tensor_copy(s.tokens[ring.index][part], &p.tokens, (chunk + part) * Config::kChunkCols,
                             tile.first_row, full);
        }
        if constexpr (Config::kFp8)
          ptx::tensor_copy(s.token_scales[ring.index], &p.token_scales, tile.scale_place, chunk, full);
      }
      __syncwarp();
      from += Config::kStageChunks * kBytes;
      ring.advance<Config::kStages>();
    }
  }
}

// Waits for the warpgroups whose results meet in the epilogue of row group `group`.
template <class Config>
__device__ void sync_meeting(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + (Config::kFp8 ? 0 : group)), "n"(Config::kMeetThreads)
               : "memory");
}
template <class Config>
__device__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(Config::kConsumerThreads) : "memory");
}

// A warpgroup's accumulators: of its weight tiles, as wgmma leaves them.
template <class Config>
using Accumulators = float[Config::kOwnTiles][Config::kTokens / 2];

// Hands the accumulators to the epilogue: through shared memory, where each thread finds what belongs
// together, and where the shares of K are added in their order. An item is four adjacent weight rows (or four
// of gate and the same of up) of one token; lanes take adjacent items.
template <class Config, class Epilogue>
__device__ __forceinline__ void finish(const Consumer<Config>& consumer, const Epilogue& epilogue,
                                       const Tile& tile, const TokenScales* scales, float2 weight_scale,
                                       GemmStorage<Config>& s, const Accumulators<Config>& acc) {
  constexpr int kTileItems = kTileRows / Epilogue::kItemRows, kItems = Config::kMeet * kTileItems;
  constexpr int kGroups = Config::kPassTokens / 8;
  const int group = consumer.group, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  const int own_tile = consumer.part * Config::kRowTiles + group * Config::kOwnTiles;
  const int first_tile = Config::kMeet == 1 ? group : 0;  // of those that meet
  // A single pass is no loop: the accumulators are done with before the epilogue begins.
  const int end = Config::kTokens == Config::kPassTokens ? 1 : tile.rows;
  for (int first = 0; first < end; first += Config::kPassTokens) {
    // Before: what was there has been read.
    sync_meeting<Config>(group);
    // acc[t][4 j + 2 h + c] is row 16 warp + 8 h + lane / 4 of token 8 j + 2 (lane % 4) + c.
#pragma unroll
    for (int t = 0; t < Config::kOwnTiles; ++t) {
      float* own = &s.sums[own_tile + t][2 * (lane % 4)][warp * 16 + lane / 4];
#pragma unroll
      for (int j = 0; j < Config::kTokens / 8; ++j) {
        if (j / kGroups * Config::kPassTokens != first) continue;
        float* to = own + j % kGroups * 8 * Config::kPitch;
        to[0] = acc[t][4 * j];
        to[Config::kPitch] = acc[t][4 * j + 1];
        to[8] = acc[t][4 * j + 2];
        to[Config::kPitch + 8] = acc[t][4 * j + 3];
      }
    }
    sync_meeting<Config>(group);
    // Whole warps go through the loop together.
    const int tokens = min((tile.rows - first + 7) / 8 * 8, Config::kPassTokens);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % Config::kMeetThreads; i < tokens * kItems;
         i += Config::kMeetThreads) {
      const int token = i / kItems, t = first_tile + i % kItems / kTileItems;
      const auto sum_of = [&](int row) {
        float4 sum = *reinterpret_cast<const float4*>(&s.sums[t][token][row]);
#pragma unroll
        for (int part = 1; part < Config::kSplit; ++part) {
          const float4 more =
              *reinterpret_cast<const float4*>(&s.sums[part * Config::kRowTiles + t][token][row]);
          sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        return sum;
      };
      epilogue.run(tile, tile.weight_tile + t, first + token, i % kTileItems, scales[first + token],
                   weight_scale, sum_of);
    }
  }
}

template <class Config, class Epilogue>
__device__ void consume(const GemmParams& p, const Epilogue& epilogue, const TileWalk<Config>& walk,
                        GemmStorage<Config>& s) {
  const int chunks = static_cast<int>(chunks_of(Config::kType, p.cols));
  Consumer<Config> consumer(s);
  int buffer = 0;
  for (int index = blockIdx.x; index < walk.count(); index += gridDim.x, buffer ^= 1) {
    const Tile tile = uniform_tile(walk, index);
    // Two tiles apart a barrier of finish() lies between this write and the reads before it.
    TokenScales* scales = s.scales[consumer.group][buffer];
    for (int token = static_cast<int>(threadIdx.x) % (128 * Config::kSplit); token < tile.rows;
         token += 128 * Config::kSplit) {
      scales[token] = epilogue.token_scales(tile.first_row + token);
    }
    const float2 weight_scale = epilogue.expert_scales(tile.expert);
    Accumulators<Config> acc;
    consumer.multiply(chunks, s, acc);
    if constexpr (Config::kInStep) sync_consumers<Config>();
    if (Config::kMeet > 1 || tile.weight_tile + consumer.group < p.tiles)
      finish<Config>(consumer, epilogue, tile, scales, weight_scale, s, acc);
  }
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
      ptx::mbarrier_init(&s.full[stage], 1);  // the producer, and the bytes it announces
      ptx::mbarrier_init(&s.empty[stage], 4 * Config::kConsumers);
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
  cuda::await_previous_kernel();
  sum_token_tiles<Config>(p, s);
  __syncthreads();
  const TileWalk<Config> walk(p, s);

  // Roles.
  if (threadIdx.x < Config::kConsumerThreads) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegs));
    consume<Config>(p, epilogue, walk, s);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kProducerRegs));
    if (threadIdx.x < Config::kConsumerThreads + 32) produce<Config>(p, walk, s);
  }
#else
  __trap();
#endif
}

}  // namespace megamoe::sm90
