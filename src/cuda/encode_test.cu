// encode_test.cu: runs the device's encoder alone, for the tests.
#include "cuda/blocks.cuh"
#include "cuda/encode.cuh"
#include "cuda/launch.h"

namespace megamoe::cuda {
namespace {

template <class T>
__global__ void encode_kernel(const T* x, const float* d, std::int64_t blocks, std::uint8_t* codes) {
  const std::int64_t block = static_cast<std::int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  if (block >= blocks) return;
  const RawBlock<T> values = load_block(x + block * kNvfp4Block, static_cast<int>(16 / sizeof(T)), true);
  const bool large = __uint_as_float(values.amax()) >= 6.5f * d[block];
  uint2 word = encode_quotients(values, d[block], large);
  if constexpr (RawBlock<T>::kSpareBits > 0) {
    MidpointSides sides = {};
    for (int m = 1; m <= 7; m += 2) {
      const MidpointSide side = midpoint_side<RawBlock<T>::kSpareBits>(d[block], m);
      if (side.near) (side.up ? sides.up : sides.down) |= 1u << 4 * (m - 1);
    }
    const float factor = product_factor(d[block], sides);
    if (factor != 0.0f) word = encode_by_products(values, factor, factor < 0.0f, large);
  }
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
  if (!RowEncoder<RawBlock<float>, false>(g).encode(values, values.amax(), block))
    block = encode_any(values, g);
  const Nvfp4Scale scale = block.scale;
  codes[i] = scale.code;
  saturated[i] = scale.saturated;
}

}  // namespace

cudaError_t encode_codes_for_test(ElementType type, const void* x, const float* d, std::int64_t n,
                                  std::uint8_t* codes) {
  const auto run = [&]<class T>(const T* data) {
    return launch(encode_kernel<T>, (n / kNvfp4Block + 127) / 128, 128, 0, nullptr, data, d, n / kNvfp4Block,
                  codes);
  };
  switch (type) {
    case ElementType::kBf16: return run(static_cast<const bf16*>(x));
    case ElementType::kFp16: return run(static_cast<const fp16*>(x));
    case ElementType::kF32: return run(static_cast<const float*>(x));
  }
  return cudaErrorInvalidValue;
}
cudaError_t block_scales_for_test(const float* amax, float g, std::int64_t n, std::uint8_t* codes,
                                  std::uint8_t* saturated) {
  return launch(scale_kernel, (n + 127) / 128, 128, 0, nullptr, amax, g, n, codes, saturated);
}

}  // namespace megamoe::cuda
