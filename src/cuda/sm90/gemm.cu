// gemm.cu: picks the instance of the grouped GEMM kernel and launches it.
#include "cuda/sm90/gemm.h"

#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/grouped_gemm.cuh"

namespace megamoe::sm90 {
namespace {

template <class Config, class Epilogue>
cudaError_t launch(const GemmParams& params, const Epilogue& epilogue, cudaStream_t stream) {
  const auto kernel = grouped_gemm_kernel<Config, Epilogue>;
  int device = 0, multiprocessors = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
      e != cudaSuccess) {
    return e;
  }
  if (const cudaError_t e =
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes<Config>());
      e != cudaSuccess) {
    return e;
  }
  kernel<<<multiprocessors, Config::kThreads, shared_bytes<Config>(), stream>>>(params, epilogue);
  return cudaGetLastError();
}

template <TokenFormat kFormat, class Epilogue>
cudaError_t launch_tile(const TileChoice& tile, const GemmParams& params, const Epilogue& epilogue,
                        cudaStream_t stream) {
  switch (tile.tokens) {
    case 8: return launch<GemmConfig<kFormat, 8, 1, 4, 8>>(params, epilogue, stream);
    case 16: return launch<GemmConfig<kFormat, 16, 1, 4, 6>>(params, epilogue, stream);
    case 32: return launch<GemmConfig<kFormat, 32, 1, 4, 4>>(params, epilogue, stream);
    case 64: return launch<GemmConfig<kFormat, 64, 2, 1, 8>>(params, epilogue, stream);
    default: return launch<GemmConfig<kFormat, 128, 2, 1, 6>>(params, epilogue, stream);
  }
}

template <class Epilogue>
cudaError_t run(const GroupedInput& in, WeightRole role, const Epilogue& epilogue, cudaStream_t stream) {
  const bool valid = in.experts > 0 && in.experts <= kMaxExperts && in.cols > 0 && in.cols % 16 == 0 &&
                     in.max_rows < (1ll << 31) && in.tokens.format != ActivationFormat::kFp8;
  if (!valid) return cudaErrorInvalidValue;
  if (in.max_rows == 0) return cudaSuccess;
  GemmParams params{};
  params.weights = in.weights;
  params.tiles = tiles_of(role, in.weight_rows);
  params.cols = in.cols;
  params.offsets = in.offsets;
  params.experts = in.experts;
  params.gather = in.gather;
  const TileChoice tile = choose_tile(in.max_rows, in.experts);
  if (in.tokens.format == ActivationFormat::kBf16) {
    params.tokens = in.tokens.values;
    params.token_stride = in.tokens.row_stride * 2;
    return launch_tile<TokenFormat::kBf16>(tile, params, epilogue, stream);
  }
  params.tokens = in.tokens.codes;
  params.token_stride = in.cols / 2;
  params.token_scales = in.tokens.block_scales;
  return launch_tile<TokenFormat::kNvfp4>(tile, params, epilogue, stream);
}

const float* tensor_scales(const GroupedInput& in) {
  return in.tokens.format == ActivationFormat::kNvfp4 ? in.tokens.scales : nullptr;
}

}  // namespace

std::int64_t gemm_workspace_bytes(ActivationFormat, std::int64_t, std::int64_t, int) { return 0; }

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
    const GatedEpilogue epilogue{out,
                                 call.activation,
                                 tensor_scales(call.in),
                                 call.in.gather,
                                 call.weight_scales,
                                 call.gate_bias,
                                 call.up_bias};
    return run(call.in, WeightRole::kGateUp, epilogue, stream);
  }
  if (call.mode == L1Output::kInterleavedBf16) return cudaErrorInvalidValue;
  const Relu2Epilogue epilogue{out, tensor_scales(call.in), call.in.gather, call.weight_scales, call.up_bias};
  return run(call.in, WeightRole::kPlain, epilogue, stream);
}

cudaError_t gemm2(const Gemm2& call, cudaStream_t stream) {
  const PlainEpilogue epilogue{call.in.weight_rows, tensor_scales(call.in), call.weight_scales, call.bias,
                               call.out};
  return run(call.in, WeightRole::kPlain, epilogue, stream);
}

}  // namespace megamoe::sm90
