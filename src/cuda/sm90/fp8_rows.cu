// fp8_rows.cu: half a warp for 128 columns of a token, 8 for each lane; a token is quantised once, however
// many rows read it.
#include "cuda/bf16_pair.cuh"
#include "cuda/encode.cuh"
#include "cuda/launch.h"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {
namespace {

constexpr int kThreads = 256, kLanes = 16, kGroups = kThreads / kLanes;

// Where row `row` has its scales.
__device__ std::int64_t scale_place(const Fp8Quantize& call, std::int64_t row) {
  if (call.offsets == nullptr) return row;
  int low = 0, high = call.experts;  // the last expert whose first row is not beyond
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    (call.offsets[middle] <= row ? low : high) = middle;
  }
  return fp8_scale_place(call.offsets[low], low) + row - call.offsets[low];
}

__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const Fp8Quantize call, std::int64_t blocks_per_row) {
  cuda::await_previous_kernel();
  const std::int64_t token = blockIdx.x / blocks_per_row;
  if (token >= call.tokens.count()) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t group = blockIdx.x % blocks_per_row * kGroups + static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t col = group * kFp8Tile + lane * 8;
  const bool inside = col < call.cols;
  const uint4 loaded = inside ? *reinterpret_cast<const uint4*>(call.x + token * call.row_stride + col)
                              : make_uint4(0, 0, 0, 0);
  const std::uint32_t words[4] = {loaded.x, loaded.y, loaded.z, loaded.w};
  float x[2][4];
  std::uint32_t amax = 0, any = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    x[i / 4][i % 4] = i % 2 == 0 ? cuda::first_of(words[i / 2]) : cuda::second_of(words[i / 2]);
    const std::uint32_t bits = bits_of_float(x[i / 4][i % 4]);
    any = max(any, bits & kFloatMagnitude);
    if ((bits & kFloatMagnitude) < kFloatInf) amax = max(amax, bits & kFloatMagnitude);
  }
#pragma unroll
  for (int step = 1; step < kLanes; step *= 2) amax = max(amax, __shfl_xor_sync(~0u, amax, step));
  if (group >= fp8_groups(call.cols)) return;
  float d[2];  // the same for both
  std::uint32_t codes[2];
  cuda::encode_tiles(x, {amax, amax}, any < kFloatInf, d, codes);
  const std::int64_t width = fp8_row_bytes(call.cols);
  const auto row_of = [&](int copy) -> std::int64_t {
    return call.slot_to_row != nullptr ? call.slot_to_row[token * call.copies + copy] : token;
  };
  for (int copy = 0; copy < call.copies; ++copy) {
    const std::int64_t row = row_of(copy);
    if (row < 0) continue;
    std::uint8_t* to = call.codes + row * width;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      *reinterpret_cast<std::uint32_t*>(to + fp8_column_place(static_cast<std::uint32_t>(col) + 4 * i)) =
          codes[i];
    }
  }
  float* scales = call.scales + group * fp8_scale_pitch(call.most_rows, call.experts);
  for (int copy = lane; copy < call.copies; copy += kLanes) {
    if (const std::int64_t row = row_of(copy); row >= 0) scales[scale_place(call, row)] = d[0];
  }
}

}  // namespace

cudaError_t quantize_fp8(const Fp8Quantize& call, cudaStream_t stream) {
  if (call.cols % 16 != 0 || !cuda::aligned_to(call.x, 16) ||
      (call.tokens.most > 1 && call.row_stride % 8 != 0) || !cuda::aligned_to(call.codes, 16)) {
    return cudaErrorInvalidValue;
  }
  const std::int64_t blocks_per_row = (fp8_groups(call.cols) + kGroups - 1) / kGroups;
  return cuda::launch_early(quantize_kernel, call.tokens.most * blocks_per_row, kThreads, 0, stream, call,
                            blocks_per_row);
}

}  // namespace megamoe::sm90
