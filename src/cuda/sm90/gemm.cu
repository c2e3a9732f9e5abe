// gemm.cu: picks the instance of the grouped GEMM kernel and launches it.
#include "cuda/sm90/gemm.h"

#include <utility>

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
  kernel<<<multiprocessors, Config::kThreads, kShared, stream>>>(params, epilogue);
  return cudaGetLastError();
}

// The instance of this width.
template <class Epilogue, int... kEighths>
cudaError_t launch_width(int tokens, const GemmParams& params, const Epilogue& epilogue, cudaStream_t stream,
                         std::integer_sequence<int, kEighths...>) {
  cudaError_t status = cudaErrorInvalidValue;
  (void)((tokens == 8 * (kEighths + 1) &&
          (status = launch<GemmConfig<8 * (kEighths + 1), 4>>(params, epilogue, stream), true)) ||
         ...);
  return status;
}

template <class Epilogue>
cudaError_t launch_tile(const TileChoice& tile, const GemmParams& params, const Epilogue& epilogue,
                        cudaStream_t stream) {
  if (tile.row_groups == 1) return launch<GemmConfig<8, 1>>(params, epilogue, stream);
  return launch_width(tile.tokens, params, epilogue, stream,
                      std::make_integer_sequence<int, kMaxTileTokens / 8>{});
}

template <class Epilogue>
cudaError_t run(const GroupedInput& in, WeightRole role, const Epilogue& epilogue, cudaStream_t stream) {
  const bool valid = in.experts > 0 && in.experts <= kMaxExperts && in.cols > 0 && in.cols % 16 == 0 &&
                     in.cols <= kMaxSize && in.weight_rows <= kMaxSize && in.max_rows < (1ll << 31) &&
                     in.tokens.format != ActivationFormat::kFp8;
  if (!valid) return cudaErrorInvalidValue;
  if (in.max_rows == 0) return cudaSuccess;
  GemmParams params{};
  params.weights = in.weights;
  params.tiles = static_cast<int>(tiles_of(role, in.weight_rows));
  params.cols = static_cast<int>(in.cols);
  params.offsets = in.offsets;
  params.experts = in.experts;
  params.gather = in.gather;
  if (in.tokens.format == ActivationFormat::kBf16) {
    params.tokens = reinterpret_cast<const std::uint8_t*>(in.tokens.values);
    params.token_stride = static_cast<std::uint32_t>(in.tokens.row_stride * 2);
  } else {
    // NVFP4 tokens are decoded once, without their tensor scales, rather than by every tile that reads them.
    const cuda::Nvfp4In tokens{.codes = in.tokens.codes, .scales = in.tokens.block_scales};
    const cuda::RowCount rows(in.tokens.rows, in.gather == nullptr ? in.offsets + in.experts : nullptr);
    const cudaError_t status =
        cuda::dequantize(tokens, rows, in.cols, cuda::ElementType::kBf16, in.workspace, stream);
    if (status != cudaSuccess) return status;
    params.tokens = static_cast<const std::uint8_t*>(in.workspace);
    params.token_stride = static_cast<std::uint32_t>(in.cols * 2);
  }
  const TileChoice tile = choose_tile(in.max_rows, in.experts);
  if ((in.max_rows / tile.tokens + in.experts) * params.tiles > INT32_MAX) return cudaErrorInvalidValue;
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
