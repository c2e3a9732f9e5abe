// quantize.cu: one CTA for each row, blocks of 16 columns in a thread's registers.
#include "cuda/blocks.cuh"
#include "cuda/encode.cuh"
#include "cuda/launch.h"
#include "cuda/pairs.cuh"
#include "cuda/ptx/flag.h"

namespace megamoe::cuda {
namespace {

constexpr int kMaxThreads = 512;

int threads_for(std::int64_t cols, int held) {
  const std::int64_t wanted = (cols / kNvfp4Block + held - 1) / held;
  return static_cast<int>(wanted >= kMaxThreads ? kMaxThreads : (wanted + 31) / 32 * 32);
}

// The maximum over the CTA, for every thread; `shared` has a word for each warp.
__device__ std::uint32_t cta_max(std::uint32_t value, std::uint32_t* shared) {
  value = __reduce_max_sync(~0u, value);
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
  __syncthreads();
  const unsigned warps = blockDim.x / 32;
  return __reduce_max_sync(~0u, threadIdx.x % 32 < warps ? shared[threadIdx.x % 32] : 0u);
}

__device__ void add_to(unsigned long long* total, int count) {
  if (total == nullptr) return;
  const int sum = __reduce_add_sync(~0u, count);
  if (sum > 0 && threadIdx.x % 32 == 0) atomicAdd(total, static_cast<unsigned long long>(sum));
}

__device__ bool beyond_end(const std::int64_t* actual_rows) {
  return actual_rows != nullptr && blockIdx.x >= *actual_rows;
}

// Block i of this thread; that of the first one of its warp.
__device__ int block_of(int i) { return static_cast<int>(threadIdx.x + i * blockDim.x); }
__device__ int warps_block(int i) { return block_of(i) - static_cast<int>(threadIdx.x % 32); }

// Blocks of a row in a thread's registers, and what Block::amax() says of them. Where a row has no block
// more, its last one stands in: lanes of a warp go the same way.
template <class Source, int kHeld>
struct Held {
  typename Source::Block blocks[kHeld];
  std::uint32_t amax[kHeld];

  template <class Row>
  __device__ Held(const Row& row, int count) {
#pragma unroll
    for (int i = 0; i < kHeld; ++i) blocks[i] = row.load(min(block_of(i), count - 1));
#pragma unroll
    for (int i = 0; i < kHeld; ++i) amax[i] = blocks[i].amax();
  }
};

// Calls visit(block, its values, their amax) for every block of `row` that is this thread's, of which the
// first are held; lanes of a warp together, beyond the last block with that one's values.
template <class Source, int kHeld, class Row, class Visit>
__device__ void visit_blocks(const Row& row, int blocks, const Held<Source, kHeld>& held,
                             const Visit& visit) {
#pragma unroll
  for (int i = 0; i < kHeld; ++i) {
    if (warps_block(i) < blocks) visit(block_of(i), held.blocks[i], held.amax[i]);
  }
  for (int i = kHeld; warps_block(i) < blocks; ++i) {
    const auto values = row.load(min(block_of(i), blocks - 1));
    visit(block_of(i), values, values.amax());
  }
}

// The bits of a row's largest finite magnitude, for every thread.
template <class Source, int kHeld, class Row>
__device__ std::uint32_t row_amax(const Row& row, int blocks, const Held<Source, kHeld>& held) {
  __shared__ std::uint32_t shared[2][kMaxThreads / 32];
  std::uint32_t all = 0;
  visit_blocks(row, blocks, held, [&](int, const auto&, std::uint32_t amax) { all = max(all, amax); });
  all = cta_max(all, shared[0]);
  if (all < kFloatInf) return all;
  std::uint32_t finite = 0;
  visit_blocks(row, blocks, held, [&](int, const auto& block, std::uint32_t amax) {
    finite = max(finite, finite_amax(block, amax));
  });
  return cta_max(finite, shared[1]);
}

// One block of a row, as codes and scale or decoded.
template <bool kDecoded>
__device__ void store_block(const Nvfp4Out& out, std::int64_t row, int block, int blocks,
                            const EncodedBlock& encoded) {
  if constexpr (kDecoded) {
    const float scale = decoding_scale(encoded.scale.code);
    std::uint32_t words[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      words[i] = decode_pair((i < 4 ? encoded.codes.x : encoded.codes.y) >> (i % 4 * 8), scale);
    for (int copy = 0; copy < out.copies; ++copy) {
      const std::int64_t to = out.slot_to_row == nullptr ? row : out.slot_to_row[row * out.copies + copy];
      if (to < 0) continue;
      auto* at = reinterpret_cast<uint4*>(out.values) + (to * blocks + block) * 2;
      at[0] = make_uint4(words[0], words[1], words[2], words[3]);
      at[1] = make_uint4(words[4], words[5], words[6], words[7]);
    }
  } else {
    __stcs(reinterpret_cast<uint2*>(out.codes) + row * blocks + block, encoded.codes);
    out.scales[row * blocks + block] = encoded.scale.code;
  }
}

// Blocks that a thread holds, and registers: as many rows at a time as hide each other's waits, of 7168
// columns five a multiprocessor or, of BF16 and FP16 by row, seven. There four blocks share what a warp does
// for the row's tensor scale, a good part of what it does for two blocks.
template <class Source, bool kDynamic, bool kDecoded>
struct Config {
  static constexpr int kHeld = 2, kRegisters = 56;
};
template <class T>
requires(RawBlock<T>::kSpareBits > 0) struct Config<RowSource<T>, true, false> {
  static constexpr int kHeld = 4, kRegisters = 72;
};
template <bool kDecoded>
struct Config<RowSource<float>, true, kDecoded> {
  static constexpr int kHeld = 2, kRegisters = 64;
};

// A row, by a CTA's threads.
template <class Source, bool kDynamic, bool kDecoded>
__device__ __forceinline__ void quantize_row(const Source& source, std::int64_t row, int blocks,
                                             const Nvfp4Out& out) {
  const PairRows& pairs = out.pairs;
  const bool is_pair = !kDynamic && pairs.ids != nullptr;
  const auto from = source.row(is_pair ? row / pairs.top_k : row);
  const Held<Source, Config<Source, kDynamic, kDecoded>::kHeld> held(from, blocks);
  float g;
  if (is_pair) {
    const int expert = expert_of_pair(pairs.ids, pairs.weights, pairs.experts, row);
    if (expert < 0) return;
    g = pairs.tensor_scales[expert];
  } else if constexpr (kDynamic) {
    g = nvfp4_tensor_scale(__uint_as_float(row_amax(from, blocks, held)));
    if (threadIdx.x == 0) out.tensor_scales[row] = g;
  } else if (out.constant > 0.0f) {
    g = out.constant;
    if (threadIdx.x == 0) out.tensor_scales[row] = g;
  } else {
    g = out.tensor_scales[row];
  }
  const RowEncoder<typename Source::Block, kDynamic> encoder(g);
  int saturated = 0;
  bool all_common = true;
  visit_blocks(from, blocks, held, [&](int block, const auto& values, std::uint32_t amax) {
    EncodedBlock encoded;
    const bool common = encoder.encode(values, amax, encoded);
    if (block >= blocks) return;
    all_common &= common;
    saturated += encoded.scale.saturated;
    store_block<kDecoded>(out, row, block, blocks, encoded);
  });
  // Last, and from memory again, so that the usual way keeps no registers for it.
  if (!all_common) {
    saturated = 0;
#pragma unroll 1
    for (int block = static_cast<int>(threadIdx.x); block < blocks; block += static_cast<int>(blockDim.x)) {
      const EncodedBlock encoded = encode_any(from.load(block), g);
      store_block<kDecoded>(out, row, block, blocks, encoded);
      saturated += encoded.scale.saturated;
    }
  }
  add_to(out.saturated, saturated);
}

template <class Source, bool kDynamic, bool kDecoded>
__global__ void __maxnreg__((Config<Source, kDynamic, kDecoded>::kRegisters))
    quantize_kernel(const __grid_constant__ Source source, const std::int64_t* actual_rows, int blocks,
                    const __grid_constant__ Nvfp4Out out) {
  const bool beside_previous = out.rows_done != nullptr;
  if (beside_previous) {
    let_next_kernel_begin();
  } else {
    await_previous_kernel();
    if (beyond_end(actual_rows)) return;
  }
  quantize_row<Source, kDynamic, kDecoded>(source, blockIdx.x, blocks, out);
  if (!beside_previous) return;
  __syncthreads();
  if (threadIdx.x == 0) ptx::add_release(out.rows_done, 1);
  // Who waits for this kernel counts on the one before it, too; for which a CTA is enough.
  if (blockIdx.x == 0) wait_for_previous_kernel();
}

template <class Source>
cudaError_t launch_quantize(const Source& source, const RowCount& rows, std::int64_t cols, TensorScales mode,
                            Nvfp4Out out, cudaStream_t stream) {
  if (mode != TensorScales::kConstant) {
    out.constant = 0.0f;
  } else if (!(out.constant > 0.0f)) {
    return cudaErrorInvalidValue;
  }
  if (out.rows_done != nullptr && rows.actual != nullptr) return cudaErrorInvalidValue;
  if (mode != TensorScales::kOfExpert) {
    out.pairs = {};
  } else if (out.pairs.ids == nullptr || out.pairs.top_k < 1) {
    return cudaErrorInvalidValue;
  }
  if (cols % kNvfp4Block != 0 || cols > INT32_MAX || !aligned_to(out.codes, 8) || !aligned_to(out.values, 16))
    return cudaErrorInvalidValue;
  if (cols == 0) return cudaSuccess;
  const int blocks = static_cast<int>(cols / kNvfp4Block);
  const bool dynamic = mode == TensorScales::kDynamicRow, decoded = out.values != nullptr;
  const auto run = [&]<bool kDynamic, bool kDecoded>() {
    return launch_early(quantize_kernel<Source, kDynamic, kDecoded>, rows.most,
                        threads_for(cols, Config<Source, kDynamic, kDecoded>::kHeld), 0, stream, source,
                        rows.actual, blocks, out);
  };
  if (dynamic)
    return decoded ? run.template operator()<true, true>() : run.template operator()<true, false>();
  return decoded ? run.template operator()<false, true>() : run.template operator()<false, false>();
}

constexpr int kAmaxHeld = 2;

template <class Source>
__global__ void __launch_bounds__(kMaxThreads)
    row_amax_kernel(const __grid_constant__ Source source, const std::int64_t* actual_rows, int blocks,
                    float* amax) {
  await_previous_kernel();
  if (beyond_end(actual_rows)) return;
  const auto from = source.row(blockIdx.x);
  const std::uint32_t result =
      blocks == 0 ? 0 : row_amax(from, blocks, Held<Source, kAmaxHeld>(from, blocks));
  if (threadIdx.x == 0) amax[blockIdx.x] = __uint_as_float(result);
}

template <class Source>
cudaError_t launch_row_amax(const Source& source, const RowCount& rows, std::int64_t cols, float* amax,
                            cudaStream_t stream) {
  if (cols % kNvfp4Block != 0 || cols > INT32_MAX) return cudaErrorInvalidValue;
  return launch_early(row_amax_kernel<Source>, rows.most,
                      threads_for(cols > 0 ? cols : kNvfp4Block, kAmaxHeld), 0, stream, source, rows.actual,
                      static_cast<int>(cols / kNvfp4Block), amax);
}

// A CTA for each group.
__global__ void __launch_bounds__(kMaxThreads)
    group_tensor_scales_kernel(const float* amax, const std::int64_t* offsets, std::int64_t rows,
                               float* tensor_scales) {
  await_previous_kernel();
  __shared__ std::uint32_t shared[kMaxThreads / 32];
  const std::int64_t begin = offsets != nullptr ? offsets[blockIdx.x] : 0;
  const std::int64_t end = offsets != nullptr ? offsets[blockIdx.x + 1] : rows;
  std::uint32_t largest = 0;
  for (std::int64_t r = begin + threadIdx.x; r < end; r += kMaxThreads) {
    largest = max(largest, __float_as_uint(amax[r]));
  }
  const float g = nvfp4_tensor_scale(__uint_as_float(cta_max(largest, shared)));
  for (std::int64_t r = begin + threadIdx.x; r < end; r += kMaxThreads) tensor_scales[r] = g;
}

// `amax` holds 0 before. A maximum does not depend on the order it is taken in; floats of one sign order as
// their bits do.
template <class Source>
__global__ void __launch_bounds__(kMaxThreads)
    tensor_amax_kernel(const __grid_constant__ Source source, int blocks, unsigned* amax) {
  const auto from = source.row(blockIdx.x);
  const std::uint32_t result = row_amax(from, blocks, Held<Source, kAmaxHeld>(from, blocks));
  if (threadIdx.x == 0 && result > 0) atomicMax(amax, result);
}

template <bool kF32>
__global__ void __launch_bounds__(256)
    dequantize_kernel(const __grid_constant__ Nvfp4In x, const __grid_constant__ RowCount rows,
                      std::int64_t blocks, uint4* out) {
  await_previous_kernel();
  const std::int64_t at = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (at >= rows.count() * blocks) return;
  const std::int64_t row = at / blocks,
                     from = x.row_map == nullptr ? at : x.row_map[row] * blocks + at % blocks;
  const float g = x.tensor_scales == nullptr ? 1.0f : x.tensor_scales[x.one_tensor_scale ? 0 : from / blocks];
  const std::uint8_t byte = x.scales[from];
  float scale = decoding_scale(byte & 0x7Fu);
  if (byte & 0x80u) scale = -scale;
  const uint2 codes = reinterpret_cast<const uint2*>(x.codes)[from];
  float values[kNvfp4Block];
#pragma unroll
  for (int i = 0; i < kNvfp4Block; ++i) {
    values[i] = __fmul_rn(decode_e2m1((i < 8 ? codes.x : codes.y) >> (i % 8 * 4), scale), g);
  }
  constexpr int kVectors = kF32 ? 4 : 2;
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    std::uint32_t words[4];
#pragma unroll
    for (int w = 0; w < 4; ++w) {
      if constexpr (kF32) {
        words[w] = __float_as_uint(values[v * 4 + w]);
      } else {
        words[w] = bf16_pair(values[v * 8 + w * 2], values[v * 8 + w * 2 + 1]);
      }
    }
    out[at * kVectors + v] = make_uint4(words[0], words[1], words[2], words[3]);
  }
}

// Calls run(source) with the RowSource of x's element type.
template <class Run>
cudaError_t with_rows(const ElementRows& x, const std::int32_t* row_map, const Run& run) {
  const auto source = [&]<class T>(const T* data) {
    const bool aligned =
        aligned_to(data, 16) && x.row_stride * static_cast<std::int64_t>(sizeof(T)) % 16 == 0;
    return run(RowSource<T>{data, x.row_stride, aligned, row_map});
  };
  switch (x.type) {
    case ElementType::kBf16: return source(static_cast<const bf16*>(x.data));
    case ElementType::kFp16: return source(static_cast<const fp16*>(x.data));
    case ElementType::kF32: return source(static_cast<const float*>(x.data));
  }
  return cudaErrorInvalidValue;
}

}  // namespace

cudaError_t quantize(const ElementRows& x, const std::int32_t* row_map, const RowCount& rows,
                     std::int64_t cols, TensorScales mode, const Nvfp4Out& out, cudaStream_t stream) {
  return with_rows(
      x, row_map, [&](const auto& source) { return launch_quantize(source, rows, cols, mode, out, stream); });
}

cudaError_t deinterleave_quantize(const bf16* x, std::int64_t row_stride, const RowCount& rows,
                                  std::int64_t cols, TensorScales mode, const Nvfp4Out& out,
                                  cudaStream_t stream) {
  const bool aligned = aligned_to(x, 16) && row_stride % 8 == 0;
  return launch_quantize(UpColumnSource{x, row_stride, aligned}, rows, cols, mode, out, stream);
}

cudaError_t swiglu_quantize(const ActivationConfig& activation, const bf16* gate, std::int64_t gate_stride,
                            const bf16* up, std::int64_t up_stride, std::int64_t rows, std::int64_t cols,
                            TensorScales mode, const Nvfp4Out& out, cudaStream_t stream) {
  const bool aligned =
      aligned_to(gate, 16) && aligned_to(up, 16) && gate_stride % 8 == 0 && up_stride % 8 == 0;
  const auto run = [&]<Activation kKind>() {
    const ActivationSource<kKind> source{
        gate, gate_stride, up, up_stride, aligned, activation.limit, activation.alpha};
    return launch_quantize(source, rows, cols, mode, out, stream);
  };
  switch (activation.kind) {
    case Activation::kSwiGlu: return run.template operator()<Activation::kSwiGlu>();
    case Activation::kSwiGluClamped: return run.template operator()<Activation::kSwiGluClamped>();
    case Activation::kGptOss: return run.template operator()<Activation::kGptOss>();
    case Activation::kRelu2: return run.template operator()<Activation::kRelu2>();
  }
  return cudaErrorInvalidValue;
}

cudaError_t dequantize(const Nvfp4In& x, const RowCount& rows, std::int64_t cols, ElementType type, void* out,
                       cudaStream_t stream) {
  if (cols % kNvfp4Block != 0 || type == ElementType::kFp16 || !aligned_to(x.codes, 8) ||
      !aligned_to(out, 16))
    return cudaErrorInvalidValue;
  const std::int64_t blocks = cols / kNvfp4Block;
  const auto kernel = type == ElementType::kF32 ? dequantize_kernel<true> : dequantize_kernel<false>;
  return launch_early(kernel, (rows.most * blocks + 255) / 256, 256, 0, stream, x, rows, blocks,
                      static_cast<uint4*>(out));
}

cudaError_t row_amax(const ElementRows& x, const RowCount& rows, std::int64_t cols, float* amax,
                     cudaStream_t stream) {
  return with_rows(x, nullptr,
                   [&](const auto& source) { return launch_row_amax(source, rows, cols, amax, stream); });
}

cudaError_t deinterleave_row_amax(const bf16* x, std::int64_t row_stride, const RowCount& rows,
                                  std::int64_t cols, float* amax, cudaStream_t stream) {
  const bool aligned = aligned_to(x, 16) && row_stride % 8 == 0;
  return launch_row_amax(UpColumnSource{x, row_stride, aligned}, rows, cols, amax, stream);
}

cudaError_t group_tensor_scales(const float* amax, const std::int64_t* offsets, int groups, std::int64_t rows,
                                float* tensor_scales, cudaStream_t stream) {
  return launch_early(group_tensor_scales_kernel, offsets != nullptr ? groups : 1, kMaxThreads, 0, stream,
                      amax, offsets, rows, tensor_scales);
}

cudaError_t tensor_amax(const ElementRows& x, std::int64_t rows, std::int64_t cols, float* amax,
                        cudaStream_t stream) {
  if (cols % kNvfp4Block != 0 || cols > INT32_MAX) return cudaErrorInvalidValue;
  const cudaError_t status = cudaMemsetAsync(amax, 0, sizeof(float), stream);
  if (status != cudaSuccess || cols == 0) return status;
  return with_rows(x, nullptr, [&]<class T>(const RowSource<T>& source) {
    return launch(tensor_amax_kernel<RowSource<T>>, rows, threads_for(cols, kAmaxHeld), 0, stream, source,
                  static_cast<int>(cols / kNvfp4Block), reinterpret_cast<unsigned*>(amax));
  });
}

}  // namespace megamoe::cuda
