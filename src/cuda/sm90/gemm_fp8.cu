// gemm_fp8.cu: the kernels whose operands are E4M3.
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/launch_gemm.cuh"
#include "cuda/sm90/multiply_fp8.cuh"
#include "cuda/sm90/register_epilogue.cuh"

namespace megamoe::sm90 {

template <class Epilogue>
cudaError_t launch_fp8(const TileChoice& tile, const GemmParams& params, const Epilogue& epilogue,
                       cudaStream_t stream) {
  return launch_width<OperandType::kFp8>(tile.tokens, params, epilogue, stream);
}

template cudaError_t launch_fp8(const TileChoice&, const GemmParams&, const GatedEpilogue&, cudaStream_t);
template cudaError_t launch_fp8(const TileChoice&, const GemmParams&, const Relu2Epilogue&, cudaStream_t);
template cudaError_t launch_fp8(const TileChoice&, const GemmParams&, const PlainEpilogue&, cudaStream_t);

}  // namespace megamoe::sm90
