// launch.h: kernel launches that report errors, for files that nvcc compiles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megamoe::cuda {

inline bool aligned_to(const void* pointer, int bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
}

// What the launches below share.
template <class... Params, class... Args>
cudaError_t launch_either(bool early, int cluster, void (*kernel)(Params...), std::int64_t blocks,
                          int threads, int shared, cudaStream_t stream, const Args&... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks < 0 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  cudaLaunchAttribute attributes[2] = {};
  unsigned count = 0;
  if (early) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (cluster > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count++].val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
  }
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<std::size_t>(shared);
  config.stream = stream;
  config.attrs = attributes;
  config.numAttrs = count;
  return cudaLaunchKernelEx(&config, kernel, static_cast<Params>(args)...);
}

// For a kernel of launch_early(), before it touches what the one before it reads or writes.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}
// The next kernel begins once every CTA has called this, or ended; one thread of a CTA is enough. Of what
// came before this kernel it promises as much as this CTA has waited for.
__device__ inline void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}
// Both; what came before this kernel the next one finds done even before it waits itself.
__device__ inline void await_previous_kernel() {
  wait_for_previous_kernel();
  let_next_kernel_begin();
}

// One-dimensional: the x axis alone takes more than 65,535 blocks. No blocks: nothing to do. The error of
// this launch, if any, is returned at once and not left for a later call.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), std::int64_t blocks, int threads, int shared,
                   cudaStream_t stream, const Args&... args) {
  return launch_either(false, 1, kernel, blocks, threads, shared, stream, args...);
}

// The same, but on GPUs that can (compute capability 9.0 and later) the kernel starts before the one ahead of
// it in the stream has ended: what a launch costs is hidden. The kernel must call await_previous_kernel().
// `cluster` adjacent blocks run together.
template <class... Params, class... Args>
cudaError_t launch_early_clusters(int cluster, void (*kernel)(Params...), std::int64_t blocks, int threads,
                                  int shared, cudaStream_t stream, const Args&... args) {
  int device = 0, major = 0;
  if (const cudaError_t e = cudaGetDevice(&device); e != cudaSuccess) return e;
  if (const cudaError_t e = cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
      e != cudaSuccess) {
    return e;
  }
  return launch_either(major >= 9, cluster, kernel, blocks, threads, shared, stream, args...);
}
template <class... Params, class... Args>
cudaError_t launch_early(void (*kernel)(Params...), std::int64_t blocks, int threads, int shared,
                         cudaStream_t stream, const Args&... args) {
  return launch_early_clusters(1, kernel, blocks, threads, shared, stream, args...);
}

}  // namespace megamoe::cuda
