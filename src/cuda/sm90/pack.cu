// pack.cu: a CTA makes one chunk: a thread one lane's codes of the four steps, half of the threads a row's
// scales.
#include "cuda/launch.h"
#include "cuda/sm90/pack.h"

namespace megamoe::sm90 {
namespace {

constexpr int kThreads = 4 * 32;  // warp, lane: as in the chunk

__global__ void __launch_bounds__(kThreads)
    pack_kernel(WeightRole role, const RawWeights* raws, std::int64_t tiles, std::int64_t chunks,
                std::uint8_t* packed) {
  const std::int64_t at = blockIdx.x, chunk = at % chunks, tile = at / chunks % tiles;
  const RawWeights& raw = raws[at / chunks / tiles];
  std::uint8_t* out = packed + at * kChunkBytes;
  const int thread = static_cast<int>(threadIdx.x);
  {
    const int warp = thread / 32, lane = thread % 32;
    std::uint32_t words[4];
#pragma unroll
    for (int step = 0; step < 4; ++step) {
      words[step] = pack_word(role, raw, tile, chunk, warp, lane, step);
    }
    reinterpret_cast<uint4*>(out)[thread] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  if (thread < kTileRows) {
    const int warp = thread / 16, group = thread / 2 % 8, half = thread % 2;
    reinterpret_cast<std::uint32_t*>(out + kChunkCodeBytes)[thread] =
        pack_scales(role, raw, tile, chunk, warp, group, half);
  }
}

}  // namespace

cudaError_t pack_layer(WeightRole role, const RawWeights* raw, int experts, std::int64_t rows,
                       std::int64_t cols, std::uint8_t* packed, cudaStream_t stream) {
  if (!cuda::aligned_to(packed, 16)) return cudaErrorInvalidValue;
  const std::int64_t tiles = tiles_of(role, rows), chunks = chunks_of(cols);
  return cuda::launch(pack_kernel, experts * tiles * chunks, kThreads, 0, stream, role, raw, tiles, chunks,
                      packed);
}

}  // namespace megamoe::sm90
