// few_rows.cuh: both GEMMs of a layer in one kernel, for so few rows that reading the weights is all that
// takes time.
//
// A piece of work is 64 weight rows, of either GEMM, for the rows of one expert. CTAs take pieces by a ticket,
// those of the first GEMM before those of the second, so that one who waits for h waits for CTAs that run,
// however many of them fit on the GPU. Weights depend on nothing but the pairs' experts, which every CTA sorts
// out by itself: they stream from the first moment on, through the end of one GEMM and into the next, a ring
// of stages ahead.
//
//   Params    pointers and sizes
//   Storage   shared memory
//   Helpers   rows, tickets, producers, consumers
//   Kernel    set-up and roles
#pragma once

#include "cuda/pairs.cuh"
#include "cuda/ptx/flag.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/grouped_gemm.cuh"
#include "cuda/sm90/multiply_bf16.cuh"

namespace megamoe::sm90 {

using FewConfig = GemmConfig<OperandType::kBf16, 8, 1, 4>;

// ---- Params

struct FewParams {
  struct Gemm {
    CUtensorMap tokens;           // in boxes of a chunk's columns of one row
    const std::uint8_t* weights;  // as GemmParams has them, and the next two
    int tiles;
    int cols;
  } gemms[2];
  const std::int32_t* ids;       // [pairs], and the weights
  const float* routing_weights;  // (those of weight 0 are left out)
  int pairs;                     // at most kFewRows
  int top_k;
  int experts;
  // The first GEMM's tokens are the layer's, there since before the kernel ahead began; else they are in
  // expert order, and that kernel writes them.
  bool gathers;
  std::uint32_t* counters;  // [kFewCounters], 0: as in FewGemms
};

// ---- Storage

// Rows of one expert, as many as a tile has tokens.
struct RowTile {
  int expert, rows, first_row;
};

inline constexpr int kTickets = 8;       // under way
inline constexpr int kTokenWarps = 3;    // producers of tokens; one more is weights'
inline constexpr int kNextTicket = 0;    // the counters: the next piece,
inline constexpr int kFirstReady = 1;    // and for each row tile how many warps have written their part of h
static_assert(kFirstReady + kFewRows <= kFewCounters);

struct FewStorage : GemmStorage<FewConfig> {
  RowTile row_tiles[kFewRows];
  int num_row_tiles;
  int source[kFewRows];  // of the first GEMM's tokens: the row that a routed row reads
  int tickets[kTickets];
  std::uint64_t ticket_full[kTickets], ticket_empty[kTickets];
};

// ---- Helpers

// Sorts the pairs. A warp calls it.
__device__ inline void list_rows(const FewParams& p, FewStorage& s) {
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int expert =
      lane < p.pairs ? cuda::expert_of_pair(p.ids, p.routing_weights, p.experts, lane) : -1;
  int row = 0, earlier = 0, all = 0;  // rows before; those of this expert before and altogether
#pragma unroll
  for (int other = 0; other < kFewRows; ++other) {
    const int theirs = __shfl_sync(~0u, expert, other);
    if (theirs < 0 || theirs > expert) continue;
    const bool same = theirs == expert;
    all += same;
    earlier += same && other < lane;
    row += !same || other < lane;
  }
  const bool begins = expert >= 0 && earlier % FewConfig::kTokens == 0;
  const unsigned beginnings = __reduce_or_sync(~0u, begins ? 1u << row : 0);
  if (begins) {
    s.row_tiles[__popc(beginnings & ((1u << row) - 1))] = {expert, min(all - earlier, FewConfig::kTokens), row};
  }
  if (expert >= 0) s.source[row] = p.gathers ? lane / p.top_k : row;
  if (lane == 0) s.num_row_tiles = __popc(beginnings);
}

struct FewPiece {
  int gemm;  // 2: there is none
  int row_tile;
  int weight_tile;
};
__device__ inline FewPiece piece_of(int ticket, const FewParams& p, const FewStorage& s) {
  const int row_tiles = uniform(s.num_row_tiles);
  for (int gemm = 0; gemm < 2; ++gemm) {
    const int tiles = p.gemms[gemm].tiles;
    if (ticket < row_tiles * tiles) return {gemm, ticket / tiles, ticket % tiles};
    ticket -= row_tiles * tiles;
  }
  return {2, 0, 0};
}

__device__ inline int chunks_of(const FewParams::Gemm& gemm) {
  return static_cast<int>(chunks_of(FewConfig::kType, gemm.cols));
}

// The next of the pieces that the weights' producer has announced. A warp's lanes call it together.
__device__ inline FewPiece next_piece(StageRing& ring, const FewParams& p, FewStorage& s) {
  ptx::mbarrier_wait(&s.ticket_full[ring.index], ring.parity);
  const int ticket = uniform(s.tickets[ring.index]);
  if (ptx::elect_one()) ptx::mbarrier_arrive(&s.ticket_empty[ring.index]);
  ring.advance<kTickets>();
  return piece_of(ticket, p, s);
}

__device__ inline int take_ticket(const FewParams& p) {
  return threadIdx.x % 32 == 0 ? static_cast<int>(atomicAdd(&p.counters[kNextTicket], 1)) : 0;
}

// `ticket`: lane 0 has the first one. The next is asked for a piece ahead.
__device__ inline void produce_weights(int ticket, const FewParams& p, FewStorage& s) {
  constexpr int kChunks = FewConfig::kStageChunks, kBytes = FewConfig::kChunkBytes;
  StageRing ring, tickets;
  for (;;) {
    ticket = uniform(ticket);
    ptx::mbarrier_wait(&s.ticket_empty[tickets.index], tickets.parity ^ 1);
    if (ptx::elect_one()) {
      s.tickets[tickets.index] = ticket;
      ptx::mbarrier_arrive(&s.ticket_full[tickets.index]);
    }
    tickets.advance<kTickets>();
    const FewPiece piece = piece_of(ticket, p, s);
    if (piece.gemm == 2) return;
    ticket = take_ticket(p);
    const FewParams::Gemm& gemm = p.gemms[piece.gemm];
    const RowTile& rows = s.row_tiles[piece.row_tile];
    const int chunks = chunks_of(gemm), token_bytes = rows.rows * 128;
    const std::uint8_t* from =
        gemm.weights +
        (static_cast<std::int64_t>(rows.expert) * gemm.tiles + piece.weight_tile) * chunks * kBytes;
    for (int chunk = 0; chunk < chunks; chunk += kChunks) {
      const int present = min(chunks - chunk, kChunks);
      ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
      if (ptx::elect_one()) {
        ptx::mbarrier_arrive_expect(&s.full[ring.index], present * (kBytes + token_bytes));
        ptx::bulk_copy(s.weights[ring.index][0], from, present * kBytes, &s.full[ring.index]);
      }
      __syncwarp();
      from += kChunks * kBytes;
      ring.advance<FewConfig::kStages>();
    }
  }
}

// Chunks by turns. Their bytes may be there before the weights' producer has announced them: the phase ends
// with it.
__device__ inline void produce_tokens(std::uint32_t parts_of_h, int warp, const FewParams& p, FewStorage& s) {
  constexpr int kChunks = FewConfig::kStageChunks;
  if (!p.gathers) cuda::await_previous_kernel();
  StageRing ring, tickets;
  for (;;) {
    const FewPiece piece = next_piece(tickets, p, s);
    if (piece.gemm == 2) return;
    const FewParams::Gemm& gemm = p.gemms[piece.gemm];
    const RowTile tile = s.row_tiles[piece.row_tile];
    const int rows = uniform(tile.rows), chunks = chunks_of(gemm);
    if (piece.gemm == 1 && ptx::elect_one()) {
      while (ptx::load_acquire(&p.counters[kFirstReady + piece.row_tile]) != parts_of_h) {
      }
      ptx::fence_async_proxy_global();
    }
    __syncwarp();
    for (int chunk = 0; chunk < chunks; chunk += kChunks) {
      ptx::mbarrier_wait(&s.empty[ring.index], ring.parity ^ 1);
      if (ptx::elect_one()) {
        for (int part = warp; part < min(chunks - chunk, kChunks); part += kTokenWarps) {
          for (int row = 0; row < rows; ++row) {
            const int from = tile.first_row + row;
            ptx::tensor_copy(s.tokens[ring.index][part] + row * 128, &gemm.tokens,
                             (chunk + part) * FewConfig::kChunkCols,
                             piece.gemm == 0 ? s.source[from] : from, &s.full[ring.index]);
          }
        }
      }
      __syncwarp();
      ring.advance<FewConfig::kStages>();
    }
  }
}

// Warps that finish() has write a piece of the first GEMM.
template <class First>
inline constexpr int kWritingWarps = FewConfig::kTokens * (kTileRows / First::kItemRows) / 32;

template <class First>
__device__ __forceinline__ void consume(const FewParams& p, const First& first, const PlainEpilogue& second,
                                        FewStorage& s) {
  const int thread = thread_index();
  StageRing ring, tickets;
  Piece turns(0);
  bool waited = false;
  for (;; turns.advance(1)) {
    const FewPiece piece = next_piece(tickets, p, s);
    if (piece.gemm == 2) break;
    const FewParams::Gemm& gemm = p.gemms[piece.gemm];
    const RowTile rows = s.row_tiles[piece.row_tile];
    const int expert = uniform(rows.expert);
    const float2 weight_scale = piece.gemm == 0 ? first.expert_scales(expert) : second.expert_scales(expert);
    const auto note_work = [&] {
      Work<FewConfig>& work = s.work[0][turns.turn()];
      if (thread == 0) work.tile = {expert, rows.rows, rows.first_row, 0, piece.weight_tile, 1};
      if (thread >= rows.rows) return;
      const std::int64_t row = rows.first_row + thread;
      work.scales[thread] = piece.gemm == 0 ? first.token_scales(row) : second.token_scales(row);
    };
    // Scales of tokens may be the kernel before's: the first sums are made while it runs.
    if (waited) note_work();
    const Consumer<FewConfig> consumer(s);
    Accumulators<FewConfig, FewConfig::kTokens> acc;
    consumer.template multiply<FewConfig::kTokens>(chunks_of(gemm), s, ring, acc);
    if (!waited) {
      cuda::await_previous_kernel();
      note_work();
      waited = true;
    }
    sync_consumers<FewConfig>();
    if (piece.gemm == 0) {
      finish<FewConfig, FewConfig::kTokens>(first, turns, weight_scale, s, acc);
      __syncwarp();
      if (thread < 32 * kWritingWarps<First> && thread % 32 == 0)
        ptx::add_release(&p.counters[kFirstReady + piece.row_tile], 1);
    } else {
      finish<FewConfig, FewConfig::kTokens>(second, turns, weight_scale, s, acc);
    }
  }
  // Whoever waits for this kernel counts on those before it.
  if (!waited) cuda::await_previous_kernel();
}

// ---- Kernel

template <class First>
__global__ void __launch_bounds__(FewConfig::kThreads, 1)
    few_rows_kernel(const __grid_constant__ FewParams p, const __grid_constant__ First first,
                    const __grid_constant__ PlainEpilogue second) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  extern __shared__ __align__(1024) std::uint8_t shared[];
  auto& s = *reinterpret_cast<FewStorage*>(shared);
  constexpr int kConsumerWarps = FewConfig::kConsumerThreads / 32;
  const int thread = static_cast<int>(threadIdx.x), warp = uniform(thread / 32);

  // Set-up.
  int ticket = 0;
  if (warp == kConsumerWarps) {
    ticket = take_ticket(p);
    if (ptx::elect_one()) {
      for (int stage = 0; stage < FewConfig::kStages; ++stage) {
        ptx::mbarrier_init(&s.full[stage], 1);  // and the bytes
        ptx::mbarrier_init(&s.empty[stage], kConsumerWarps);
      }
      for (int i = 0; i < kTickets; ++i) {
        ptx::mbarrier_init(&s.ticket_full[i], 1);
        ptx::mbarrier_init(&s.ticket_empty[i], kConsumerWarps + kTokenWarps);
      }
      ptx::mbarrier_init_fence();
    }
  } else if (warp == 0) {
    list_rows(p, s);
  }
  // A tile's unused rows are never written. What comes of them is not used, but NaN would take the way of what
  // hardly ever happens.
  for (int i = thread; i < static_cast<int>(sizeof(s.tokens) / 16); i += FewConfig::kThreads)
    reinterpret_cast<uint4*>(s.tokens)[i] = {};
  for (int i = thread; i < static_cast<int>(sizeof(s.work) / 4); i += FewConfig::kThreads)
    reinterpret_cast<std::uint32_t*>(s.work)[i] = 0;
  ptx::fence_async_proxy();
  __syncthreads();

  // Roles.
  if (warp < kConsumerWarps) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(FewConfig::kConsumerRegs));
    consume(p, first, second, s);
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(FewConfig::kProducerRegs));
    if (warp == kConsumerWarps) {
      produce_weights(ticket, p, s);
    } else {
      produce_tokens(static_cast<std::uint32_t>(p.gemms[0].tiles * kWritingWarps<First>),
                     warp - kConsumerWarps - 1, p, s);
    }
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
