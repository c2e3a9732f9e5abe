// register_epilogue.cuh: h of wide tiles, from the registers that wgmma leaves gate and up in.
//
// A thread has gate and up of the same elements: in each of its tiles of weights of column lane / 4 of its
// warp's eight, and of tokens 8 j + 2 (lane % 4) + {0, 1}. So h needs no other thread; what needs others is
// to write adjacent columns, which four lanes exchange, and a scale. That of 128 columns of E4M3 belongs to
// all warps, which leave their largest magnitudes for each other; for NVFP4 h is written as BF16 first, and
// then a thread takes each block of 16.
//
// All this is unrolled over a tile's tokens, so there must be little of it: where the activation's BF16
// cannot be told (activate.cuh) gate and up wait in a list, which a warp goes through once, a lane an entry.
// Where that is not enough the tile is left to finish(); of E4M3, too, where a group of 128 columns is not
// whole, where h is 0 throughout, huge or tiny, and where a number in the list is not ordinary
// (activate_all()).
#pragma once

#include <cstdint>

#include "backend/backend.h"
#include "cuda/activate.cuh"
#include "cuda/bf16_pair.cuh"
#include "cuda/encode.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/grouped_gemm.cuh"

namespace megamoe::sm90 {

// Four elements of a thread of which h cannot be told, and then h.
struct DoubtfulFour {
  alignas(16) float gate[4];
  alignas(16) float up[4];
  alignas(8) std::uint32_t h[2];
  std::uint32_t four, lane;
};

// What passes through shared memory, where sums do otherwise, in the room of a warpgroup's first tile.
template <class Config>
struct GroupRoom {
  static constexpr int kMost = Config::kPassTokens * Config::kPitch / static_cast<int>(sizeof(DoubtfulFour));
  DoubtfulFour doubtful[4][kMost];  // of each warp

  static __device__ GroupRoom& place(GemmStorage<Config>& s, int group) {
    static_assert(sizeof(GroupRoom) <= sizeof(s.sums[0]));
    return *reinterpret_cast<GroupRoom*>(s.sums[group * Config::kOwnTiles]);
  }
};
// And what the warps of both tell each other for E4M3, in that of another tile.
template <class Config>
struct Fp8Meeting {
  std::uint32_t amax[4 * Config::kConsumers][Config::kTokens / 2];  // magnitudes of two tokens' BF16
  alignas(16) cuda::TileFactor factors[Config::kTokens];

  static __device__ Fp8Meeting& place(GemmStorage<Config>& s) {
    static_assert(Config::kOwnTiles == 2 && sizeof(Fp8Meeting) <= sizeof(s.sums[1]));
    return *reinterpret_cast<Fp8Meeting*>(s.sums[1]);
  }
};

// A thread's elements by fours: two tokens 8 j + .. of its first tile and the same of its second; or, where
// it has one tile, those of two j. Beyond the last j there are ones. The scales of FP8 tokens are in the
// sums.
template <class Config, int kWidth, class Epilogue>
struct Fours {
  static constexpr int kEights = kWidth / 8;
  static constexpr int kCount = (kEights * Config::kOwnTiles + 1) / 2;
  // Of element i of a four.
  static __device__ constexpr int tile(int i) { return Config::kOwnTiles == 2 ? i / 2 : 0; }
  static __device__ constexpr int eight(int four, int i) {
    return Config::kOwnTiles == 2 ? four : 2 * four + i / 2;
  }
  static __device__ constexpr int token(int four, int i, int lane) {
    return 8 * eight(four, i) + 2 * (lane % 4) + i % 2;
  }

  const Accumulators<Config, kWidth>& acc;
  const TokenScales* scales;  // of the tile's tokens
  float2 weight_scale;
  bool biased;
  float gate_bias[Config::kOwnTiles], up_bias[Config::kOwnTiles];

  __device__ Fours(const Epilogue& epilogue, const Accumulators<Config, kWidth>& sums,
                   const TokenScales* token_scales, int expert, int col)
      : acc(sums),
        scales(token_scales),
        weight_scale(epilogue.expert_scales(expert)),
        biased(epilogue.gate_bias != nullptr) {
    // A power of two: exact, but that a sum beyond 2^125 does not become infinite as in finish().
    if constexpr (Config::kFp8) {
      weight_scale.x *= epilogue.in.operand_factor, weight_scale.y *= epilogue.in.operand_factor;
    }
#pragma unroll
    for (int t = 0; t < Config::kOwnTiles; ++t) {
      const std::int64_t at =
          static_cast<std::int64_t>(expert) * epilogue.out.intermediate + col + t * (kTileRows / 2);
      gate_bias[t] = biased ? epilogue.gate_bias[at] : 0.0f;
      up_bias[t] = biased ? epilogue.up_bias[at] : 0.0f;
    }
  }
  __device__ __forceinline__ void read(int four, float (&gate)[4], float (&up)[4]) const {
    float4 of_tokens[2];  // of each j: scales of two tokens
    if constexpr (!Config::kFp8) {
      const int first = 2 * (thread_index() % 4);
#pragma unroll
      for (int i = 0; i < 4; i += 2)
        of_tokens[i / 2] = *reinterpret_cast<const float4*>(&scales[first + 8 * (eight(four, i) % kEights)]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int j = eight(four, i) % kEights;
      gate[i] = acc[tile(i)][4 * j + i % 2], up[i] = acc[tile(i)][4 * j + 2 + i % 2];
      if constexpr (!Config::kFp8) {
        const float scale = i % 2 == 0 ? of_tokens[i / 2].x : of_tokens[i / 2].z;
        gate[i] = __fmul_rn(gate[i], scale), up[i] = __fmul_rn(up[i], scale);
      }
      gate[i] = __fmul_rn(gate[i], weight_scale.x), up[i] = __fmul_rn(up[i], weight_scale.y);
      if (eight(four, i) >= kEights) gate[i] = up[i] = 1.0f;
    }
    if (!biased) return;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      gate[i] = __fadd_rn(gate[i], gate_bias[tile(i)]);
      up[i] = __fadd_rn(up[i], up_bias[tile(i)]);
    }
  }
};

// The fours that a warp cannot tell, among tokens that there are: how many, and which of this thread's.
struct Doubts {
  int count;
  std::uint32_t mask;
};
// h of all of a thread's fours, handed to take(four, elements 0 and 1, elements 2 and 3) as BF16; those in
// doubt, too, but they go into the list.
template <class Config, class F, class Epilogue, class Take>
__device__ __forceinline__ Doubts activate_fours(const Epilogue& epilogue, const F& fours, int rows,
                                                 DoubtfulFour* list, const Take& take) {
  const cuda::StepsOfAny steps(epilogue.activation);
  const int lane = thread_index() % 32;
  Doubts doubts{0, 0};
#pragma unroll
  for (int four = 0; four < F::kCount; ++four) {
    float gate[1][4], up[1][4];
    fours.read(four, gate[0], up[0]);
    const bool sure = cuda::activate_nearly_by(steps, gate, up);
    take(four, cuda::bf16_pair(up[0][0], up[0][1]), cuda::bf16_pair(up[0][2], up[0][3]));
    const bool doubt = !sure && F::token(four, 0, lane) < rows;
    const std::uint32_t lanes = __ballot_sync(~0u, doubt);
    if (lanes == 0) continue;
    const int at = doubts.count + __popc(lanes & ((1u << lane) - 1));
    if (doubt && at < GroupRoom<Config>::kMost) {
      fours.read(four, gate[0], up[0]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool there = F::token(four, i, lane) < rows;
        list[at].gate[i] = there ? gate[0][i] : 1.0f, list[at].up[i] = there ? up[0][i] : 1.0f;
      }
      list[at].four = four, list[at].lane = lane;
      doubts.mask |= 1u << four;
    }
    doubts.count += __popc(lanes);
  }
  return doubts;
}

// Of four lanes, four apart: byte k of lane i becomes byte i of lane k.
__device__ __forceinline__ std::uint32_t exchange_bytes(std::uint32_t word, int lane) {
  const std::uint32_t far = __shfl_xor_sync(~0u, word, 8);
  const std::uint32_t halves = __byte_perm(word, far, (lane & 8) != 0 ? 0x3276 : 0x5410);
  const std::uint32_t near = __shfl_xor_sync(~0u, halves, 4);
  return __byte_perm(halves, near, (lane & 4) != 0 ? 0x3715 : 0x6240);
}
// The same with the four halves of two words.
__device__ __forceinline__ uint2 exchange_halves(std::uint32_t first, std::uint32_t second, int lane) {
  const bool late = (lane & 8) != 0, odd = (lane & 4) != 0;
  const std::uint32_t far = __shfl_xor_sync(~0u, late ? first : second, 8);
  const std::uint32_t own = late ? second : first;
  const std::uint32_t a = late ? far : own, b = late ? own : far;
  const std::uint32_t near = __shfl_xor_sync(~0u, __byte_perm(a, b, odd ? 0x5410 : 0x7632), 4);
  return make_uint2(__byte_perm(a, near, odd ? 0x3254 : 0x5410), __byte_perm(b, near, odd ? 0x3276 : 0x7610));
}

// ---- BF16, and NVFP4 decoded

// BF16 [rows, 16 or 32 columns], a row `pitch` on from the last, to what their NVFP4 stands for but for
// tensor scales; by a warpgroup. A call, for it is the same for all widths.
static __device__ __noinline__ void quantize_in_place(__nv_bfloat16* values, std::int64_t pitch, int rows,
                                                      int blocks, const TokenScales* scales,
                                                      unsigned long long* saturated) {
  const auto row_of = [&](int i) { return blocks == 2 ? i / 2 : i; };
  const auto place = [&](int i) {
    const int row = row_of(i);
    return reinterpret_cast<uint4*>(values + row * pitch + (i - row * blocks) * kNvfp4Block);
  };
  const int end = rows * blocks;
  int i = thread_index() % 128;
  if (i >= end) return;
  uint4 next[2] = {__ldcg(place(i)), __ldcg(place(i) + 1)};
#pragma unroll 1
  for (; i < end; i += 128) {
    const uint4 low = next[0], high = next[1];
    if (i + 128 < end) next[0] = __ldcg(place(i + 128)), next[1] = __ldcg(place(i + 128) + 1);
    const std::uint32_t x[4][2] = {{low.x, low.y}, {low.z, low.w}, {high.x, high.y}, {high.z, high.w}};
    std::uint32_t both = 0;
#pragma unroll
    for (int k = 0; k < 8; ++k) both = __vmaxu2(both, x[k / 2][k % 2] & cuda::kPairMagnitudes);
    cuda::FourCodes codes[4];
    const Nvfp4Scale scale = cuda::encode_fours(x, cuda::larger_of(both), scales[row_of(i)].out, codes);
    const float decoding = cuda::decoding_scale(scale.code);
    uint2 y[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) y[k] = codes[k].decoded(x[k], decoding);
    uint4* at = place(i);
    at[0] = make_uint4(y[0].x, y[0].y, y[1].x, y[1].y);
    at[1] = make_uint4(y[2].x, y[2].y, y[3].x, y[3].y);
    if (scale.saturated && saturated != nullptr) atomicAdd(saturated, 1ull);
  }
}

// False, of all threads of the warpgroup: a list was too short.
template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ bool finish_bf16(const Epilogue& epilogue, const Tile& tile,
                                            const TokenScales* scales, int group, GemmStorage<Config>& s,
                                            const Accumulators<Config, kWidth>& acc) {
  static_assert(Config::kOwnTiles == 1);
  using F = Fours<Config, kWidth, Epilogue>;
  const int thread = thread_index(), lane = thread % 32, warp = uniform(thread / 32) % 4;
  const std::int64_t intermediate = epilogue.out.intermediate;
  const int first_col = (tile.weight_tile + group) * (kTileRows / 2), warp_col = first_col + warp * 8;
  __nv_bfloat16* to = epilogue.out.values + tile.first_row * intermediate + warp_col;
  __builtin_assume(__isGlobal(to));  // the pointer itself came from shared memory
  DoubtfulFour* list = GroupRoom<Config>::place(s, group).doubtful[warp];
  Doubts doubts{0, 0};
  if (warp_col < intermediate) {
    const F fours(epilogue, acc, scales, tile.expert, warp_col + lane / 4);
    // After the exchange: the token of the first four, and the four columns.
    const int own_token = lane / 8 % 2 * 8 + 2 * (lane % 4) + lane / 4 % 2;
    __nv_bfloat16* own = to + own_token * intermediate + lane / 16 * 4;
    const auto store = [&](int four, std::uint32_t first, std::uint32_t second) {
      const uint2 h = exchange_halves(first, second, lane);
      if (16 * four + own_token < tile.rows) *reinterpret_cast<uint2*>(own) = h;
      own += 16 * intermediate;
    };
    doubts = activate_fours<Config>(epilogue, fours, tile.rows, list, store);
  }
  if (!all_meeting<Config>(group, doubts.count <= GroupRoom<Config>::kMost)) return false;
#pragma unroll 1
  for (int i = lane; i < doubts.count; i += 32) {
    // What has been written of those in doubt is written again.
    DoubtfulFour& doubtful = list[i];
    const int four = static_cast<int>(doubtful.four), owner = static_cast<int>(doubtful.lane);
    cuda::activate_exactly(epilogue.activation, doubtful.gate, doubtful.up);
#pragma unroll 1
    for (int k = 0; k < 4; ++k) {
      const int token = F::token(four, k, owner);
      if (token < tile.rows) to[token * intermediate + owner / 4] = __float2bfloat16_rn(doubtful.up[k]);
    }
  }
  if (epilogue.out.mode == L1Output::kNvfp4) {
    sync_meeting<Config>(group);
    quantize_in_place(epilogue.out.values + tile.first_row * intermediate + first_col, intermediate,
                      tile.rows, min(2, static_cast<int>(intermediate - first_col) / kNvfp4Block), scales,
                      epilogue.out.saturated);
  }
  return true;
}

// ---- E4M3

// h of the fours in doubt, by the definition, into the list and from there into h. False: not all are
// ordinary (activate_all()).
template <int kFours>
__device__ __forceinline__ bool settle(const ActivationConfig& activation, Doubts doubts, DoubtfulFour* list,
                                       std::uint32_t (&h)[kFours][2]) {
  const int lane = thread_index() % 32;
  bool told = true;
  __syncwarp();
#pragma unroll 1
  for (int i = lane; i < doubts.count; i += 32) {
    float gate[4], up[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) gate[k] = list[i].gate[k], up[k] = list[i].up[k];
    told = cuda::activate_all(activation, gate, up) && told;
    list[i].h[0] = cuda::bf16_pair(up[0], up[1]), list[i].h[1] = cuda::bf16_pair(up[2], up[3]);
  }
  __syncwarp();
  int before = 0;
#pragma unroll
  for (int four = 0; four < kFours; ++four) {
    const bool doubt = (doubts.mask >> four & 1) != 0;
    const std::uint32_t lanes = __ballot_sync(~0u, doubt);
    if (lanes == 0) continue;
    if (doubt) {
      const DoubtfulFour& found = list[before + __popc(lanes & ((1u << lane) - 1))];
      h[four][0] = found.h[0], h[four][1] = found.h[1];
    }
    before += __popc(lanes);
  }
  return told;
}

// The largest magnitudes of a warp's columns, by token.
template <int kEights>
__device__ __forceinline__ void leave_largest(const std::uint32_t (&h)[kEights][2], std::uint32_t* to) {
  // As many as a power of two, which lanes with the same tokens hand over by halves.
  constexpr int kCount = kEights <= 8 ? 8 : 16;
  const int lane = thread_index() % 32;
  std::uint32_t largest[kCount];
#pragma unroll
  for (int j = 0; j < kCount; ++j) {
    largest[j] = j < kEights ? __vmaxu2(h[j % kEights][0] & cuda::kPairMagnitudes,
                                        h[j % kEights][1] & cuda::kPairMagnitudes)
                             : 0;
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

// False, of all consumers: the tile's last columns are missing, or something is out of the ordinary.
template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ bool finish_fp8(const Epilogue& epilogue, const Tile& tile, int group,
                                           GemmStorage<Config>& s, const Accumulators<Config, kWidth>& acc) {
  static_assert(Config::kOwnTiles == 2 && Config::kRowGroups == 2);
  constexpr int kEights = kWidth / 8;
  const int thread = thread_index(), lane = thread % 32, warp = uniform(thread / 32);
  const int first_col = tile.weight_tile * (kTileRows / 2), intermediate = epilogue.out.intermediate;
  if (first_col >= intermediate) return true;
  if (first_col + kFp8Tile > intermediate) return false;
  const int warp_col = first_col + group * (kFp8Tile / 2) + warp % 4 * 8;
  Fp8Meeting<Config>& meeting = Fp8Meeting<Config>::place(s);
  DoubtfulFour* list = GroupRoom<Config>::place(s, group).doubtful[warp % 4];

  std::uint32_t h[kEights][2];
  const Fours<Config, kWidth, Epilogue> fours(epilogue, acc, nullptr, tile.expert, warp_col + lane / 4);
  const auto keep = [&](int j, std::uint32_t first, std::uint32_t second) {
    h[j][0] = first, h[j][1] = second;
  };
  const Doubts doubts = activate_fours<Config>(epilogue, fours, tile.rows, list, keep);
  bool ordinary = doubts.count <= GroupRoom<Config>::kMost;
  if (ordinary && doubts.count > 0) ordinary = settle(epilogue.activation, doubts, list, h);
  leave_largest<kEights>(h, meeting.amax[warp]);
  sync_meeting<Config>(group);

  float d = 1.0f;
  if (thread < kWidth) {
    std::uint32_t both = 0;
#pragma unroll
    for (int w = 0; w < 4 * Config::kConsumers; ++w) both = __vmaxu2(both, meeting.amax[w][thread / 2]);
    const float amax = thread % 2 == 0 ? cuda::first_of(both) : cuda::second_of(both);
    d = cuda::fast_tile_scale(amax);
    meeting.factors[thread] = cuda::tile_factor(d);
    // NaN and infinity, in BF16's order of bits, are beyond.
    if (thread < tile.rows && !(amax >= cuda::kFastTileMin && amax <= cuda::kFastTileMax)) ordinary = false;
  }
  if (!all_meeting<Config>(group, ordinary)) return false;
  if (thread < tile.rows)
    epilogue.out.fp8_scales[first_col / kFp8Tile * epilogue.out.fp8_pitch + tile.scale_place + thread] = d;

  const float4* factors = reinterpret_cast<const float4*>(&meeting.factors[2 * (lane % 4)]);
  // After the exchange: the token of j = 0, the tile and the four columns.
  const int own_token = 2 * (lane % 4) + lane / 4 % 2;
  const int own_col = warp_col + lane / 8 % 2 * (kTileRows / 2) + lane / 16 * 4;
  const std::int64_t row_bytes = fp8_row_bytes(intermediate);
  std::uint8_t* to = epilogue.out.codes + (tile.first_row + own_token) * row_bytes +
                     fp8_column_place(static_cast<std::uint32_t>(own_col));
  __builtin_assume(__isGlobal(to));  // as above
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

// ---- Any

template <class Config, int kWidth, class Epilogue>
__device__ __forceinline__ bool finish_hidden(const Epilogue& parameter, Piece piece, GemmStorage<Config>& s,
                                              const Accumulators<Config, kWidth>& acc) {
  const int group = place_of<Config>(thread_index()).group;
  sync_group<Config>(group);  // the tile has been written
  const Epilogue& epilogue = epilogue_of_item<Config>(parameter, s);
  const Work<Config>& work = s.work[group][piece.turn()];
  const Tile tile = work.tile;
  if constexpr (Config::kFp8) {
    return finish_fp8<Config, kWidth>(epilogue, tile, group, s, acc);
  } else {
    return finish_bf16<Config, kWidth>(epilogue, tile, work.scales, group, s, acc);
  }
}

}  // namespace megamoe::sm90
