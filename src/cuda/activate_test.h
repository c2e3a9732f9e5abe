// activate_test.h: what activate_test.cu runs on the device.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "layer/activation.h"

namespace megamoe::cuda {

// The largest distances from the definitions, in last bits, over every z from kLeastGate up; and what
// activate.cuh takes them to be at most.
struct SigmoidErrors {
  std::uint32_t sigmoid, silu, sigmoid_allowed, silu_allowed;
};
cudaError_t sigmoid_errors_for_test(SigmoidErrors* worst);

enum class Gates {
  kAnyBits,          // gates and ups: any bits
  kUsual,            // gates within 4, ups within 2
  kBesideMidpoints,  // gates within 4, ups that make an h within some last bits of a midpoint of BF16
};
struct NearCounts {
  unsigned long long told;   // groups of two fours of which activate_nearly() was sure
  unsigned long long wrong;  // elements of theirs whose BF16 is not the definition's
};
// `count` groups of two fours; by the activation's own steps, or by those of any.
cudaError_t activate_nearly_for_test(const ActivationConfig& config, bool by_any, Gates gates,
                                     std::int64_t count, NearCounts* counts);

}  // namespace megamoe::cuda
