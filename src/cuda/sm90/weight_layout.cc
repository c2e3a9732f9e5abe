#include "cuda/sm90/weight_layout.h"

#include <cstring>

#include "base/parallel.h"

namespace megamoe::sm90 {
namespace {

// Calls visit(warp, lane, step, offset in the chunk) for each word.
template <class Visit>
void for_each_word(const Visit& visit) {
  for (int warp = 0; warp < 4; ++warp) {
    for (int lane = 0; lane < 32; ++lane) {
      for (int step = 0; step < 4; ++step) visit(warp, lane, step, ((warp * 32 + lane) * 4 + step) * 4);
    }
  }
}

// Calls visit(warp, group, half, offset in the chunk) for each word of scales.
template <class Visit>
void for_each_scale(const Visit& visit) {
  for (int warp = 0; warp < 4; ++warp) {
    for (int group = 0; group < 8; ++group) {
      for (int half = 0; half < 2; ++half) {
        visit(warp, group, half, kChunkCodeBytes + ((warp * 8 + group) * 2 + half) * 4);
      }
    }
  }
}

}  // namespace

void pack_weights(WeightRole role, const RawWeights& raw, std::uint8_t* packed) {
  const std::int64_t chunks = chunks_of(raw.cols);
  parallel_for(tiles_of(role, raw.rows), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin * chunks; at < end * chunks; ++at) {
      std::uint8_t* chunk = packed + at * kChunkBytes;
      for_each_word([&](int warp, int lane, int step, int offset) {
        const std::uint32_t word = pack_word(role, raw, at / chunks, at % chunks, warp, lane, step);
        std::memcpy(chunk + offset, &word, sizeof(word));
      });
      for_each_scale([&](int warp, int group, int half, int offset) {
        const std::uint32_t word = pack_scales(role, raw, at / chunks, at % chunks, warp, group, half);
        std::memcpy(chunk + offset, &word, sizeof(word));
      });
    }
  });
}

void unpack_weights(WeightRole role, const std::uint8_t* packed, std::int64_t rows, std::int64_t cols,
                    std::uint8_t* const codes[2], std::uint8_t* const scales[2]) {
  const std::int64_t chunks = chunks_of(cols);
  for (std::int64_t at = 0; at < tiles_of(role, rows) * chunks; ++at) {
    const std::uint8_t* chunk = packed + at * kChunkBytes;
    for_each_word([&](int warp, int lane, int step, int offset) {
      std::uint32_t word;
      std::memcpy(&word, chunk + offset, sizeof(word));
      for (int pair = 0; pair < 4; ++pair) {
        const TileRow row = tile_row(role, at / chunks, warp, lane / 4, pair % 2);
        const std::int64_t col = at % chunks * kChunkCols + step * 16 + pair / 2 * 8 + lane % 4 * 2;
        if (row.row >= rows || col >= cols) continue;
        const auto code = [&](int element) {
          const std::uint32_t half = word >> (16 * element);
          return (half >> magnitude_bit(pair) & 7) | (half >> sign_bit(pair) & 1) << 3;
        };
        codes[row.matrix][row.row * (cols / 2) + col / 2] = static_cast<std::uint8_t>(code(0) | code(1) << 4);
      }
    });
    for_each_scale([&](int warp, int group, int half, int offset) {
      const TileRow row = tile_row(role, at / chunks, warp, group, half);
      std::uint32_t word;
      std::memcpy(&word, chunk + offset, sizeof(word));
      for (int step = 0; step < 4; ++step) {
        const std::int64_t block = at % chunks * (kChunkCols / 16) + step;
        if (row.row >= rows || block >= cols / 16) continue;
        scales[row.matrix][row.row * (cols / 16) + block] = unpack_scale(scale_of_word(word, step));
      }
    });
  }
}

}  // namespace megamoe::sm90
