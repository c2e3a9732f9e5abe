// blocks.cuh: 16 values in a thread's registers, of any element type, and where they come from.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/activate.cuh"
#include "cuda/quantize.h"
#include "numerics/interleave.h"
#include "numerics/nvfp4.h"

namespace megamoe::cuda {

// 16 elements as they lie in memory, and element i of them as a float.
template <class T>
struct RawBlock;

// The signs of eight elements, each in the highest bit of its nibble, from the top bytes of the even and of
// the odd ones.
__device__ inline std::uint32_t join_signs(std::uint32_t even, std::uint32_t odd) {
  return ((even >> 4) & 0x08080808u) | (odd & 0x80808080u);
}

template <>
struct RawBlock<float> {
  static constexpr int kVectors = 4;
  uint4 raw[kVectors];

  __device__ float operator()(int i) const {
    const uint4& v = raw[i / 4];
    return __uint_as_float(i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w);
  }
  __device__ std::uint32_t signs(int w) const {
    const auto top_bytes = [&](int first) {  // of every second element
      const auto bits = [&](int i) { return __float_as_uint((*this)(8 * w + first + i)); };
      return __byte_perm(__byte_perm(bits(0), bits(2), 0x0073), __byte_perm(bits(4), bits(6), 0x0073),
                         0x5410);
    };
    return join_signs(top_bytes(0), top_bytes(1));
  }
  // The bits of the largest magnitude, kFloatInf or more if one is not finite.
  __device__ std::uint32_t amax() const {
    std::uint32_t result = 0;
#pragma unroll
    for (int i = 0; i < kNvfp4Block; ++i) result = max(result, __float_as_uint((*this)(i)) & kFloatMagnitude);
    return result;
  }
};

// BF16 and FP16: pairs in 32-bit words.
struct RawPairs {
  static constexpr int kVectors = 2;
  uint4 raw[kVectors];

  __device__ std::uint32_t word(int i) const {
    const uint4& v = raw[i / 4];
    return i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w;
  }
  __device__ std::uint32_t signs(int w) const {
    const std::uint32_t early = __byte_perm(word(4 * w), word(4 * w + 1), 0x7531);  // top bytes, in order
    const std::uint32_t late = __byte_perm(word(4 * w + 2), word(4 * w + 3), 0x7531);
    return join_signs(__byte_perm(early, late, 0x6420), __byte_perm(early, late, 0x7531));
  }
  // The largest 15-bit magnitude: as for floats, order is that of the bits.
  __device__ std::uint32_t magnitude() const {
    std::uint32_t result = word(0) & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < kNvfp4Block / 2; ++i) result = __vmaxu2(result, word(i) & 0x7FFF7FFFu);
    return max(result & 0xFFFFu, result >> 16);
  }
};

template <>
struct RawBlock<bf16> : RawPairs {
  __device__ float operator()(int i) const {
    return __uint_as_float(i % 2 == 0 ? word(i / 2) << 16 : word(i / 2) & 0xFFFF0000u);
  }
  __device__ std::uint32_t amax() const { return magnitude() << 16; }
};

template <>
struct RawBlock<fp16> : RawPairs {
  __device__ float operator()(int i) const {
    const __half_raw half{static_cast<unsigned short>(word(i / 2) >> (i % 2 * 16))};
    return __half2float(__half(half));
  }
  __device__ std::uint32_t amax() const {
    const __half_raw half{static_cast<unsigned short>(magnitude())};
    return __float_as_uint(__half2float(__half(half))) & kFloatMagnitude;
  }
};

// The bits of the largest finite magnitude.
template <class Block>
__device__ std::uint32_t finite_amax(const Block& block) {
  const std::uint32_t all = block.amax();
  if (all < kFloatInf) return all;
  std::uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) {
    const std::uint32_t bits = __float_as_uint(block(i)) & kFloatMagnitude;
    if (bits < kFloatInf) result = max(result, bits);
  }
  return result;
}

// kVectors vectors of 16 bytes, `step` elements apart. Data is read once: it leaves the caches first.
template <class T>
__device__ RawBlock<T> load_block(const T* from, int step, bool aligned) {
  RawBlock<T> block;
  constexpr int kPerVector = static_cast<int>(16 / sizeof(T));
#pragma unroll
  for (int v = 0; v < RawBlock<T>::kVectors; ++v) {
    const T* at = from + v * step;
    if (aligned) {
      block.raw[v] = __ldcs(reinterpret_cast<const uint4*>(at));
    } else {
      std::uint32_t words[4] = {};
#pragma unroll
      for (int i = 0; i < kPerVector; ++i) {
        if constexpr (sizeof(T) == 4) {
          words[i] = __float_as_uint(at[i]);
        } else {
          words[i / 2] |= static_cast<std::uint32_t>(at[i].bits) << (i % 2 * 16);
        }
      }
      block.raw[v] = make_uint4(words[0], words[1], words[2], words[3]);
    }
  }
  return block;
}

// Sources: load(row, block) gives a block.

template <class T>
struct RowSource {
  using Block = RawBlock<T>;
  const T* data;
  std::int64_t row_stride;
  bool aligned;
  const std::int32_t* row_map;

  __device__ Block load(std::int64_t row, std::int64_t block) const {
    const std::int64_t from = row_map == nullptr ? row : row_map[row];
    return load_block(data + from * row_stride + block * kNvfp4Block, static_cast<int>(16 / sizeof(T)),
                      aligned);
  }
};

struct UpColumnSource {
  using Block = RawBlock<bf16>;
  const bf16* data;
  std::int64_t row_stride;
  bool aligned;

  __device__ Block load(std::int64_t row, std::int64_t block) const {
    return load_block(data + row * row_stride + interleaved_up(block * kNvfp4Block), 2 * kInterleaveGroup,
                      aligned);
  }
};

template <Activation kKind>
struct ActivationSource {
  using Block = RawBlock<bf16>;
  const bf16* gate;
  std::int64_t gate_stride;
  const bf16* up;
  std::int64_t up_stride;
  bool aligned;
  float limit, alpha;

  __device__ Block load(std::int64_t row, std::int64_t block) const {
    const Block u = load_block(up + row * up_stride + block * kNvfp4Block, 8, aligned);
    Block g = u;
    if constexpr (kKind != Activation::kRelu2) {
      g = load_block(gate + row * gate_stride + block * kNvfp4Block, 8, aligned);
    }
    const ActivationConfig config{kKind, limit, alpha};
    Block h;
#pragma unroll
    for (int v = 0; v < 2; ++v) {
      float gates[2][4], values[2][4];
#pragma unroll
      for (int i = 0; i < 8; ++i) gates[i / 4][i % 4] = g(v * 8 + i), values[i / 4][i % 4] = u(v * 8 + i);
      if (!activate_all(config, gates, values)) {
#pragma unroll
        for (int i = 0; i < 8; ++i) values[i / 4][i % 4] = activate_any(config, g(v * 8 + i), u(v * 8 + i)).h;
      }
      std::uint32_t words[4];
#pragma unroll
      for (int w = 0; w < 4; ++w) {
        const __nv_bfloat162 pair =
            __floats2bfloat162_rn(values[w / 2][w % 2 * 2], values[w / 2][w % 2 * 2 + 1]);
        words[w] = *reinterpret_cast<const std::uint32_t*>(&pair);
      }
      h.raw[v] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    return h;
  }
};

}  // namespace megamoe::cuda
