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

// Where row `row` has its scales; pair (token, copy) is read by it.
__device__ std::int64_t scale_place(const Fp8Quantize& call, std::int64_t row, std::int64_t pair) {
  if (call.offsets == nullptr) return row;
  int expert = 0;
  if (call.ids != nullptr) {
    expert = call.ids[pair];
  } else {
    int end = call.experts;  // it is the last expert whose first row is not beyond
    while (end - expert > 1) {
      const int middle = (expert + end) / 2;
      (call.offsets[middle] <= row ? expert : end) = middle;
    }
  }
  return fp8_scale_place(call.offsets[expert], expert) + row - call.offsets[expert];
}

__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const Fp8Quantize call, std::int64_t blocks_per_row) {
  cuda::await_previous_kernel();
  const std::int64_t token = blockIdx.x / blocks_per_row;
  if (token >= call.tokens.count()) return;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const std::int64_t group = blockIdx.x % blocks_per_row * kGroups + static_cast<int>(threadIdx.x) / kLanes;
  const std::int64_t col = group * kFp8Tile + lane * 8;
  // A lane for each copy: its row, or -1.
  const auto row_of = [&](int copy) -> std::int64_t {
    if (copy >= call.copies) return -1;
    return call.slot_to_row != nullptr ? call.slot_to_row[token * call.copies + copy] : token;
  };
  std::int64_t own_row = row_of(lane);
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

  // From here on the lanes of a group among themselves. Adjacent bytes of a row go to a lane: two words of
  // one quarter (fp8_column_place), of adjacent blocks, each of which two lanes have.
  const unsigned lanes = 0xFFFFu << (threadIdx.x & kLanes);
  const int quarter = lane % 8 / 2, from = lane / 8 * 8 + lane % 2 * 4 + quarter / 2;
  std::uint32_t own[2];
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const std::uint32_t even = __shfl_sync(lanes, codes[0], from + 2 * i, kLanes),
                        odd = __shfl_sync(lanes, codes[1], from + 2 * i, kLanes);
    own[i] = quarter % 2 == 0 ? even : odd;
  }
  std::uint8_t* to = call.codes + group * kFp8Tile + lane * 8;
  const std::int64_t width = fp8_row_bytes(call.cols);
  float* scales = call.scales + group * fp8_scale_pitch(call.most_rows, call.experts);
  for (int first = 0; first < call.copies; first += kLanes) {
    if (first > 0) own_row = row_of(first + lane);
    for (int i = 0; i < min(call.copies - first, kLanes); ++i) {
      const std::int64_t row = __shfl_sync(lanes, own_row, i, kLanes);
      if (row >= 0) *reinterpret_cast<uint2*>(to + row * width) = make_uint2(own[0], own[1]);
    }
    if (own_row >= 0) scales[scale_place(call, own_row, token * call.copies + first + lane)] = d[0];
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
