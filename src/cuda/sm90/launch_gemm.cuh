// launch_gemm.cuh: picks the instance of the grouped GEMM kernel for a tile and launches it.
#pragma once

#include <utility>

#include "cuda/launch.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/grouped_gemm.cuh"

namespace megamoe::sm90 {

// Instances for the epilogues of epilogue.cuh, in gemm_bf16.cu and gemm_fp8.cu.
template <class Epilogue>
cudaError_t launch_bf16(const TileChoice& tile, const GemmParams& params, const Epilogue& epilogue,
                        cudaStream_t stream);
template <class Epilogue>
cudaError_t launch_fp8(const TileChoice& tile, const GemmParams& params, const Epilogue& epilogue,
                       cudaStream_t stream);

// A persistent kernel that has a Storage in shared memory: a CTA for every multiprocessor, in clusters.
template <class Storage, class... Params, class... Args>
cudaError_t launch_persistent(int cluster, void (*kernel)(Params...), int threads, cudaStream_t stream,
                              const Args&... args) {
  constexpr int kShared = static_cast<int>(sizeof(Storage));
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
  return cuda::launch_early_clusters(cluster, kernel, multiprocessors / cluster * cluster, threads, kShared,
                                     stream, args...);
}

template <class Config, class Epilogue>
cudaError_t launch(const GemmParams& params, const Epilogue& epilogue, cudaStream_t stream) {
  return launch_persistent<GemmStorage<Config>>(Config::kCluster, grouped_gemm_kernel<Config, Epilogue>,
                                                Config::kThreads, stream, params, epilogue);
}

// The instance for this tile, of those that do not share K.
template <OperandType kType, class Epilogue, int... kEighths>
cudaError_t launch_width(int tokens, const GemmParams& params, const Epilogue& epilogue, cudaStream_t stream,
                         std::integer_sequence<int, kEighths...>) {
  cudaError_t status = cudaErrorInvalidValue;
  const auto one = [&]<int kTokens>() {
    status = launch<GemmConfig<kType, kTokens, row_tiles_of(kType, kTokens), 1>>(params, epilogue, stream);
  };
  if (tokens == wide_tile(kType)) {
    one.template operator()<wide_tile(kType)>();
  } else if (tokens == widest_tile(kType)) {
    one.template operator()<widest_tile(kType)>();
  } else {
    (void)((tokens == 8 * (kEighths + 1) && (one.template operator()<8 * (kEighths + 1)>(), true)) || ...);
  }
  return status;
}
template <OperandType kType, class Epilogue>
cudaError_t launch_width(int tokens, const GemmParams& params, const Epilogue& epilogue,
                         cudaStream_t stream) {
  return launch_width<kType>(tokens, params, epilogue, stream,
                             std::make_integer_sequence<int, narrow_tile(kType) / 8>{});
}

}  // namespace megamoe::sm90
