// pairs.cuh: which expert a (token, slot) pair goes to.
#pragma once

#include <cstdint>

namespace megamoe::cuda {

// -1: left out.
__device__ inline int expert_of_pair(const std::int32_t* ids, const float* weights, int experts,
                                     std::int64_t pair) {
  const std::int32_t id = ids[pair];
  const float weight = weights[pair];
  return id >= 0 && id < experts && weight != 0.0f ? id : -1;
}

}  // namespace megamoe::cuda
