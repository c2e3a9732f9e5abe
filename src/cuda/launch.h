// launch.h: kernel launches that report errors, for files that nvcc compiles.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace megamoe::cuda {

inline bool aligned_to(const void* pointer, int bytes) {
  return reinterpret_cast<std::uintptr_t>(pointer) % static_cast<std::uintptr_t>(bytes) == 0;
}

// One-dimensional: the x axis alone takes more than 65,535 blocks. No blocks: nothing to do. The error of
// this launch, if any, is returned at once and not left for a later call.
template <class... Params, class... Args>
cudaError_t launch(void (*kernel)(Params...), std::int64_t blocks, int threads, int shared,
                   cudaStream_t stream, const Args&... args) {
  if (blocks == 0) return cudaSuccess;
  if (blocks < 0 || blocks > INT32_MAX) return cudaErrorInvalidValue;
  kernel<<<static_cast<unsigned>(blocks), static_cast<unsigned>(threads), static_cast<std::size_t>(shared),
           stream>>>(args...);
  return cudaGetLastError();
}

}  // namespace megamoe::cuda
