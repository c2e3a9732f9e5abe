// few_rows.cuh: both GEMMs of a layer in one kernel, for so few rows that reading and decoding the weights is
// what takes time.
//
// A piece of work is 64 weight rows, of either GEMM, for up to eight rows of one expert. CTAs take pieces by
// a ticket, those of the first GEMM before those of the second, so that one who waits for h waits for CTAs
// that run, however many of them fit on the GPU. Weights depend on nothing but the pairs' experts: they
// stream from the first moment on, through the end of one GEMM and into the next, a ring of stages ahead. As
// many pairs as a warp has lanes every CTA sorts by itself, rather than wait for the sort; and as few tokens
// are combined here, by whoever finishes the last piece of some columns.
//
//   Config    stages, warps
//   Params    pointers and sizes
//   Storage   shared memory
//   Helpers   rows, tickets, producers, consumers
//   Kernel    set-up and roles
#pragma once

#include "cuda/combine.cuh"
#include "cuda/pairs.cuh"
#include "cuda/ptx/flag.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/grouped_gemm.cuh"
#include "cuda/sm90/multiply_bf16.cuh"

namespace megamoe::sm90 {

// ---- Config

// Few long stages: asking for one, and giving it back, costs as much as a chunk.
struct FewConfig : GemmConfig<OperandType::kBf16, 8, 1, 4> {
  static constexpr int kStageChunks = 4 * kSplit, kStages = 4;
};
// Warps: consumers, a producer of weights, a producer of tokens for each stage, and those that finish pieces
// by turns.
inline constexpr int kConsumerWarps = FewConfig::kConsumerThreads / 32, kTokenWarps = FewConfig::kStages,
                     kFinishers = 2;
inline constexpr int kFewThreads = 32 * (kConsumerWarps + 1 + kTokenWarps + kFinishers);
inline constexpr int kPieces = 8;  // announced at a time

// ---- Params

struct FewParams {
  struct Gemm {
    const bf16* tokens;  // rows of `cols` elements, at multiples of 16 bytes
    std::int64_t token_stride;
    const std::uint8_t* weights;  // as GemmParams has them, and the next two
    int tiles;
    int cols;
  } gemms[2];
  // What the sort made of the pairs, or null: then these are sorted here.
  const cuda::RowTile* row_tiles;  // [*num_row_tiles]
  const std::int32_t* num_row_tiles;
  const std::int32_t* row_to_token;  // [rows], and the next
  const std::int32_t* row_to_slot;
  const std::int32_t* ids;       // [pairs], and the weights
  const float* routing_weights;  // (those of weight 0 are left out)
  int pairs;                     // at most kWarpPairs
  int top_k;
  int experts;
  // The first GEMM's tokens: a row for each token, or for each pair; there since before the kernel ahead
  // began, or else once the counter of tokens says that there are as many.
  bool by_pair;
  std::uint32_t awaited_tokens;
  bool combines;  // what follows, of which nothing is shared
  cuda::CombineParams combine;
  bool combines_aligned;
  std::uint32_t* counters;  // [few_counters()], 0: as in FewGemms
};

// ---- Storage

struct alignas(16) FewPiece {
  int gemm;  // 2: there is none
  int chunks;
  int weight_tile;
  int row_tile;
  cuda::RowTile rows;
};

// The counters; another one is kFewTokensDone.
inline constexpr int kNextTicket = 0;   // the next piece,
inline constexpr int kFirstDone = 2;    // and for each group of tiles of y's columns how many are there
inline constexpr int kFirstReady = 64;  // and for each row tile how many pieces of h have been written
inline constexpr int kGroups = kFirstReady - kFirstDone;
static_assert(kFewTokensDone < kFirstDone && few_counters(0) == kFirstReady);

struct alignas(1024) FewStorage {
  std::uint8_t tokens[FewConfig::kStages][FewConfig::kStageChunks][FewConfig::kTokenTileBytes];
  alignas(128) std::uint8_t weights[FewConfig::kStages][1][FewConfig::kStageChunks][FewConfig::kChunkBytes];
  // Accumulators in passing.
  alignas(16) float sums[kFinishers][FewConfig::kSplit][FewConfig::kPassTokens][FewConfig::kPitch];
  alignas(16) FewPiece pieces[kPieces];
  int num_row_tiles;
  // Of pairs that are sorted here, as the sort makes them.
  cuda::RowTile row_tiles[kWarpPairs];
  std::int32_t row_to_pair[kWarpPairs];
  std::uint64_t full[FewConfig::kStages], empty[FewConfig::kStages];
  std::uint64_t piece_full[kPieces], piece_empty[kPieces];
};

// ---- Helpers

// The expert of a lane's pair, or -1.
__device__ inline int expert_of_lane(const FewParams& p) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return lane < p.pairs ? cuda::expert_of_pair(p.ids, p.routing_weights, p.experts, lane) : -1;
}

// Sorts at most kWarpPairs pairs. A warp calls it.
__device__ inline void list_rows(int expert, const FewParams& p, FewStorage& s) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  int row = 0, earlier = 0, all = 0;  // rows before; those of this expert before and altogether
#pragma unroll 1
  for (int other = 0; other < p.pairs; ++other) {
    const int theirs = __shfl_sync(~0u, expert, other);
    const bool same = theirs == expert, before = same && other < lane;
    all += same;
    earlier += before;
    row += before || (theirs >= 0 && theirs < expert);
  }
  const bool begins = expert >= 0 && earlier % FewConfig::kTokens == 0;
  const unsigned beginnings = __reduce_or_sync(~0u, begins ? 1u << row : 0);
  if (begins) {
    s.row_tiles[__popc(beginnings & ((1u << row) - 1))] = {expert, min(all - earlier, FewConfig::kTokens),
                                                           row};
  }
  if (expert >= 0) s.row_to_pair[row] = lane;
  if (lane == 0) s.num_row_tiles = __popc(beginnings);
  __syncwarp();
}

// The next of the announced pieces. A warp's lanes call it together.
__device__ inline FewPiece next_piece(StageRing& ring, FewStorage& s) {
  ptx::mbarrier_wait(&s.piece_full[ring.index], ring.parity);
  FewPiece piece = s.pieces[ring.index];
  piece.gemm = uniform(piece.gemm), piece.chunks = uniform(piece.chunks);
  __syncwarp();  // all have read it
  if (threadIdx.x % 32 < kLanesArriving) ptx::mbarrier_arrive(&s.piece_empty[ring.index]);
  ring.advance<kPieces>();
  return piece;
}

__device__ inline int take_ticket(const FewParams& p) {
  return threadIdx.x % 32 == 0 ? static_cast<int>(atomicAdd(&p.counters[kNextTicket], 1)) : 0;
}

__device__ inline FewPiece piece_of(int ticket, const FewParams& p, const FewStorage& s) {
  const int row_tiles = uniform(s.num_row_tiles);
  for (int gemm = 0; gemm < 2; ++gemm) {
    const int tiles = p.gemms[gemm].tiles;
    if (ticket < row_tiles * tiles) {
      const int row_tile = ticket / tiles;
      return {gemm, static_cast<int>(chunks_of(FewConfig::kType, p.gemms[gemm].cols)), ticket % tiles,
              row_tile, (p.row_tiles != nullptr ? p.row_tiles : s.row_tiles)[row_tile]};
    }
    ticket -= row_tiles * tiles;
  }
  return {2};
}

// Announces pieces and starts copying their weights. `ticket`: lane 0 has the first one. NOTE: the next is
// taken as late as can be: the CTA that takes it should be the first to have done with the pieces it has.
__device__ inline void produce_weights(int ticket, const FewParams& p, FewStorage& s) {
  constexpr int kChunks = FewConfig::kStageChunks, kBytes = FewConfig::kChunkBytes;
  StageRing ring, pieces;
  for (;; ticket = take_ticket(p)) {
    const FewPiece piece = piece_of(uniform(ticket), p, s);
    ptx::mbarrier_wait(&s.piece_empty[pieces.index], pieces.parity ^ 1);
    if (ptx::elect_one()) {
      s.pieces[pieces.index] = piece;
      ptx::mbarrier_arrive(&s.piece_full[pieces.index]);
    }
    pieces.advance<kPieces>();
    if (piece.gemm == 2) return;
    const FewParams::Gemm& gemm = p.gemms[piece.gemm];
    const int tile = piece.rows.expert * gemm.tiles + piece.weight_tile;
    const std::uint8_t* from = gemm.weights + static_cast<std::int64_t>(tile) * piece.chunks * kBytes;
    for (int chunk = 0; chunk < piece.chunks; chunk += kChunks) {
      const int bytes = min(piece.chunks - chunk, kChunks) * kBytes;
      ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect(&s.full[ring.index], bytes);
        ptx::bulk_copy(s.weights[ring.index], from, bytes, &s.full[ring.index]);
      }
      __syncwarp();
      from += bytes;
      ring.advance<FewConfig::kStages>();
    }
  }
}

// A row's columns of a stage, in vectors of 16 bytes, and where wgmma reads them: in row `to`, of 128 bytes,
// of each chunk's tile, its vectors swapped by the row's number.
class StageRow {
 public:
  __device__ StageRow(const bf16* row, int first_col, int cols) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int col = first_col + vector(i) * 8;
      vectors_[i] = col < cols ? __ldcg(reinterpret_cast<const uint4*>(row + col)) : uint4{};
    }
  }
  __device__ void store(std::uint8_t (*chunks)[FewConfig::kTokenTileBytes], int to) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      std::uint8_t* at = chunks[vector(i) / 8] + to * 128 + (vector(i) % 8 ^ to) * 16;
      *reinterpret_cast<uint4*>(at) = vectors_[i];
    }
  }

 private:
  static constexpr int kVectors = FewConfig::kStageChunks * FewConfig::kChunkCols / 8 / 32;  // of a lane
  static __device__ int vector(int i) { return i * 32 + static_cast<int>(threadIdx.x % 32); }
  uint4 vectors_[kVectors];
};

// What a routed row of the first GEMM is read from.
__device__ inline int source_of(int row, const FewParams& p, const FewStorage& s) {
  if (p.row_tiles == nullptr) return s.row_to_pair[row] / (p.by_pair ? 1 : p.top_k);
  return p.by_pair ? p.row_to_token[row] * p.top_k + p.row_to_slot[row] : p.row_to_token[row];
}

// The warp of one stage. NOTE: by ordinary loads and stores, for starting a copy of the copy engine for each
// 128 bytes takes longer than a stage's weights do.
__device__ inline void produce_tokens(int stage, const FewParams& p, FewStorage& s) {
  constexpr int kChunks = FewConfig::kStageChunks;
  if (p.row_tiles != nullptr) {
    cuda::await_previous_kernel();  // and so for tokens, too
  } else {
    while (p.awaited_tokens > 0 && ptx::load_acquire(&p.counters[kFewTokensDone]) < p.awaited_tokens) {
    }
  }
  StageRing ring, pieces;
  for (;;) {
    const FewPiece piece = next_piece(pieces, s);
    if (piece.gemm == 2) return;
    const FewParams::Gemm& gemm = p.gemms[piece.gemm];
    const int lane = static_cast<int>(threadIdx.x % 32), rows = uniform(piece.rows.rows);
    int from = piece.rows.first_row + lane;  // what a lane's row, if it has one, is read from
    if (piece.gemm == 0 && lane < rows) from = source_of(from, p, s);
    if (piece.gemm == 1) {
      const auto all = static_cast<std::uint32_t>(p.gemms[0].tiles);
      while (ptx::load_acquire(&p.counters[kFirstReady + piece.row_tile]) != all) {
      }
    }
    for (int chunk = 0; chunk < piece.chunks; chunk += kChunks) {
      if (ring.index == stage) {
        for (int row = 0; row < rows; ++row) {
          const StageRow columns(gemm.tokens + __shfl_sync(~0u, from, row) * gemm.token_stride,
                                 chunk * FewConfig::kChunkCols, gemm.cols);
          if (row == 0) ptx::mbarrier_wait(&s.empty[stage], ring.parity ^ 1);
          columns.store(s.tokens[stage], row);
        }
        ptx::fence_async_proxy();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(&s.full[stage]);
      }
      ring.advance<FewConfig::kStages>();
    }
  }
}

// Named barriers. All threads are ready to begin; finisher 0 (1) is ready for new sums; the consumers have
// left them. NOTE: the last two are waited for on both sides: racecheck does not follow bar.arrive, and
// nobody waits long.
inline constexpr int kSetUp = 1, kSumsGone = 2, kSumsThere = kSumsGone + kFinishers;
inline constexpr int kHandOverThreads = FewConfig::kConsumerThreads + 32;
template <int kThreads>
__device__ inline void sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}

// Warpgroups that share the K of a piece.
__device__ __forceinline__ void consume(FewStorage& s) {
  StageRing ring, pieces;
  for (int finisher = 0;; finisher = (finisher + 1) % kFinishers) {
    const FewPiece piece = next_piece(pieces, s);
    if (piece.gemm == 2) return;
    const Consumer<FewConfig> consumer(s);
    Accumulators<FewConfig, FewConfig::kTokens> acc;
    consumer.template multiply<FewConfig::kTokens>(piece.chunks, s, ring, acc);
    sync<kHandOverThreads>(kSumsGone + finisher);
    put_sums<FewConfig, FewConfig::kTokens>(&s.sums[finisher][consumer.place.part], 0, acc);
    sync<kHandOverThreads>(kSumsThere + finisher);
  }
}

// Scales of a tile's token, for each a lane.
template <class Epilogue>
__device__ __forceinline__ TokenScales scales_of_lane(const Epilogue& epilogue, const Tile& tile) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  return lane < tile.rows ? epilogue.token_scales(tile.first_row + lane) : TokenScales{};
}

// Sums to what leaves the chip. All lanes go through it together.
template <class Epilogue>
__device__ __forceinline__ void finish_piece(const Epilogue& epilogue, const Tile& tile, float2 weight_scale,
                                             const TokenScales& of_lane, float (*sums)[FewConfig::kPitch]) {
  using Sums = ItemSums<FewConfig, Epilogue::kItemRows>;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x % 32); i < (tile.rows * Sums::kItems + 31) / 32 * 32; i += 32) {
    const int token = i / Sums::kItems;
    const TokenScales scales{__shfl_sync(~0u, of_lane.in, token), __shfl_sync(~0u, of_lane.out, token)};
    epilogue.run(tile, tile.weight_tile, token, i % Sums::kItems, &scales, weight_scale, Sums{sums[token]});
  }
}

// All tokens' columns of a group of weight tiles of the second GEMM.
__device__ inline void combine_group(int group, int group_tiles, const FewParams& p) {
  const int first = group * group_tiles * kTileRows,
            quads = (min(static_cast<int>(p.combine.hidden), first + group_tiles * kTileRows) - first) / 4;
  const int all = static_cast<int>(p.combine.tokens) * quads;
  for (int i = static_cast<int>(threadIdx.x % 32); i < all; i += 32)
    cuda::combine_four(p.combine, i / quads, first + i % quads * 4, p.combines_aligned);
}

// Counts a piece of the second GEMM; where its group's are all there, adds them up.
__device__ inline void note_done(int weight_tile, int group_tiles, const FewParams& p, const FewStorage& s) {
  const int group = weight_tile / group_tiles;
  const int tiles = min(group_tiles, p.gemms[1].tiles - group * group_tiles);
  std::uint32_t before = 0;
  __syncwarp();
  if (threadIdx.x % 32 == 0) before = ptx::fetch_add(&p.counters[kFirstDone + group], 1);
  __syncwarp();
  if (uniform(static_cast<int>(before)) + 1 == tiles * s.num_row_tiles) combine_group(group, group_tiles, p);
}

// One of the warps that finish pieces.
template <class First>
__device__ __forceinline__ void finish(int finisher, const FewParams& p, const First& first,
                                       const PlainEpilogue& second, FewStorage& s) {
  // Scales of tokens may be the kernel's before. Whoever waits for this one counts on those before it, too.
  cuda::await_previous_kernel();
  const int group_tiles = (p.gemms[1].tiles + kGroups - 1) / kGroups;
  if (p.combines && s.num_row_tiles == 0 && finisher == 0) {
    for (int group = static_cast<int>(blockIdx.x); group * group_tiles < p.gemms[1].tiles;
         group += static_cast<int>(gridDim.x)) {
      combine_group(group, group_tiles, p);
    }
  }
  StageRing pieces;
  for (int turn = 0;; turn = (turn + 1) % kFinishers) {
    const FewPiece piece = next_piece(pieces, s);
    if (piece.gemm == 2) return;
    if (turn != finisher) continue;
    const Tile tile{piece.rows.expert, piece.rows.rows, piece.rows.first_row, 0, piece.weight_tile, 1};
    // Before there are sums: whoever waits for memory that streams weights waits long.
    const float2 weight_scale =
        piece.gemm == 0 ? first.expert_scales(tile.expert) : second.expert_scales(tile.expert);
    const TokenScales of_lane = piece.gemm == 0 ? scales_of_lane(first, tile) : scales_of_lane(second, tile);
    sync<kHandOverThreads>(kSumsGone + finisher);
    sync<kHandOverThreads>(kSumsThere + finisher);
    if (piece.gemm == 0) {
      finish_piece(first, tile, weight_scale, of_lane, s.sums[finisher][0]);
      __syncwarp();
      if (ptx::elect_one()) ptx::add_release(&p.counters[kFirstReady + piece.row_tile], 1);
    } else {
      finish_piece(second, tile, weight_scale, of_lane, s.sums[finisher][0]);
      if (p.combines) note_done(tile.weight_tile, group_tiles, p, s);
    }
    __syncwarp();
  }
}

// ---- Kernel

template <class First>
__global__ void __launch_bounds__(kFewThreads, 1)
    few_rows_kernel(const __grid_constant__ FewParams p, const __grid_constant__ First first,
                    const __grid_constant__ PlainEpilogue second) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& s = *reinterpret_cast<FewStorage*>(shared);
  const int warp = uniform(static_cast<int>(threadIdx.x) / 32);

  // Weights, whose producer sets up what the others wait for.
  if (warp == kConsumerWarps) {
    const bool sorts = p.row_tiles == nullptr;
    if (!sorts) cuda::await_previous_kernel();
    const int expert = sorts ? expert_of_lane(p) : -1, ticket = take_ticket(p);
    if (ptx::elect_one()) {
      for (int i = 0; i < FewConfig::kStages; ++i) {
        ptx::mbarrier_init(&s.full[i], 2);  // and the bytes
        ptx::mbarrier_init(&s.empty[i], arrivals_of<FewConfig>(kConsumerWarps));
      }
      for (int i = 0; i < kPieces; ++i) {
        ptx::mbarrier_init(&s.piece_full[i], 1);
        ptx::mbarrier_init(&s.piece_empty[i], (kConsumerWarps + kTokenWarps + kFinishers) * kLanesArriving);
      }
      ptx::mbarrier_init_fence();
    }
    if (sorts) {
      list_rows(expert, p, s);
    } else {
      if (threadIdx.x % 32 == 0) s.num_row_tiles = *p.num_row_tiles;
      __syncwarp();
    }
    asm volatile("bar.arrive %0, %1;" ::"r"(kSetUp), "n"(kFewThreads) : "memory");
    produce_weights(ticket, p, s);
    return;
  }
  sync<kFewThreads>(kSetUp);

  // The other roles. A tile's unused rows of tokens are never written, and nothing is made of what comes of
  // them.
  if (warp < kConsumerWarps) {
    consume(s);
  } else if (warp <= kConsumerWarps + kTokenWarps) {
    produce_tokens(warp - kConsumerWarps - 1, p, s);
  } else {
    finish(warp - kConsumerWarps - 1 - kTokenWarps, p, first, second, s);
  }
#else
  __trap();
#endif
}

// Instances for the first GEMM's epilogues, in gemm_few.cu.
template <class First>
cudaError_t launch_few(const FewParams& params, const First& first, const PlainEpilogue& second,
                       cudaStream_t stream);

}  // namespace megamoe::sm90
