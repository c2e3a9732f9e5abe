// fp8_epilogue.cuh: h of a wide FP8 tile, from the registers that wgmma leaves gate and up in.
//
// A thread has gate and up of the same elements: in each of its two tiles of weights of column lane / 4 of
// its warp's eight, and of tokens 8 j + 2 (lane % 4) + {0, 1}. So h needs no other thread; only the scale of
// 128 columns, which are those of all warps, does. Each warp leaves its largest magnitudes, a thread makes a
// token's scale, and then four lanes exchange codes, so that each writes four adjacent ones.
//
// All this is unrolled over a tile's tokens, so there must be little of it: what is out of the ordinary is
// left to finish(), with its tile, and where the activation cannot be told (activate.cuh) sums wait in a
// list, which a warp goes through once, a lane an entry.
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "cuda/activate.cuh"
#include "cuda/bf16_pair.cuh"
#include "cuda/encode.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/grouped_gemm.cuh"

namespace megamoe::sm90 {

// Sums as gate and up of four elements of a thread: two tokens of its first tile, the same of its second.
template <class Config, int kWidth, class Epilogue>
struct FoursOfSums {
  const Accumulators<Config, kWidth>& acc;
  float2 weight_scale;
  bool biased;
  float gate_bias[2], up_bias[2];  // by tile

  __device__ FoursOfSums(const Epilogue& epilogue, const Accumulators<Config, kWidth>& sums, int expert,
                         int col)
      : acc(sums), weight_scale(epilogue.expert_scales(expert)), biased(epilogue.gate_bias != nullptr) {
    // A power of two: exact.
    weight_scale.x *= epilogue.in.operand_factor, weight_scale.y *= epilogue.in.operand_factor;
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      const std::int64_t at =
          static_cast<std::int64_t>(expert) * epilogue.out.intermediate + col + t * (kTileRows / 2);
      gate_bias[t] = biased ? epilogue.gate_bias[at] : 0.0f;
      up_bias[t] = biased ? epilogue.up_bias[at] : 0.0f;
    }
  }
  __device__ __forceinline__ void read(int j, float (&gate)[4], float (&up)[4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] = __fmul_rn(acc[i / 2][4 * j + i % 2], weight_scale.x);
      up[i] = __fmul_rn(acc[i / 2][4 * j + 2 + i % 2], weight_scale.y);
    }
    if (!biased) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] = __fadd_rn(gate[i], gate_bias[i / 2]);
      up[i] = __fadd_rn(up[i], up_bias[i / 2]);
    }
  }
};

// h of a tile as BF16: [j][tile], two tokens a word. False: not all of it was told.
template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ bool activate_sums(const Epilogue& epilogue,
                                              const FoursOfSums<Config, kWidth, Epilogue>& sums, int rows,
                                              DoubtfulFour (&list)[Fp8Scratch<Config>::kDoubtful],
                                              std::uint32_t (&h)[kWidth / 8][2]) {
  const cuda::StepsOfAny steps(epilogue.activation);
  const int lane = thread_index() % 32, first_token = 2 * (lane % 4);
  const std::uint32_t lanes_before = (1u << lane) - 1;
  std::uint32_t doubts = 0;  // bit j
  int waiting = 0;
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    float gate[1][4], up[1][4];
    sums.read(j, gate[0], up[0]);
    const bool sure = cuda::activate_nearly_by(steps, gate, up);
    h[j][0] = cuda::bf16_pair(up[0][0], up[0][1]), h[j][1] = cuda::bf16_pair(up[0][2], up[0][3]);
    const int left = rows - 8 * j - first_token;
    const bool doubt = !sure && left > 0;
    const std::uint32_t mask = __ballot_sync(~0u, doubt);
    if (mask == 0) continue;
    const int at = waiting + __popc(mask & lanes_before);
    if (doubt && at < Fp8Scratch<Config>::kDoubtful) {
      sums.read(j, gate[0], up[0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = i % 2 == 0 || left > 1;
        list[at].gate[i] = there ? gate[0][i] : 1.0f, list[at].up[i] = there ? up[0][i] : 1.0f;
      }
      doubts |= 1u << j;
    }
    waiting += __popc(mask);
  }
  if (waiting == 0) return true;
  if (waiting > Fp8Scratch<Config>::kDoubtful) return false;
  bool told = true;
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < waiting; i += 32) {
    float gate[4], up[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) gate[k] = list[i].gate[k], up[k] = list[i].up[k];
    told = cuda::activate_all(epilogue.activation, gate, up) && told;
    list[i].h = make_uint2(cuda::bf16_pair(up[0], up[1]), cuda::bf16_pair(up[2], up[3]));
  }
  __syncwarp();
  waiting = 0;
#pragma unroll
  for (int j = 0; j < kWidth / 8; ++j) {
    const bool doubt = (doubts >> j & 1) != 0;
    const std::uint32_t mask = __ballot_sync(~0u, doubt);
    if (mask == 0) continue;
    if (doubt) {
      const uint2 found = list[waiting + __popc(mask & lanes_before)].h;
      h[j][0] = found.x, h[j][1] = found.y;
    }
    waiting += __popc(mask);
  }
  return told;
}

// The largest magnitudes of a warp's columns, by token.
template <int kEights>
__device__ __forceinline__ void leave_largest(const std::uint32_t (&h)[kEights][2], std::uint32_t* to) {
  // Of a power of two, which lanes with the same tokens hand over by halves.
  constexpr int kCount = kEights <= 8 ? 8 : 16;
  constexpr std::uint32_t kMagnitudes = 0x7FFF7FFFu;
  const int lane = thread_index() % 32;
  std::uint32_t largest[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    largest[j] = j < kEights ? __vmaxu2(h[j % kEights][0] & kMagnitudes, h[j % kEights][1] & kMagnitudes) : 0;
  }
  int first = 0;
#pragma unroll
  for (int step = 0; step < 3; ++step) {
    const int half = kCount >> (step + 1), bit = 16 >> step;
    const bool upper = (lane & bit) != 0;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      if (i >= half) continue;
      const std::uint32_t given = upper ? largest[i] : largest[half + i];
      const std::uint32_t kept = upper ? largest[half + i] : largest[i];
      largest[i] = __vmaxu2(kept, __shfl_xor_sync(~0u, given, bit));
    }
    if (upper) first += half;
  }
#pragma unroll
  for (int i = 0; i < kCount / 8; ++i) {
    if (first + i < kEights) to[4 * (first + i) + lane % 4] = largest[i];
  }
}

// Of four lanes, four apart: byte k of lane i becomes byte i of lane k.
__device__ __forceinline__ std::uint32_t exchange_bytes(std::uint32_t word, int lane) {
  const std::uint32_t far = __shfl_xor_sync(~0u, word, 8);
  const std::uint32_t halves = __byte_perm(word, far, (lane & 8) != 0 ? 0x3276 : 0x5410);
  const std::uint32_t near = __shfl_xor_sync(~0u, halves, 4);
  return __byte_perm(halves, near, (lane & 4) != 0 ? 0x3715 : 0x6240);
}

template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ bool finish_fp8(const Epilogue& parameter, Piece piece, GemmStorage<Config>& s,
                                           const Accumulators<Config, kWidth>& acc) {
  static_assert(Config::kOwnTiles == 2 && Config::kRowGroups == 2);
  constexpr int kEights = kWidth / 8;
  const Epilogue& epilogue = epilogue_of_item<Config>(parameter, s);
  if (epilogue.out.mode != L1Output::kFp8) return false;
  const int thread = thread_index(), lane = thread % 32, warp = uniform(thread / 32);
  const Place place = place_of<Config>(thread);
  sync_group<Config>(place.group);  // the tile has been written
  const Tile tile = s.work[place.group][piece.turn()].tile;
  const int first_col = tile.weight_tile * (kTileRows / 2), intermediate = epilogue.out.intermediate;
  if (first_col >= intermediate) return true;
  if (first_col + kFp8Tile > intermediate) return false;
  const int warp_col = first_col + place.group * (kFp8Tile / 2) + warp % 4 * 8;
  Fp8Scratch<Config>& scratch = s.fp8;

  std::uint32_t h[kEights][2];
  const FoursOfSums<Config, kWidth, Epilogue> sums(epilogue, acc, tile.expert, warp_col + lane / 4);
  bool ordinary =
      activate_sums<Config, kWidth, Epilogue>(epilogue, sums, tile.rows, scratch.doubtful[warp], h);
  leave_largest<kEights>(h, scratch.amax[warp]);
  sync_meeting<Config>(place.group);

  float d = 1.0f;
  if (thread < kWidth) {
    std::uint32_t both = 0;
#pragma unroll
    for (int w = 0; w < Fp8Scratch<Config>::kWarps; ++w) both = __vmaxu2(both, scratch.amax[w][thread / 2]);
    const float amax = __uint_as_float(thread % 2 == 0 ? both << 16 : both & 0xFFFF0000u);
    d = cuda::fast_tile_scale(amax);
    scratch.factors[thread] = cuda::tile_factor(d);
    // NaN and infinity, in BF16's order of bits, are beyond.
    if (thread < tile.rows && !(amax >= cuda::kFastTileMin && amax <= cuda::kFastTileMax)) ordinary = false;
  }
  if (!all_meeting<Config>(place.group, ordinary)) return false;
  if (thread < tile.rows)
    epilogue.out.fp8_scales[first_col / kFp8Tile * epilogue.out.fp8_pitch + tile.scale_place + thread] = d;

  const float4* factors = reinterpret_cast<const float4*>(&scratch.factors[2 * (lane % 4)]);
  // After the exchange: the token, the tile and the four columns of this lane.
  const int own_token = 2 * (lane % 4) + lane / 4 % 2;
  const int own_col = warp_col + lane / 8 % 2 * (kTileRows / 2) + lane / 16 * 4;
  const std::int64_t row_bytes = fp8_row_bytes(intermediate);
  std::uint8_t* to = epilogue.out.codes + (tile.first_row + own_token) * row_bytes +
                     fp8_column_place(static_cast<std::uint32_t>(own_col));
  __builtin_assume(__isGlobal(to));  // the pointer itself came from shared memory
#pragma unroll
  for (int j = 0; j < kEights; ++j) {
    const float4 both = factors[4 * j];
    const cuda::TileFactor first{both.x, both.y}, second{both.z, both.w};
    std::uint32_t pairs[2];
#pragma unroll
    for (int t = 0; t < 2; ++t) {
      pairs[t] =
          cuda::e4m3_pair(first.times(cuda::first_of(h[j][t])), second.times(cuda::second_of(h[j][t])));
    }
    const std::uint32_t word = exchange_bytes(__byte_perm(pairs[0], pairs[1], 0x5410), lane);
    if (8 * j + own_token < tile.rows) *reinterpret_cast<std::uint32_t*>(to) = word;
    to += 8 * row_bytes;
  }
  return true;
}

}  // namespace megamoe::sm90
