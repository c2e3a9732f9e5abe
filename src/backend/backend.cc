#include "backend/backend.h"

#include "backend/pass.h"

namespace megamoe {

std::unique_ptr<DevicePass> PreparedLayer::device_pass(const PassOptions&) const { return nullptr; }

std::string_view to_string(L1Output output) {
  switch (output) {
    case L1Output::kInterleavedBf16: return "interleaved-bf16";
    case L1Output::kCompactBf16: return "compact-bf16";
    case L1Output::kFp8: return "fp8";
    case L1Output::kNvfp4: return "nvfp4";
  }
  return "unknown";
}

}  // namespace megamoe
