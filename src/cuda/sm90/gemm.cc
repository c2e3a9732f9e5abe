// gemm.cc: what a caller of the GEMMs asks before it calls them.
#include "cuda/sm90/gemm.h"

#include "base/check.h"

namespace megamoe::sm90 {

std::int64_t gemm_workspace_bytes(ActivationFormat format, std::int64_t rows, std::int64_t cols) {
  return format == ActivationFormat::kNvfp4 ? checked_mul(checked_mul(rows, cols), sizeof(bf16)) : 0;
}

}  // namespace megamoe::sm90
