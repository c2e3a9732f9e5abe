// gemm_bf16.cu: the kernels whose operands are BF16.
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/launch_gemm.cuh"
#include "cuda/sm90/multiply_bf16.cuh"
#include "cuda/sm90/register_epilogue.cuh"

namespace megamoe::sm90 {

template <class Epilogue>
cudaError_t launch_bf16(const TileChoice& tile, const GemmParams& params, const Epilogue& epilogue,
                        cudaStream_t stream) {
  if (tile.row_tiles == 1) return launch<GemmConfig<OperandType::kBf16, 8, 1, 4>>(params, epilogue, stream);
  return launch_width<OperandType::kBf16>(tile.tokens, params, epilogue, stream);
}

template cudaError_t launch_bf16(const TileChoice&, const GemmParams&, const GatedEpilogue&, cudaStream_t);
template cudaError_t launch_bf16(const TileChoice&, const GemmParams&, const Relu2Epilogue&, cudaStream_t);
template cudaError_t launch_bf16(const TileChoice&, const GemmParams&, const PlainEpilogue&, cudaStream_t);

}  // namespace megamoe::sm90
