// sort.cu: counting sort. Pairs are cut into as many parts as there are CTAs, a part into one piece a warp;
// a pair's row is the number of pairs of lower experts, plus those of its expert in earlier parts, in earlier
// pieces, and earlier in its piece. No sum depends on the order things run in.
//
//   one CTA     counts, sums and places in one launch
//   several     count_kernel leaves each part's counts in the workspace; place_kernel sums and places
#include "cuda/launch.h"
#include "cuda/pairs.cuh"
#include "cuda/sort.h"

namespace megamoe::cuda {
namespace {

constexpr int kMaxWarps = 32, kFewWarps = 4;
constexpr int kCounts = 8192;    // of a CTA: one for each warp and expert
constexpr int kBatch = 4;        // times 32 pairs, whose loads are under way together
constexpr int kPartPairs = 512;  // at least, where there are several parts
constexpr int kMaxParts = 128;   // every CTA reads the counts of all

struct Plan {
  int warps;
  int parts;
  std::int32_t part_pairs;   // of each, a multiple of the pieces
  std::int32_t piece_pairs;  // of each warp, a multiple of 32
};

std::int64_t parts_at_most(std::int64_t pairs) {
  const std::int64_t parts = pairs <= kOnePartPairs ? 1 : (pairs + kPartPairs - 1) / kPartPairs;
  return parts < kMaxParts ? parts : kMaxParts;
}

Plan plan_for(std::int64_t pairs, int experts) {
  // Every warp has counts to add up: no more of them than there is work for.
  const std::int64_t most_warps = kCounts / experts < kMaxWarps ? kCounts / experts : kMaxWarps;
  const std::int64_t useful = pairs <= 32 * kFewWarps ? kFewWarps : (pairs + 31) / 32;
  const std::int64_t warps = useful < most_warps ? useful : most_warps;
  const std::int64_t capped = parts_at_most(pairs);
  const std::int64_t piece = ((pairs + capped * warps - 1) / (capped * warps) + 31) / 32 * 32;
  const std::int64_t part = piece * warps;
  return {static_cast<int>(warps), static_cast<int>(pairs == 0 ? 1 : (pairs + part - 1) / part),
          static_cast<std::int32_t>(part), static_cast<std::int32_t>(piece)};
}

// Calls visit(pair, expert, earlier lanes with this expert, all lanes with it) for this warp's piece in
// order; pairs beyond the end have expert -1. All lanes call it together.
template <class Visit>
__device__ void walk_piece(const SortParams& p, const Plan& plan, const Visit& visit) {
  const std::int64_t pairs = p.tokens * p.top_k;
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const std::int64_t begin = static_cast<std::int64_t>(blockIdx.x) * plan.part_pairs +
                             static_cast<std::int64_t>(warp) * plan.piece_pairs;
  const std::int64_t end = min(begin + plan.piece_pairs, pairs);
  for (std::int64_t batch = begin; batch < end; batch += kBatch * 32) {
    int experts[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t pair = batch + i * 32 + lane;
      experts[i] = pair < end ? expert_of_pair(p.ids, p.weights, p.experts, pair) : -1;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const std::int64_t pair = batch + i * 32 + lane;
      if (batch + i * 32 >= end) break;
      const unsigned peers = __match_any_sync(~0u, experts[i]);
      visit(pair, pair < end, experts[i], __popc(peers & ((1u << lane) - 1u)), __popc(peers));
      __syncwarp();
    }
  }
}

// counts [warps][experts] in shared memory: pairs of each expert in each piece.
__device__ void count_pieces(const SortParams& p, const Plan& plan, std::int32_t* counts) {
  for (int i = static_cast<int>(threadIdx.x); i < plan.warps * p.experts; i += static_cast<int>(blockDim.x))
    counts[i] = 0;
  __syncthreads();
  std::int32_t* own = counts + threadIdx.x / 32 * static_cast<unsigned>(p.experts);
  walk_piece(p, plan, [&](std::int64_t, bool, int expert, int earlier, int all) {
    if (expert >= 0 && earlier == 0) own[expert] += all;
  });
  __syncthreads();
}

// In: values [count] in shared memory. Out: the sums of those before; returns the sum of all.
__device__ std::int32_t exclusive_sums(std::int32_t* values, int count) {
  __shared__ std::int32_t warp_sums[kMaxWarps];
  const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32;
  std::int32_t before = 0;
  for (int base = 0; base < count; base += static_cast<int>(blockDim.x)) {
    const int i = base + static_cast<int>(threadIdx.x);
    const std::int32_t value = i < count ? values[i] : 0;
    std::int32_t sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const std::int32_t other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane == 31) warp_sums[warp] = sum;
    __syncthreads();
    std::int32_t here = 0, all = 0;
    for (int w = 0; w < static_cast<int>(blockDim.x) / 32; ++w) {
      here += w < warp ? warp_sums[w] : 0;
      all += warp_sums[w];
    }
    if (i < count) values[i] = before + here + sum - value;
    before += all;
    __syncthreads();
  }
  return before;
}

// first_row [experts] in shared memory, and the rows of all; `first_tile` [experts] is room for as many. A
// lone CTA's threads call it together.
__device__ void list_row_tiles(const SortParams& p, const std::int32_t* first_row, std::int32_t rows,
                               std::int32_t* first_tile) {
  const auto for_experts = [&](const auto& visit) {  // visit(expert, its rows)
    for (int e = static_cast<int>(threadIdx.x); e < p.experts; e += static_cast<int>(blockDim.x))
      visit(e, (e + 1 < p.experts ? first_row[e + 1] : rows) - first_row[e]);
  };
  for_experts([&](int e, std::int32_t of_e) { first_tile[e] = (of_e + p.tile_rows - 1) / p.tile_rows; });
  __syncthreads();
  const std::int32_t tiles = exclusive_sums(first_tile, p.experts);
  if (threadIdx.x == 0) *p.num_row_tiles = tiles;
  for_experts([&](int e, std::int32_t of_e) {
    RowTile* to = p.row_tiles + first_tile[e];
    for (std::int32_t row = 0; row < of_e; row += p.tile_rows)
      *to++ = {e, min(of_e - row, p.tile_rows), first_row[e] + row};
  });
}

__global__ void __launch_bounds__(kMaxWarps * 32)
    count_kernel(const __grid_constant__ SortParams p, const __grid_constant__ Plan plan) {
  await_previous_kernel();
  extern __shared__ std::int32_t counts[];
  count_pieces(p, plan, counts);
  std::int32_t* out =
      static_cast<std::int32_t*>(p.workspace) + static_cast<std::int64_t>(blockIdx.x) * p.experts;
  for (int e = static_cast<int>(threadIdx.x); e < p.experts; e += static_cast<int>(blockDim.x)) {
    std::int32_t sum = 0;
    for (int w = 0; w < plan.warps; ++w) sum += counts[w * p.experts + e];
    out[e] = sum;
  }
}

__global__ void __launch_bounds__(kMaxWarps * 32)
    place_kernel(const __grid_constant__ SortParams p, const __grid_constant__ Plan plan) {
  if (p.counters == nullptr) {
    await_previous_kernel();
  } else {
    wait_for_previous_kernel();
    for (int i = static_cast<int>(threadIdx.x); i < p.num_counters; i += static_cast<int>(blockDim.x))
      p.counters[i] = 0;
    __threadfence();
    __syncthreads();
    let_next_kernel_begin();
  }
  extern __shared__ std::int32_t counts[];
  std::int32_t* totals = counts + plan.warps * p.experts;  // [experts]
  count_pieces(p, plan, counts);

  // Pairs of each expert over all parts, then of all lower experts.
  const int experts = p.experts;
  for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x)) {
    std::int32_t total = 0, earlier = 0;
    if (plan.parts == 1) {
      for (int w = 0; w < plan.warps; ++w) total += counts[w * experts + e];
    } else {
      const std::int32_t* of_parts = static_cast<const std::int32_t*>(p.workspace) + e;
#pragma unroll 16
      for (int part = 0; part < plan.parts; ++part) {
        const std::int32_t count = of_parts[static_cast<std::int64_t>(part) * experts];
        total += count;
        if (part < static_cast<int>(blockIdx.x)) earlier += count;
      }
    }
    totals[e] = total;
    // This part's pieces start after the earlier parts and pieces.
    for (int w = 0; w < plan.warps; ++w) {
      const std::int32_t count = counts[w * experts + e];
      counts[w * experts + e] = earlier;
      earlier += count;
    }
  }
  __syncthreads();
  const std::int32_t rows = exclusive_sums(totals, experts);
  if (blockIdx.x == 0) {
    for (int e = static_cast<int>(threadIdx.x); e < experts; e += static_cast<int>(blockDim.x))
      p.offsets[e] = totals[e];
    if (threadIdx.x == 0) p.offsets[experts] = rows;
  }
  if (p.row_tiles != nullptr) list_row_tiles(p, totals, rows, totals + experts);

  std::int32_t* next = counts + threadIdx.x / 32 * static_cast<unsigned>(experts);
  walk_piece(p, plan, [&](std::int64_t pair, bool inside, int expert, int earlier, int all) {
    const std::int32_t at = expert >= 0 ? next[expert] : 0;
    __syncwarp();
    if (expert >= 0 && earlier == 0) next[expert] = at + all;
    if (!inside) return;
    if (expert < 0) {
      const std::int32_t id = p.ids[pair];
      if ((id < -1 || id >= experts) && p.bad_id != nullptr) {
        atomicMin(p.bad_id, static_cast<unsigned long long>(pair));
      }
      p.slot_to_row[pair] = -1;
      return;
    }
    const std::int32_t row = totals[expert] + at + earlier;
    const std::uint32_t pair32 = static_cast<std::uint32_t>(pair),
                        top_k = static_cast<std::uint32_t>(p.top_k);
    p.row_to_token[row] = static_cast<std::int32_t>(pair32 / top_k);
    p.row_to_slot[row] = static_cast<std::int32_t>(pair32 % top_k);
    p.slot_to_row[pair] = row;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (p.of_row[i] != nullptr) p.of_row[i][row] = p.of_expert[i][expert];
    }
  });
}

}  // namespace

std::int64_t sort_workspace_bytes(std::int64_t tokens, int top_k, int experts) {
  // Of as many parts as there are at most: rounding leaves fewer of them for some larger numbers of pairs,
  // and room for more tokens must do for fewer.
  const std::int64_t parts = parts_at_most(tokens * top_k);
  return parts == 1 ? 0 : parts * experts * 4;
}

cudaError_t sort(const SortParams& p, cudaStream_t stream) {
  const std::int64_t pairs = p.tokens * p.top_k;
  if (p.experts < 1 || p.experts > kMaxSortedExperts || pairs > INT32_MAX || p.top_k < 1)
    return cudaErrorInvalidValue;
  const Plan plan = plan_for(pairs, p.experts);
  if ((p.counters != nullptr || p.row_tiles != nullptr) && plan.parts > 1) return cudaErrorInvalidValue;
  if (p.row_tiles != nullptr && (p.num_row_tiles == nullptr || p.tile_rows < 1)) return cudaErrorInvalidValue;
  const int shared = plan.warps * p.experts * 4;
  if (plan.parts > 1) {
    const cudaError_t status =
        launch_early(count_kernel, plan.parts, plan.warps * 32, shared, stream, p, plan);
    if (status != cudaSuccess) return status;
  }
  const int sums = p.experts * (p.row_tiles != nullptr ? 8 : 4);
  return launch_early(place_kernel, plan.parts, plan.warps * 32, shared + sums, stream, p, plan);
}

}  // namespace megamoe::cuda
