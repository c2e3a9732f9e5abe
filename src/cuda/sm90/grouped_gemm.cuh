// grouped_gemm.cuh: acc[expert rows of W, tokens] = W[e] * X[rows of e]^T for every expert e, and an epilogue
// on it.
//
// The weights are the first operand: decoded from 4 bits to BF16 straight into the registers of wgmma,
// products exact. Tokens are the second operand, in shared memory; so the token tile may be as small as 8 and
// weights stream. One persistent CTA per SM: a producer warpgroup fills a ring of stages, consumer warpgroups
// multiply.
//
//   Config    tile sizes, stages, threads
//   Params    pointers and sizes
//   Storage   shared memory
//   Helpers   tile walk, producer, consumer
//   Kernel    set-up and roles
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/ptx/copy.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/wgmma.h"
#include "cuda/sm90/decode.cuh"
#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

// ---- Config

enum class TokenFormat { kBf16, kNvfp4 };

template <TokenFormat kFormat_, int kTokens_, int kRowGroups_, int kSplit_, int kStages_>
struct GemmConfig {
  static constexpr TokenFormat kFormat = kFormat_;
  static constexpr int kTokens = kTokens_;        // tokens of a tile: wgmma's N
  static constexpr int kRowGroups = kRowGroups_;  // warpgroups side by side along the weight rows, 128 each
  static constexpr int kSplit = kSplit_;          // warpgroups that share a tile's K, chunk by chunk
  static constexpr int kStages = kStages_;
  static constexpr int kConsumers = kRowGroups * kSplit;
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kAcc = kTokens / 2;  // accumulators of a thread for one of its two fragments
  static constexpr int kTokenTileBytes = kTokens * kChunkCols * 2;
  // Registers: 64K over all threads, and setmaxnreg moves them from the producer to the consumers.
  static constexpr int kProducerRegs = kConsumers == 2 ? 88 : 64;
  static constexpr int kConsumerRegs = kConsumers == 2 ? 208 : 104;
  // What the launch allocates: the bound's registers, in steps of 8, for every thread.
  static constexpr int kLaunchRegs = 65536 / kThreads / 8 * 8;
  static_assert(kProducerRegs + kConsumers * kConsumerRegs <= (1 + kConsumers) * kLaunchRegs,
                "more registers than the CTA owns: setmaxnreg would wait for ever");
  static_assert(kTokens % 8 == 0 && kTokens <= 128, "accumulators of two fragments must fit the registers");
  static_assert(kSplit == 1 || kRowGroups == 1, "either rows or K are shared among warpgroups");
};

// ---- Params

struct GemmParams {
  const std::uint8_t* weights;  // [experts][tiles][chunks][kChunkBytes]
  std::int64_t tiles;           // of 128 weight rows, per expert
  std::int64_t cols;            // K, a multiple of 16
  const std::int64_t* offsets;  // [experts + 1]
  int experts;
  const void* tokens;                // BF16 [*, cols], or codes [*, cols / 2]
  std::int64_t token_stride;         // bytes from row to row of `tokens`
  const std::uint8_t* token_scales;  // NVFP4: E4M3 [*, cols / 16]
  const std::int32_t* gather;        // row r of an expert reads token gather[r]; null: r itself
};

// ---- Storage

inline constexpr int kMaxExperts = 1024;

template <class Config>
struct alignas(1024) GemmStorage {
  // Stages first: token tiles need 1024-byte boundaries.
  std::uint8_t tokens[Config::kStages][Config::kSplit][Config::kTokenTileBytes];
  alignas(128) std::uint8_t weights[Config::kStages][Config::kConsumers][kChunkBytes];
  std::uint64_t full[Config::kStages];
  std::uint64_t empty[Config::kStages];
  std::int32_t first_tile[kMaxExperts + 1];  // token tiles of the experts before e
  std::int32_t first_row[kMaxExperts + 1];   // offsets
};

// ---- Helpers

// value cut to [0, limit].
__device__ inline int clamp_to(std::int64_t value, std::int64_t limit) {
  return static_cast<int>(value < 0 ? 0 : value < limit ? value : limit);
}

// One piece of work: 128 * kRowGroups weight rows and up to kTokens rows of one expert.
struct Tile {
  int expert;
  std::int64_t first_row;    // of the routed rows
  int rows;                  // valid rows, at most kTokens
  std::int64_t weight_tile;  // first of kRowGroups tiles
};

template <class Config>
class TileWalk {
 public:
  __device__ TileWalk(const GemmParams& p, const GemmStorage<Config>& s)
      : s_(s), experts_(p.experts), row_tiles_((p.tiles + Config::kRowGroups - 1) / Config::kRowGroups) {}

  __device__ std::int64_t count() const { return s_.first_tile[experts_] * row_tiles_; }

  // Experts are outermost, then weight rows, then tokens: CTAs that run together share weights through the
  // L2.
  __device__ Tile at(std::int64_t index) const {
    int low = 0, high = experts_;  // the last expert whose first piece is not beyond index
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (s_.first_tile[middle] * row_tiles_ <= index ? low : high) = middle;
    }
    const auto within = static_cast<std::uint32_t>(index - s_.first_tile[low] * row_tiles_);
    const std::uint32_t token_tiles = s_.first_tile[low + 1] - s_.first_tile[low];
    const std::int32_t begin = s_.first_row[low], rows = s_.first_row[low + 1] - begin;
    // Equal shares, so that the last tile is not a sliver.
    const int share = ((rows + token_tiles - 1) / token_tiles + 7) / 8 * 8;
    const int first = within % token_tiles * share;
    return {low, static_cast<std::int64_t>(begin) + first, clamp_to(rows - first, share),
            static_cast<std::int64_t>(within / token_tiles) * Config::kRowGroups};
  }

 private:
  const GemmStorage<Config>& s_;
  int experts_;
  std::int64_t row_tiles_;
};

// Copies the offsets and sums the experts' token tiles, by the first warp.
template <class Config>
__device__ void sum_token_tiles(const GemmParams& p, GemmStorage<Config>& s) {
  if (threadIdx.x >= 32) return;
  std::int32_t total = 0;
  for (int base = 0; base < p.experts; base += 32) {
    const int e = base + static_cast<int>(threadIdx.x);
    std::int32_t tiles = 0;
    if (e < p.experts) {
      const auto begin = static_cast<std::int32_t>(p.offsets[e]),
                 end = static_cast<std::int32_t>(p.offsets[e + 1]);
      s.first_row[e] = begin;
      if (e == p.experts - 1) s.first_row[e + 1] = end;
      tiles = (end - begin + Config::kTokens - 1) / Config::kTokens;
    }
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

// Byte offset of 16-byte piece `piece` of row `row` in a swizzled token tile.
__device__ inline int swizzled_piece(int row, int piece) { return row * 128 + (piece ^ (row & 7)) * 16; }

// The stages of this CTA in order: tile after tile, kSplit chunks at a time; and the tokens that this thread
// loads.
template <class Config>
struct StageCursor {
  static constexpr bool kBf16 = Config::kFormat == TokenFormat::kBf16;
  // A thread moves one 16-byte piece (BF16, 8 to a row) or one block (NVFP4, 4 to a row) of every kStep-th
  // row.
  static constexpr int kPieces = kBf16 ? 8 : 4;
  static constexpr int kStep = 128 / kPieces;
  static constexpr int kRows = (Config::kTokens + kStep - 1) / kStep;

  std::int64_t index, chunk = 0;
  Tile tile;
  std::int32_t token[kRows];  // -1: no such row

  __device__ StageCursor(const GemmParams& p, const TileWalk<Config>& walk) : index(blockIdx.x) {
    enter(p, walk);
  }
  __device__ bool done(const TileWalk<Config>& walk) const { return index >= walk.count(); }
  __device__ void advance(const GemmParams& p, const TileWalk<Config>& walk) {
    chunk += Config::kSplit;
    if (chunk < chunks_of(p.cols)) return;
    chunk = 0;
    index += gridDim.x;
    enter(p, walk);
  }

 private:
  __device__ void enter(const GemmParams& p, const TileWalk<Config>& walk) {
    if (done(walk)) return;
    tile = walk.at(index);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = threadIdx.x / kPieces + i * kStep;
      const std::int64_t at = tile.first_row + row;
      token[i] = row < tile.rows ? (p.gather != nullptr ? p.gather[at] : static_cast<std::int32_t>(at)) : -1;
    }
  }
};

// Starts the copy of a stage's weights; by one thread.
template <class Config>
__device__ void load_weights(const GemmParams& p, const Tile& tile, std::int64_t chunk, int stage,
                             GemmStorage<Config>& s) {
  const std::int64_t chunks = chunks_of(p.cols);
  const int present = clamp_to(chunks - chunk, Config::kSplit);
  const int groups = clamp_to(p.tiles - tile.weight_tile, Config::kRowGroups);
  ptx::mbarrier_arrive_expect(&s.full[stage], groups * present * kChunkBytes);
  for (int group = 0; group < groups; ++group) {
    const std::uint8_t* from =
        p.weights + ((tile.expert * p.tiles + tile.weight_tile + group) * chunks + chunk) * kChunkBytes;
    // Chunks along K are adjacent in memory and in the stage.
    ptx::bulk_copy(s.weights[stage][group], from, present * kChunkBytes, &s.full[stage]);
  }
}

// Producer for BF16 tokens: asynchronous copies, which arrive at the stage's barrier when they have landed.
// NOTE: consumers order these writes before wgmma with a proxy fence. Here it would wait for every copy under
// way.
template <class Config>
__device__ void produce_bf16(const GemmParams& p, const TileWalk<Config>& walk, GemmStorage<Config>& s) {
  using Cursor = StageCursor<Config>;
  StageRing ring;
  for (Cursor cursor(p, walk); !cursor.done(walk); cursor.advance(p, walk)) {
    ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
    if (threadIdx.x == 0) load_weights<Config>(p, cursor.tile, cursor.chunk, ring.index, s);
#pragma unroll
    for (int part = 0; part < Config::kSplit; ++part) {
      const std::int64_t col = (cursor.chunk + part) * kChunkCols + threadIdx.x % 8 * 8;
      const int valid = col < p.cols ? 16 : 0;
#pragma unroll
      for (int i = 0; i < Cursor::kRows; ++i) {
        if (cursor.token[i] < 0) continue;
        const auto* from = static_cast<const std::uint8_t*>(p.tokens) + cursor.token[i] * p.token_stride;
        ptx::cp_async_16(
            s.tokens[ring.index][part] + swizzled_piece(threadIdx.x / 8 + i * Cursor::kStep, threadIdx.x % 8),
            from + (valid ? col * 2 : 0), valid);
      }
    }
    ptx::mbarrier_arrive_after_cp_async(&s.full[ring.index]);
    ring.advance<Config::kStages>();
  }
}

// Producer for NVFP4 tokens: codes are loaded kAhead stages early into registers, decoded to BF16 on the way
// to shared memory.
template <class Config>
__device__ void produce_nvfp4(const GemmParams& p, const TileWalk<Config>& walk, GemmStorage<Config>& s) {
  using Cursor = StageCursor<Config>;
  // With few tokens the threads beyond the first rows take the other chunks of the stage.
  constexpr int kSpread = Config::kTokens < Cursor::kStep ? Cursor::kStep / Config::kTokens : 1;
  static_assert(Config::kSplit % kSpread == 0);
  constexpr int kParts = Config::kSplit / kSpread;
  constexpr int kAhead = kParts * Cursor::kRows == 1 ? 4 : 2;
  struct Blocks {
    uint2 codes[kParts][Cursor::kRows];
    std::uint8_t scales[kParts][Cursor::kRows];
  } blocks[kAhead];
  const int own_part = kSpread > 1 ? threadIdx.x / (Config::kTokens * 4) : 0;
  const int own_row = kSpread > 1 ? threadIdx.x / 4 % Config::kTokens : threadIdx.x / 4;

  Cursor ahead(p, walk), cursor = ahead;
  const auto load = [&](Blocks& to) {
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const std::int64_t block = (ahead.chunk + part * kSpread + own_part) * 4 + threadIdx.x % 4;
#pragma unroll
      for (int i = 0; i < Cursor::kRows; ++i) {
        to.codes[part][i] = make_uint2(0, 0);
        to.scales[part][i] = 0;
        if (ahead.token[i] < 0 || block * 16 >= p.cols) continue;
        const std::int64_t token = ahead.token[i];
        const auto* from = static_cast<const std::uint8_t*>(p.tokens) + token * p.token_stride + block * 8;
        to.codes[part][i] = __ldg(reinterpret_cast<const uint2*>(from));
        to.scales[part][i] = __ldg(p.token_scales + token * (p.cols / 16) + block);
      }
    }
  };
  // The cursor's rows are by thread / 4; with kSpread they wrap around.
  const auto wrap = [&](Cursor& c) {
    if constexpr (kSpread > 1) {
      const std::int64_t at = c.tile.first_row + own_row;
      c.token[0] =
          own_row < c.tile.rows ? (p.gather != nullptr ? p.gather[at] : static_cast<std::int32_t>(at)) : -1;
    }
  };
  const auto load_next = [&](Blocks& to) {
    if (ahead.done(walk)) return;
    if (ahead.chunk == 0) wrap(ahead);
    load(to);
    ahead.advance(p, walk);
  };
#pragma unroll
  for (int u = 0; u < kAhead; ++u) load_next(blocks[u]);
  StageRing ring;
  while (!cursor.done(walk)) {
#pragma unroll
    for (int u = 0; u < kAhead; ++u) {
      if (cursor.done(walk)) break;
      ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
      if (threadIdx.x == 0) load_weights<Config>(p, cursor.tile, cursor.chunk, ring.index, s);
#pragma unroll
      for (int part = 0; part < kParts; ++part) {
#pragma unroll
        for (int i = 0; i < Cursor::kRows; ++i) {
          uint4 values[2];
          decode_block(blocks[u].codes[part][i], blocks[u].scales[part][i], values);
          std::uint8_t* to = s.tokens[ring.index][part * kSpread + own_part];
          const int row = own_row + i * Cursor::kStep;
          *reinterpret_cast<uint4*>(to + swizzled_piece(row, threadIdx.x % 4 * 2)) = values[0];
          *reinterpret_cast<uint4*>(to + swizzled_piece(row, threadIdx.x % 4 * 2 + 1)) = values[1];
        }
      }
      ptx::mbarrier_arrive(&s.full[ring.index]);
      ring.advance<Config::kStages>();
      load_next(blocks[u]);
      cursor.advance(p, walk);
    }
  }
}

// The accumulators of one consumer thread: two fragments of 64 rows by kTokens. For fragment f, token group j
// (of 8), half h and c in {0, 1}: f[f][4 j + 2 h + c] is (row tile_row(.., f, warp, lane / 4, h), token 8 j +
// 2 (lane % 4) + c).
template <class Config>
struct Accumulators {
  float f[2][Config::kAcc];
};

// What a consumer thread reads of a chunk of weights.
struct ChunkWords {
  uint4 words[2];  // of the two fragments, a word for each of the four steps
  uint4 scales;    // x, y: fragment 0, rows of half 0 and 1; z, w: fragment 1
};
// `codes` and `scales`: shared-memory addresses of this thread's first words.
__device__ inline ChunkWords read_chunk(std::uint32_t codes, std::uint32_t scales) {
  return {{ptx::load_shared(codes), ptx::load_shared(codes + kChunkCodeBytes / 2)}, ptx::load_shared(scales)};
}

// Two of a chunk's four steps as operands.
struct Operands {
  std::uint32_t a[2][2][4];  // [step of the two][fragment]
};
template <int kFirstStep>
__device__ void decode_steps(const ChunkWords& chunk, Operands& to) {
#pragma unroll
  for (int f = 0; f < 2; ++f) {
    const std::uint32_t scales0 = decode_scales<kFirstStep>(f == 0 ? chunk.scales.x : chunk.scales.z);
    const std::uint32_t scales1 = decode_scales<kFirstStep>(f == 0 ? chunk.scales.y : chunk.scales.w);
    decode_word<0>(kFirstStep == 0 ? chunk.words[f].x : chunk.words[f].z, scales0, scales1, to.a[0][f]);
    decode_word<1>(kFirstStep == 0 ? chunk.words[f].y : chunk.words[f].w, scales0, scales1, to.a[1][f]);
  }
}

// Starts the products of two steps with the token tile `b` describes.
template <class Config>
__device__ void start_steps(const Operands& from, std::uint64_t b, Accumulators<Config>& acc) {
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      // 16 columns are 32 bytes, 2 in the descriptor's units of 16.
      ptx::wgmma<Config::kTokens>(acc.f[f], from.a[i][f], b + i * 2, true);
    }
  }
  ptx::wgmma_commit();
}

// Named barrier 1 over all consumers.
template <class Config>
__device__ void sync_consumers() {
  asm volatile("bar.sync 1, %0;" ::"n"(128 * Config::kConsumers) : "memory");
}

// Adds the split warpgroups' accumulators into the first one's, in their order, through shared memory that
// follows the storage.
template <class Config>
__device__ void add_splits(int part, float* scratch, Accumulators<Config>& acc) {
  constexpr int kFloats = 2 * Config::kAcc;
  const int thread = threadIdx.x % 128;
  if (part > 0) {
#pragma unroll
    for (int i = 0; i < kFloats; ++i) {
      scratch[((part - 1) * kFloats + i) * 128 + thread] = acc.f[i / Config::kAcc][i % Config::kAcc];
    }
  }
  sync_consumers<Config>();
  if (part == 0) {
    for (int other = 0; other < Config::kSplit - 1; ++other) {
#pragma unroll
      for (int i = 0; i < kFloats; ++i) {
        acc.f[i / Config::kAcc][i % Config::kAcc] += scratch[(other * kFloats + i) * 128 + thread];
      }
    }
  }
  sync_consumers<Config>();
}

// Calls visit(j, values) for each group of 8 tokens; values[f] are the four accumulators of fragment f. A
// loop over registers would have to be unrolled, and 16 copies of an epilogue do not fit the instruction
// cache: so the accumulators pass through this thread's own shared memory, 32 tokens at a time.
template <class Config>
inline constexpr int kPassGroups = (Config::kTokens < 32 ? Config::kTokens : 32) / 8;
template <class Config>
inline constexpr int kPassFloats = kPassGroups<Config> * 8;  // of a thread

template <class Config, class Visit>
__device__ void for_each_token_group(Accumulators<Config>& acc, float* scratch, const Visit& visit) {
  constexpr int kGroups = kPassGroups<Config>;
  float4* own = reinterpret_cast<float4*>(scratch) + threadIdx.x % 128;
#pragma unroll 1
  for (int pass = 0; pass < Config::kTokens / 8 / kGroups; ++pass) {
#pragma unroll
    for (int f = 0; f < 2; ++f) {
      float* a = acc.f[f];
#pragma unroll
      for (int j = 0; j < kGroups; ++j) {
        own[(j * 2 + f) * 128] = make_float4(a[4 * j], a[4 * j + 1], a[4 * j + 2], a[4 * j + 3]);
      }
#pragma unroll
      for (int i = 0; i + 4 * kGroups < Config::kAcc; ++i) a[i] = a[i + 4 * kGroups];
    }
#pragma unroll 1
    for (int j = 0; j < kGroups; ++j) {
      const float4 values[2] = {own[j * 2 * 128], own[(j * 2 + 1) * 128]};
      visit(pass * kGroups + j, values);
    }
  }
}

template <class Config, class Epilogue>
__device__ void consume(const GemmParams& p, const Epilogue& epilogue, const TileWalk<Config>& walk,
                        GemmStorage<Config>& s, float* scratch) {
  const int chunks = static_cast<int>(chunks_of(p.cols));
  // The same for every lane, and the compiler told so.
  const int consumer = __shfl_sync(~0u, static_cast<int>(threadIdx.x) / 128 - 1, 0);
  const int part = Config::kSplit > 1 ? consumer : 0;
  const int group = Config::kSplit > 1 ? 0 : consumer;
  const int warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const std::uint32_t first_codes = ptx::shared_address(s.weights[0][consumer]) + (warp * 32 + lane) * 16;
  const std::uint32_t first_scales =
      ptx::shared_address(s.weights[0][consumer]) + kChunkCodeBytes + (warp * 8 + lane / 4) * 16;
  const std::uint64_t first_tokens = ptx::swizzled_descriptor(s.tokens[0][part]);
  StageRing ring;
  for (std::int64_t index = blockIdx.x; index < walk.count(); index += gridDim.x) {
    const Tile tile = walk.at(index);
    const bool here = tile.weight_tile + group < p.tiles;
    const int own_chunks = here ? chunks - part : 0;
    Accumulators<Config> acc;
#pragma unroll
    for (int i = 0; i < Config::kAcc; ++i) acc.f[0][i] = acc.f[1][i] = 0.0f;
    // Half a chunk is decoded while the tensor cores work on the half before; a stage is given back once the
    // first products of the next one are under way.
    Operands early, late;
    int held = -1;
    ptx::wgmma_pin(acc.f[0]);
    ptx::wgmma_pin(acc.f[1]);
    for (int chunk = 0; chunk < chunks; chunk += Config::kSplit) {
      ptx::mbarrier_wait(&s.full[ring.index], ring.parity);
      ptx::fence_async_proxy();
      if (chunk < own_chunks) {
        constexpr int kStageBytes = Config::kConsumers * kChunkBytes;
        const ChunkWords words =
            read_chunk(first_codes + ring.index * kStageBytes, first_scales + ring.index * kStageBytes);
        const std::uint64_t b = first_tokens + ring.index * (Config::kSplit * Config::kTokenTileBytes >> 4);
        decode_steps<0>(words, early);
        start_steps<Config>(early, b, acc);
        ptx::wgmma_wait<1>();
        if (held >= 0) warp_arrive(&s.empty[held]);
        decode_steps<2>(words, late);
        start_steps<Config>(late, b + 4, acc);
        ptx::wgmma_wait<1>();
        held = ring.index;
      } else {
        warp_arrive(&s.empty[ring.index]);
      }
      ring.advance<Config::kStages>();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_pin(acc.f[0]);
    ptx::wgmma_pin(acc.f[1]);
    if (held >= 0) warp_arrive(&s.empty[held]);
    if constexpr (Config::kSplit > 1) add_splits<Config>(part, scratch, acc);
    if (here && part == 0) {
      for_each_token_group<Config>(acc, scratch + group * kPassFloats<Config> * 128,
                                   [&](int j, const float4(&v)[2]) {
                                     if (8 * j < tile.rows)
                                       epilogue.template run<Config>(tile, tile.weight_tile + group, j, v);
                                   });
    }
  }
}

// ---- Kernel

template <class Config>
constexpr int scratch_bytes() {
  const int splits = (Config::kSplit - 1) * 2 * Config::kAcc,
            passes = Config::kRowGroups * kPassFloats<Config>;
  return (splits > passes ? splits : passes) * 128 * static_cast<int>(sizeof(float));
}
template <class Config>
constexpr int shared_bytes() {
  return static_cast<int>(sizeof(GemmStorage<Config>)) + scratch_bytes<Config>();
}

template <class Config, class Epilogue>
__global__ void __launch_bounds__(Config::kThreads, 1)
    grouped_gemm_kernel(const __grid_constant__ GemmParams p, const __grid_constant__ Epilogue epilogue) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  // Set-up.
  // NOTE: no rounding up of the address: that would hide from the compiler that this is shared memory.
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& s = *reinterpret_cast<GemmStorage<Config>*>(shared);
  auto* scratch = reinterpret_cast<float*>(&s + 1);
  sum_token_tiles<Config>(p, s);
  if (threadIdx.x == 32) {
    for (int stage = 0; stage < Config::kStages; ++stage) {
      ptx::mbarrier_init(&s.full[stage], 128 + 1);  // the producer's threads, and the bulk copies
      ptx::mbarrier_init(&s.empty[stage], 4 * Config::kConsumers);
    }
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  const TileWalk<Config> walk(p, s);

  // Roles.
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Config::kProducerRegs));
    if constexpr (Config::kFormat == TokenFormat::kBf16) {
      produce_bf16<Config>(p, walk, s);
    } else {
      produce_nvfp4<Config>(p, walk, s);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Config::kConsumerRegs));
    consume<Config>(p, epilogue, walk, s, scratch);
  }
#else
  __trap();
#endif
}

}  // namespace megamoe::sm90
