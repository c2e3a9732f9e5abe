// pack.cu: a CTA makes one chunk: a thread one lane's codes, and a row's scales (BF16) or a lane's (FP8).
#include "cuda/launch.h"
#include "cuda/sm90/pack.h"

namespace megamoe::sm90 {
namespace {

constexpr int kThreads = 4 * 32;  // warp, lane: as in the chunk

template <OperandType kType>
__global__ void __launch_bounds__(kThreads)
    pack_kernel(WeightRole role, const RawWeights* raws, std::int64_t tiles, std::int64_t chunks,
                std::uint8_t* packed) {
  const std::int64_t at = blockIdx.x, chunk = at % chunks, tile = at / chunks % tiles;
  const RawWeights& raw = raws[at / chunks / tiles];
  std::uint8_t* out = packed + at * chunk_bytes(kType);
  auto* codes = reinterpret_cast<uint4*>(out);
  auto* scales = reinterpret_cast<std::uint32_t*>(out + chunk_code_bytes(kType));
  const int thread = static_cast<int>(threadIdx.x), warp = thread / 32, lane = thread % 32;
  std::uint32_t words[4];
  if constexpr (kType == OperandType::kBf16) {
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      words[step] = pack_word(role, raw, tile, chunk, warp, lane, step);
    }
    codes[thread] = make_uint4(words[0], words[1], words[2], words[3]);
    if (thread < kTileRows) {
      scales[thread] = pack_scales(role, raw, tile, chunk, thread / 16, thread / 2 % 8, thread % 2);
    }
  } else {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        words[i] = pack_fp8_word(role, raw, tile, chunk, part, warp, lane, i / 2, i % 2);
      }
      codes[part * kThreads + thread] = make_uint4(words[0], words[1], words[2], words[3]);
    }
    scales[thread] = pack_fp8_scales(role, raw, tile, chunk, warp, lane);
  }
}

}  // namespace

cudaError_t pack_layer(OperandType type, WeightRole role, const RawWeights* raw, int experts,
                       std::int64_t rows, std::int64_t cols, std::uint8_t* packed, cudaStream_t stream) {
  if (!cuda::aligned_to(packed, 16)) return cudaErrorInvalidValue;
  const std::int64_t tiles = tiles_of(role, rows), chunks = chunks_of(type, cols);
  const auto kernel =
      type == OperandType::kBf16 ? pack_kernel<OperandType::kBf16> : pack_kernel<OperandType::kFp8>;
  return cuda::launch(kernel, experts * tiles * chunks, kThreads, 0, stream, role, raw, tiles, chunks,
                      packed);
}

}  // namespace megamoe::sm90
