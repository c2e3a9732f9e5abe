// cluster.h: CTAs that run together, adjacent blocks; one is a cluster by itself.
#pragma once

namespace megamoe::ptx {

// Waits for all threads of the cluster.
__device__ inline void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;\n" ::
          : "memory");
}

}  // namespace megamoe::ptx
