// gemm_few.cu: the kernels of both GEMMs for few rows.
#include "cuda/sm90/few_rows.cuh"
#include "cuda/sm90/launch_gemm.cuh"

namespace megamoe::sm90 {

template <class First>
cudaError_t launch_few(const FewParams& params, const First& first, const PlainEpilogue& second,
                       cudaStream_t stream) {
  return launch_persistent<FewStorage>(1, few_rows_kernel<First>, kFewThreads, stream, params, first, second);
}

template cudaError_t launch_few(const FewParams&, const GatedEpilogue&, const PlainEpilogue&, cudaStream_t);
template cudaError_t launch_few(const FewParams&, const Relu2Epilogue&, const PlainEpilogue&, cudaStream_t);

}  // namespace megamoe::sm90
