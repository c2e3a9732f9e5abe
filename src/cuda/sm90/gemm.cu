// gemm.cu: picks the instance of the grouped GEMM kernel and launches it.
#include "cuda/sm90/gemm.h"

#include <atomic>
#include <utility>

#include "cuda/gather.h"
#include "cuda/launch.h"
#include "cuda/quantize.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

namespace megamoe::sm90 {
namespace {

// H and I at most: pieces of work are counted in 32 bits.
constexpr std::int64_t kMaxSize = 1 << 20;

template <class Config, class Epilogue>
cudaError_t launch(const GemmParams& params, const Epilogue& epilogue, cudaStream_t stream) {
  const auto kernel = grouped_gemm_kernel<Config, Epilogue>;
  constexpr int kShared = static_cast<int>(sizeof(GemmStorage<Config>));
  static_assert(kShared <= 227 * 1024, "more shared memory than a CTA can have");
  int device = 0, multiprocessors = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
      e != cudaSuccess) {
    return e;
  }
  return cuda::launch_early(kernel, multiprocessors, Config::kThreads, kShared, stream, params, epilogue);
}

// cuTensorMapEncodeTiled, from the driver: a program that links with it would not start without one.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
cudaError_t find_encode_tiled(EncodeTiled* encode) {
  static std::atomic<EncodeTiled> found = nullptr;  // any thread may be the first, and more than one
  *encode = found;
  if (*encode != nullptr) return cudaSuccess;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  found = *encode = reinterpret_cast<EncodeTiled>(entry);
  return cudaSuccess;
}

// BF16 [rows, cols], in boxes of a chunk's columns by `box_rows`, as the swizzled tiles of wgmma want them.
cudaError_t describe_tokens(const void* data, std::int64_t rows, std::int64_t cols, std::int64_t row_bytes,
                            int box_rows, CUtensorMap* map) {
  EncodeTiled encode = nullptr;
  if (const cudaError_t status = find_encode_tiled(&encode); status != cudaSuccess) return status;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(cols), static_cast<cuuint64_t>(rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
  const cuuint32_t box[2] = {kChunkCols, static_cast<cuuint32_t>(box_rows)}, steps[2] = {1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// The instance of this width.
template <class Epilogue, int... kEighths>
cudaError_t launch_width(int tokens, const GemmParams& params, const Epilogue& epilogue, cudaStream_t stream,
                         std::integer_sequence<int, kEighths...>) {
  cudaError_t status = cudaErrorInvalidValue;
  const auto one = [&]<int kTokens>() {
    status = launch<GemmConfig<kTokens, row_groups_of(kTokens), 1>>(params, epilogue, stream);
  };
  (void)((tokens == 8 * (kEighths + 1) && (one.template operator()<8 * (kEighths + 1)>(), true)) || ...);
  return status;
}

template <class Epilogue>
cudaError_t launch_tile(const TileChoice& tile, const GemmParams& params, const Epilogue& epilogue,
                        cudaStream_t stream) {
  if (tile.row_groups == 1) return launch<GemmConfig<8, 1, 4>>(params, epilogue, stream);
  return launch_width(tile.tokens, params, epilogue, stream,
                      std::make_integer_sequence<int, kWideTile / 8>{});
}

// BF16 rows in expert order: the tokens themselves, or made of them at `workspace`. NVFP4 tokens are decoded
// here, once and without their tensor scales, rather than by every tile that reads them.
cudaError_t order_tokens(const GroupedInput& in, cudaStream_t stream, ActivationRows* ordered) {
  *ordered = in.tokens;
  if (in.tokens.format == ActivationFormat::kBf16 && in.gather == nullptr) return cudaSuccess;
  auto* made = static_cast<bf16*>(in.workspace);
  const cuda::RowCount rows(in.max_rows, in.offsets + in.experts);
  *ordered = {.rows = in.max_rows, .cols = in.cols, .row_stride = in.cols, .values = made};
  if (in.tokens.format == ActivationFormat::kBf16) {
    return cuda::gather_rows(in.tokens.values, in.tokens.row_stride, in.gather, rows, in.cols, made, stream);
  }
  const cuda::Nvfp4In tokens{
      .codes = in.tokens.codes, .scales = in.tokens.block_scales, .row_map = in.gather};
  return cuda::dequantize(tokens, rows, in.cols, cuda::ElementType::kBf16, made, stream);
}

template <class Epilogue>
cudaError_t run(const GroupedInput& in, WeightRole role, const Epilogue& epilogue, cudaStream_t stream) {
  const bool valid = in.experts > 0 && in.experts <= kMaxExperts && in.cols > 0 && in.cols % 16 == 0 &&
                     in.cols <= kMaxSize && in.weight_rows <= kMaxSize && in.max_rows < (1ll << 31) &&
                     in.tokens.format != ActivationFormat::kFp8;
  if (!valid) return cudaErrorInvalidValue;
  const TileChoice tile = in.tile == TileChoice{} ? choose_tile(in.max_rows, in.experts) : in.tile;
  if (!is_tile(tile)) return cudaErrorInvalidValue;
  if (in.max_rows == 0) return cudaSuccess;
  GemmParams params{};
  params.weights = in.weights;
  params.tiles = static_cast<int>(tiles_of(role, in.weight_rows));
  params.cols = static_cast<int>(in.cols);
  params.offsets = in.offsets;
  params.experts = in.experts;
  if ((in.max_rows / tile.tokens + in.experts) * params.tiles > INT32_MAX) return cudaErrorInvalidValue;
  ActivationRows tokens;
  if (const cudaError_t status = order_tokens(in, stream, &tokens); status != cudaSuccess) return status;
  if (const cudaError_t status = describe_tokens(tokens.values, tokens.rows, in.cols, tokens.row_stride * 2,
                                                 tile.tokens, &params.tokens);
      status != cudaSuccess) {
    return status;
  }
  return launch_tile(tile, params, epilogue, stream);
}

TokensIn tokens_in(const GroupedInput& in) {
  return {in.tokens.format == ActivationFormat::kNvfp4 ? in.tokens.scales : nullptr, in.gather};
}

}  // namespace

cudaError_t gemm1(const Gemm1& call, cudaStream_t stream) {
  if (call.mode == L1Output::kFp8) return cudaErrorInvalidValue;
  HiddenOut out{};
  out.mode = call.mode;
  out.intermediate = call.in.weight_rows;
  out.values = reinterpret_cast<__nv_bfloat16*>(call.out.values);
  out.codes = call.out.codes;
  out.block_scales = call.out.block_scales;
  out.tensor_scales = call.out.scales;
  out.saturated = call.saturated;
  if (call.activation.gated()) {
    const GatedEpilogue epilogue{
        out, call.activation, tokens_in(call.in), call.weight_scales, call.gate_bias, call.up_bias};
    return run(call.in, WeightRole::kGateUp, epilogue, stream);
  }
  if (call.mode == L1Output::kInterleavedBf16) return cudaErrorInvalidValue;
  const Relu2Epilogue epilogue{out, tokens_in(call.in), call.weight_scales, call.up_bias};
  return run(call.in, WeightRole::kPlain, epilogue, stream);
}

cudaError_t gemm2(const Gemm2& call, cudaStream_t stream) {
  const PlainEpilogue epilogue{call.in.weight_rows, tokens_in(call.in), call.weight_scales, call.bias,
                               call.out};
  return run(call.in, WeightRole::kPlain, epilogue, stream);
}

}  // namespace megamoe::sm90
