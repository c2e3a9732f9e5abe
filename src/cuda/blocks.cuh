// blocks.cuh: 16 values in a thread's registers, of any element type, and where they come from.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/activate.cuh"
#include "cuda/bf16_pair.cuh"
#include "cuda/quantize.h"
#include "numerics/interleave.h"
#include "numerics/nvfp4.h"

namespace megamoe::cuda {

// 16 elements as they lie in memory, and element i of them as a float.
template <class T>
struct RawBlock;

template <>
struct RawBlock<float> {
  static constexpr int kVectors = 4, kSpareBits = 0;
  uint4 raw[kVectors];

  __device__ float operator()(int i) const {
    const uint4& v = raw[i / 4];
    return __uint_as_float(i % 4 == 0 ? v.x : i % 4 == 1 ? v.y : i % 4 == 2 ? v.z : v.w);
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
};

// The larger magnitude of two pairs of BF16, or of FP16, in each half, with some sign; NaN before all. Where
// there is no instruction for it: as for floats, order is that of the bits.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 860
__device__ inline std::uint32_t larger_bf16_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
__device__ inline std::uint32_t larger_fp16_pair(std::uint32_t a, std::uint32_t b) {
  std::uint32_t larger;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}
#else
__device__ inline std::uint32_t larger_bf16_pair(std::uint32_t a, std::uint32_t b) {
  return __vmaxu2(a & kPairMagnitudes, b & kPairMagnitudes);
}
__device__ inline std::uint32_t larger_fp16_pair(std::uint32_t a, std::uint32_t b) {
  return larger_bf16_pair(a, b);
}
#endif

// The largest 15-bit magnitude of a block of them, in the upper half.
template <class Larger>
__device__ inline std::uint32_t largest_magnitude(const RawPairs& block, const Larger& larger) {
  std::uint32_t pair = block.word(0);
#pragma unroll
  for (int i = 1; i < kNvfp4Block / 2; ++i) pair = larger(pair, block.word(i));
  return larger(pair, __byte_perm(pair, pair, 0x1032)) & 0x7FFF0000u;
}

template <>
struct RawBlock<bf16> : RawPairs {
  static constexpr int kSpareBits = 16;
  __device__ float operator()(int i) const {
    return i % 2 == 0 ? first_of(word(i / 2)) : second_of(word(i / 2));
  }
  __device__ std::uint32_t amax() const { return largest_magnitude(*this, larger_bf16_pair); }
};

template <>
struct RawBlock<fp16> : RawPairs {
  static constexpr int kSpareBits = 13;
  __device__ float operator()(int i) const {
    const __half_raw half{static_cast<unsigned short>(word(i / 2) >> (i % 2 * 16))};
    return __half2float(__half(half));
  }
  __device__ std::uint32_t amax() const {
    const __half_raw half{static_cast<unsigned short>(largest_magnitude(*this, larger_fp16_pair) >> 16)};
    return __float_as_uint(__half2float(__half(half))) & kFloatMagnitude;
  }
};

// The bits of the largest finite magnitude of a block, `all` being its amax().
template <class Block>
static __device__ __noinline__ std::uint32_t finite_amax_of_some(const Block block) {
  std::uint32_t result = 0;
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) {
    const std::uint32_t bits = __float_as_uint(block(i)) & kFloatMagnitude;
    if (bits < kFloatInf) result = max(result, bits);
  }
  return result;
}
template <class Block>
__device__ std::uint32_t finite_amax(const Block& block, std::uint32_t all) {
  return all < kFloatInf ? all : finite_amax_of_some(block);
}

// 16 bytes that lie anywhere. A call: rare, and else its loads would be there for every block, switched off.
template <class T>
static __device__ __noinline__ uint4 load_unaligned(const T* at) {
  std::uint32_t words[4] = {};
#pragma unroll
  for (int i = 0; i < static_cast<int>(16 / sizeof(T)); ++i) {
    if constexpr (sizeof(T) == 4) {
      words[i] = __float_as_uint(at[i]);
    } else {
      words[i / 2] |= static_cast<std::uint32_t>(at[i].bits) << (i % 2 * 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// kVectors vectors of 16 bytes, `step` elements apart. Data is read once: it leaves the caches first.
template <class T>
__device__ RawBlock<T> load_block(const T* from, int step, bool aligned) {
  RawBlock<T> block;
  const auto load = [&](const auto& vector) {
#pragma unroll
    for (int v = 0; v < RawBlock<T>::kVectors; ++v) block.raw[v] = vector(from + v * step);
  };
  if (aligned) {
    load([](const T* at) { return __ldcs(reinterpret_cast<const uint4*>(at)); });
  } else {
    load([](const T* at) { return load_unaligned(at); });
  }
  return block;
}

// Sources: row(row) gives what load(block) reads blocks of.

// Blocks one after the other; kSpread: each vector of 16 bytes is followed by one that is left out.
template <class T, bool kSpread = false>
struct RowBlocks {
  const T* data;
  bool aligned;

  __device__ RawBlock<T> load(int block) const {
    constexpr int kStep = static_cast<int>(16 / sizeof(T)) * (kSpread ? 2 : 1);
    return load_block(data + block * static_cast<std::int64_t>(kStep * RawBlock<T>::kVectors), kStep,
                      aligned);
  }
};

template <class T>
struct RowSource {
  using Block = RawBlock<T>;
  const T* data;
  std::int64_t row_stride;
  bool aligned;
  const std::int32_t* row_map;

  __device__ RowBlocks<T> row(std::int64_t row) const {
    return {data + (row_map == nullptr ? row : row_map[row]) * row_stride, aligned};
  }
};

struct UpColumnSource {
  using Block = RawBlock<bf16>;
  static_assert(kInterleaveGroup == 8, "a vector of up's columns follows one of gate's");
  const bf16* data;
  std::int64_t row_stride;
  bool aligned;

  __device__ RowBlocks<bf16, true> row(std::int64_t row) const {
    return {data + row * row_stride + interleaved_up(0), aligned};
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

  struct Row {
    RowBlocks<bf16> gate, up;
    ActivationConfig config;

    __device__ Block load(int block) const {
      const Block u = up.load(block);
      Block g = u;
      if constexpr (kKind != Activation::kRelu2) g = gate.load(block);
      Block h;
#pragma unroll
      for (int v = 0; v < 2; ++v) {
        std::uint32_t words[4];
#pragma unroll
        for (int first = 0; first < 8; first += 4) {
          float gates[1][4], values[1][4];
          const auto read = [&] {
#pragma unroll
            for (int i = 0; i < 4; ++i)
              gates[0][i] = g(v * 8 + first + i), values[0][i] = u(v * 8 + first + i);
          };
          read();
          if constexpr (kKind == Activation::kRelu2) {
#pragma unroll
            for (float& value : values[0]) value = activate(config, 0.0f, value).h;
          } else if (!activate_nearly(config, gates, values)) {
            read();
            float exact_gates[4], exact[4];  // in memory, but here alone
#pragma unroll
            for (int i = 0; i < 4; ++i) exact_gates[i] = gates[0][i], exact[i] = values[0][i];
            activate_exactly(config, exact_gates, exact);
#pragma unroll
            for (int i = 0; i < 4; ++i) values[0][i] = exact[i];
          }
#pragma unroll
          for (int i = 0; i < 4; i += 2) words[(first + i) / 2] = bf16_pair(values[0][i], values[0][i + 1]);
        }
        h.raw[v] = make_uint4(words[0], words[1], words[2], words[3]);
      }
      return h;
    }
  };
  __device__ Row row(std::int64_t row) const {
    return {{gate + row * gate_stride, aligned}, {up + row * up_stride, aligned}, {kKind, limit, alpha}};
  }
};

}  // namespace megamoe::cuda
