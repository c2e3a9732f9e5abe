// host_pass.h: a pass on a GPU for operands in host memory.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>

#include "backend/pass.h"
#include "cuda/device.h"

namespace megamoe::cuda {

// Keeps a stream and one buffer, which grows with the number of tokens.
class HostPass {
 public:
  explicit HostPass(int device) : device_(device) {}

  // As DevicePass::run_from_host says, by pass.enqueue().
  std::int64_t run(const DevicePass& pass, MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                   MatrixView<const float> weights, MatrixView<bf16> y);

 private:
  int device_;
  std::mutex mutex_;
  std::unique_ptr<Stream> stream_;  // made by the first run
  DeviceBuffer buffer_;
};

}  // namespace megamoe::cuda
