// encode_test.cu: runs the device's encoder alone, for the tests.
#include "cuda/blocks.cuh"
#include "cuda/encode.cuh"
#include "cuda/launch.h"

namespace megamoe::cuda {
namespace {

__global__ void encode_kernel(const float* x, const float* d, std::int64_t blocks, std::uint8_t* codes) {
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  const RawBlock<float> values = load_block(x + block * kNvfp4Block, 4, true);
  const uint2 word = encode_codes(values, d[block]);
  for (int i = 0; i < kNvfp4Block; ++i) {
    codes[block * kNvfp4Block + i] =
        static_cast<std::uint8_t>(((i < 8 ? word.x : word.y) >> (i % 8 * 4)) & 15u);
  }
}

// A block of 16 times the same number.
__global__ void scale_kernel(const float* amax, float g, std::int64_t n, std::uint8_t* codes,
                             std::uint8_t* saturated) {
  const std::int64_t i = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i >= n) return;
  RawBlock<float> values;
  for (uint4& v : values.raw) v = make_uint4(__float_as_uint(amax[i]), 0, 0, 0);
  EncodedBlock block;
  if (!encode_fast(values, values.amax(), g, block)) block = encode_slowly(values, g);
  const Nvfp4Scale scale = block.scale;
  codes[i] = scale.code;
  saturated[i] = scale.saturated;
}

}  // namespace

cudaError_t encode_codes_for_test(const float* x, const float* d, std::int64_t n, std::uint8_t* codes) {
  return launch(encode_kernel, (n / kNvfp4Block + 127) / 128, 128, 0, nullptr, x, d, n / kNvfp4Block, codes);
}
cudaError_t block_scales_for_test(const float* amax, float g, std::int64_t n, std::uint8_t* codes,
                                  std::uint8_t* saturated) {
  return launch(scale_kernel, (n + 127) / 128, 128, 0, nullptr, amax, g, n, codes, saturated);
}

}  // namespace megamoe::cuda
