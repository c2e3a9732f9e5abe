// grouped_gemm.cuh: acc[expert rows of W, tokens] = W[e] * X[rows of e]^T for every expert e, and an epilogue
// on it.
//
// The weights are the first operand: decoded from 4 bits to BF16 straight into the registers of wgmma,
// products exact. Tokens, in BF16 and in expert order, are the second operand, in shared memory; so a tile
// may have any multiple of 8 tokens, and weights stream. One persistent CTA per SM: a producer warp fills a
// ring of stages by the copy engine, consumer warpgroups multiply 64 weight rows each.
//
//   Config    tile sizes, stages, threads
//   Params    pointers and sizes
//   Storage   shared memory
//   Helpers   tile walk, producer, consumer
//   Kernel    set-up and roles
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/launch.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/decode.cuh"
#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

// ---- Config

// The width is the kernel's, not the tile's: with several to choose from inside it, the compiler no longer
// knows that a warp's lanes go the same way.
template <int kTokens_, int kRowGroups_, int kSplit_>
struct GemmConfig {
  static constexpr int kTokens = kTokens_;        // of a tile: wgmma's N
  static constexpr int kRowGroups = kRowGroups_;  // warpgroups side by side along the weight rows, 64 each
  static constexpr int kSplit = kSplit_;          // warpgroups that share the K of those rows, chunk by chunk
  // Three or four warpgroups multiply: while some wait for the tensor cores the others decode. The four keep
  // in step, for with few stages one that is ahead starves the others; the three need not, and one does its
  // epilogue while the others multiply.
  static constexpr int kConsumers = kRowGroups * kSplit;
  static constexpr bool kInStep = kConsumers == 4;
  static constexpr int kConsumerThreads = 128 * kConsumers;
  static constexpr int kThreads = kConsumerThreads + 128;  // the producer's warpgroup is the last
  static constexpr int kTokenTileBytes = kTokens * kChunkCols * 2;
  // Chunks of K in a stage: with few tokens more, so that waiting for a stage is worth it.
  static constexpr int kStageChunks = kSplit > 1 ? 2 * kSplit : kTokens <= 32 ? 4 : kTokens <= 64 ? 2 : 1;
  // Tokens whose accumulators are in shared memory together on their way to the epilogue; in one go where the
  // registers that hold them are wanted there.
  static constexpr int kPassTokens = kTokens <= 64 ? kTokens : 48;
  // Floats of a token there: 64 rows, and what keeps banks apart.
  static constexpr int kPitch = kTileRows + 4;
  // Stages: as many as shared memory holds beside the sums and 16 KiB for the rest.
  static constexpr int kStageBytes = kStageChunks * (kTokenTileBytes + kRowGroups * kChunkBytes);
  static constexpr int kSumBytes = kConsumers * kPassTokens * kPitch * 4;
  static constexpr int kMostStages = ((227 - 16) * 1024 - kSumBytes) / kStageBytes;
  static constexpr int kStages = kMostStages < 8 ? kMostStages : 8;
  // Registers: 64K over all threads, and setmaxnreg moves them from the producer to the consumers.
  static constexpr int kProducerRegs = 32;
  static constexpr int kConsumerRegs = kConsumers == 3 ? 160 : 112;
  // What the launch allocates: the bound's registers, in steps of 8, for every thread.
  static constexpr int kLaunchRegs = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegs + kConsumers * kConsumerRegs <= (1 + kConsumers) * kLaunchRegs,
                "more registers than the CTA owns: setmaxnreg would wait for ever");
  static_assert(kTokens % 8 == 0 && kTokens <= 256 && kStages >= 3);
  static_assert(kSplit == 1 || kRowGroups == 1, "either rows or K are shared among warpgroups");
};

// ---- Params

struct GemmParams {
  const std::uint8_t* weights;  // [experts][tiles][chunks][kChunkBytes]
  int tiles;                    // of 64 weight rows, per expert
  int cols;                     // K, a multiple of 16
  int experts;
  const std::int64_t* offsets;  // [experts + 1]
  CUtensorMap tokens;           // BF16 [rows, cols] in boxes of 64 columns by a tile's tokens
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
  alignas(128) std::uint8_t weights[Config::kStages][Config::kRowGroups][Config::kStageChunks][kChunkBytes];
  alignas(16) float sums[Config::kConsumers][Config::kPassTokens][Config::kPitch];  // accumulators in passing
  TokenScales scales[Config::kRowGroups][2][Config::kTokens];  // of this tile and of the last
  std::uint64_t full[Config::kStages];
  std::uint64_t empty[Config::kStages];
  std::int32_t first_tile[kMaxExperts + 1];  // token tiles of the experts before e
  std::int32_t first_row[kMaxExperts + 1];   // offsets
};

// ---- Helpers

// value cut to [0, limit].
__device__ inline int clamp_to(int value, int limit) { return value < 0 ? 0 : value < limit ? value : limit; }

// One piece of work: kRowGroups tiles of weights and up to kTokens rows of one expert.
struct Tile {
  int expert;
  int rows;         // valid rows, at most kTokens
  int first_row;    // of the routed rows
  int weight_tile;  // first of kRowGroups tiles
};

template <class Config>
class TileWalk {
 public:
  __device__ TileWalk(const GemmParams& p, const GemmStorage<Config>& s)
      : s_(s), experts_(p.experts), row_tiles_((p.tiles + Config::kRowGroups - 1) / Config::kRowGroups) {}

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
    return {low, clamp_to(rows - first, share), begin + first, within / token_tiles * Config::kRowGroups};
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
  return {uniform(tile.expert), uniform(tile.rows), uniform(tile.first_row), uniform(tile.weight_tile)};
}

// The producer, a warp: starts the copies of each stage as soon as it is free. Chunks of weights along K are
// adjacent in memory and in the stage. A box of tokens is always whole: rows beyond the tile's are other
// experts' or zero, and what comes of them is not used; columns beyond K are zero. NOTE: all lanes stay
// together and one of them is elected for the copies, whose operands are warp-wide registers: a branch to a
// single thread would have the compiler fill those one lane at a time.
template <class Config>
__device__ void produce(const GemmParams& p, const TileWalk<Config>& walk, GemmStorage<Config>& s) {
  const int chunks = static_cast<int>(chunks_of(p.cols)), count = uniform(walk.count());
  const std::int64_t stride = static_cast<std::int64_t>(chunks) * kChunkBytes;  // from tile to tile
  StageRing ring;
  for (int index = blockIdx.x; index < count; index += gridDim.x) {
    const Tile tile = uniform_tile(walk, index);
    const int groups = clamp_to(p.tiles - tile.weight_tile, Config::kRowGroups);
    const std::uint8_t* from = p.weights + (tile.expert * p.tiles + tile.weight_tile) * stride;
    for (int chunk = 0; chunk < chunks; chunk += Config::kStageChunks) {
      const int present = Config::kStageChunks == 1 ? 1 : clamp_to(chunks - chunk, Config::kStageChunks);
      const int bytes = present * kChunkBytes;
      ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
      if (ptx::elect_one()) {
        std::uint64_t* full = &s.full[ring.index];
        ptx::mbarrier_arrive_expect(full, groups * bytes + present * Config::kTokenTileBytes);
#pragma unroll
        for (int group = 0; group < Config::kRowGroups; ++group) {
          if (group < groups)
            ptx::bulk_copy(s.weights[ring.index][group], from + group * stride, bytes, full);
        }
#pragma unroll
        for (int part = 0; part < Config::kStageChunks; ++part) {
          if (part < present)
            ptx::tensor_copy(s.tokens[ring.index][part], &p.tokens, (chunk + part) * kChunkCols,
                             tile.first_row, full);
        }
      }
      __syncwarp();
      from += Config::kStageChunks * kChunkBytes;
      ring.advance<Config::kStages>();
    }
  }
}

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
  for (int i = 0; i < 4; ++i) ptx::wgmma<kN>(acc, from.a[i], b + i * 32);  // 16 columns are 32 bytes
  ptx::wgmma_commit();
}

// A consumer warpgroup: its place, and the stages it reads.
template <class Config>
struct Consumer {
  int group;                    // of the weight rows
  int part;                     // of K
  std::uint32_t codes, scales;  // this thread's shared-memory addresses in stage 0
  ptx::Descriptor tokens;       // of stage 0
  StageRing ring;

  __device__ Consumer(GemmStorage<Config>& s) {
    const int index = uniform(static_cast<int>(threadIdx.x) / 128);
    group = index % Config::kRowGroups, part = index / Config::kRowGroups;
    const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
    const std::uint32_t weights = ptx::shared_address(s.weights[0][group][part]);
    codes = weights + (warp * 32 + lane) * 16;
    scales = weights + kChunkCodeBytes + (warp * 8 + lane / 4) * 8;
    tokens = ptx::Descriptor::swizzled(s.tokens[0][part]);
  }

  // acc = this warpgroup's 64 weight rows times the tile's tokens over its share of K. A chunk is decoded
  // while the tensor cores work on the one before, so that two sets of operands take turns; a stage is given
  // back once the first products of the next one are under way. A warpgroup beyond the last weight row
  // multiplies what it finds: nobody uses it.
  __device__ __forceinline__ void multiply(int chunks, GemmStorage<Config>& s,
                                           float (&acc)[Config::kTokens / 2]) {
    constexpr int kOwn = Config::kStageChunks / Config::kSplit;  // of a stage's chunks
    constexpr int kUnroll = kOwn % 2 == 0 ? kOwn : 2 * kOwn;
#pragma unroll
    for (int i = 0; i < Config::kTokens / 2; ++i) acc[i] = 0.0f;
    ptx::wgmma_pin(acc);
    Operands operands[2];
    int held = -1, left = (chunks - part + Config::kSplit - 1) / Config::kSplit;
    if (left > 0) {
      // NOTE: left in the middle, never by falling through: the compiler must see which operands are in
      // flight.
    again:
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (u % kOwn == 0) ptx::mbarrier_wait(&s.full[ring.index], ring.parity);
        const int at = u % kOwn * Config::kSplit;
        const std::uint32_t offset =
            ring.index * (Config::kRowGroups * Config::kStageChunks * kChunkBytes) + at * kChunkBytes;
        const ChunkWords words{ptx::load_shared16(codes + offset), ptx::load_shared8(scales + offset)};
        decode_chunk(words, operands[u % 2]);
        start_chunk<Config::kTokens>(operands[u % 2],
                                     tokens + (ring.index * (Config::kStageChunks * Config::kTokenTileBytes) +
                                               at * Config::kTokenTileBytes),
                                     acc);
        ptx::wgmma_wait<1>();
        if (u % kOwn == 0) {
          if (held >= 0) warp_arrive(&s.empty[held]);
          held = ring.index;
        }
        if (u % kOwn == kOwn - 1) ring.template advance<Config::kStages>();
        if (--left <= 0) goto done;
      }
      goto again;
    }
  done:
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc);
    if (held >= 0) warp_arrive(&s.empty[held]);
    // A last stage that is cut short is left early, or not even entered.
    if (held == ring.index) {
      ring.template advance<Config::kStages>();
    } else if (Config::kSplit > 1 && part > 0 && (chunks - 1) % Config::kStageChunks < part) {
      ptx::mbarrier_wait(&s.full[ring.index], ring.parity);
      warp_arrive(&s.empty[ring.index]);
      ring.template advance<Config::kStages>();
    }
  }
};

// Waits for the warpgroups that make one row group's results: this one, or all that share its K.
template <class Config>
__device__ void sync_row_group(int group) {
  asm volatile("bar.sync %0, %1;" ::"r"(2 + group), "n"(128 * Config::kSplit) : "memory");
}
template <class Config>
__device__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(Config::kConsumerThreads) : "memory");
}

// Hands the accumulators to the epilogue: through shared memory, where each thread finds what belongs
// together, and where the shares of K are added in their order. An item is four adjacent weight rows (or four
// of gate and the same of up) of one token; lanes take adjacent items.
template <class Config, class Epilogue>
__device__ __forceinline__ void finish(const Consumer<Config>& consumer, const Epilogue& epilogue,
                                       const Tile& tile, const TokenScales* scales, GemmStorage<Config>& s,
                                       const float (&acc)[Config::kTokens / 2]) {
  constexpr int kItems = kTileRows / Epilogue::kItemRows, kGroups = Config::kPassTokens / 8;
  const int group = consumer.group, lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  float* own = &s.sums[consumer.part * Config::kRowGroups + group][2 * (lane % 4)][warp * 16 + lane / 4];
  // A single pass is no loop: the accumulators are done with before the epilogue begins.
  const int end = Config::kTokens == Config::kPassTokens ? 1 : tile.rows;
  for (int first = 0; first < end; first += Config::kPassTokens) {
    // Before: what was there has been read.
    sync_row_group<Config>(group);
    // acc[4 j + 2 h + c] is row 16 warp + 8 h + lane / 4 of token 8 j + 2 (lane % 4) + c.
#pragma unroll
    for (int j = 0; j < Config::kTokens / 8; ++j) {
      if (j / kGroups * Config::kPassTokens != first) continue;
      float* to = own + j % kGroups * 8 * Config::kPitch;
      to[0] = acc[4 * j];
      to[Config::kPitch] = acc[4 * j + 1];
      to[8] = acc[4 * j + 2];
      to[Config::kPitch + 8] = acc[4 * j + 3];
    }
    sync_row_group<Config>(group);
    // Whole warps go through the loop together.
    const int tokens = min((tile.rows - first + 7) / 8 * 8, Config::kPassTokens);
#pragma unroll 1
    for (int i = static_cast<int>(threadIdx.x) % (128 * Config::kSplit); i < tokens * kItems;
         i += 128 * Config::kSplit) {
      const int token = i / kItems;
      const auto sum_of = [&](int row) {
        float4 sum = *reinterpret_cast<const float4*>(&s.sums[group][token][row]);
#pragma unroll
        for (int part = 1; part < Config::kSplit; ++part) {
          const float4 more =
              *reinterpret_cast<const float4*>(&s.sums[part * Config::kRowGroups + group][token][row]);
          sum = make_float4(sum.x + more.x, sum.y + more.y, sum.z + more.z, sum.w + more.w);
        }
        return sum;
      };
      epilogue.run(tile, tile.weight_tile + group, first + token, i % kItems, scales[first + token], sum_of);
    }
  }
}

template <class Config, class Epilogue>
__device__ void consume(const GemmParams& p, const Epilogue& epilogue, const TileWalk<Config>& walk,
                        GemmStorage<Config>& s) {
  const int chunks = static_cast<int>(chunks_of(p.cols));
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
    float acc[Config::kTokens / 2];
    consumer.multiply(chunks, s, acc);
    if constexpr (Config::kInStep) sync_consumers<Config>();
    if (tile.weight_tile + consumer.group < p.tiles) finish<Config>(consumer, epilogue, tile, scales, s, acc);
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
