#include "cuda/sm90/weight_layout.h"

#include <cstring>

#include "base/parallel.h"

namespace megamoe::sm90 {
namespace {

// Calls visit(warp, lane, i, offset in the chunk) for each word of codes; i is the step, or for FP8 8 *
// (columns 64) + 2 * step + half.
template <class Visit>
void for_each_word(OperandType type, const Visit& visit) {
  for (int part = 0; part < chunk_cols(type) / 64; ++part) {
    for (int warp = 0; warp < 4; ++warp) {
      for (int lane = 0; lane < 32; ++lane) {
        for (int i = 0; i < 4; ++i)
          visit(warp, lane, 8 * part + i, (((part * 4 + warp) * 32 + lane) * 4 + i) * 4);
      }
    }
  }
}

// Calls visit(warp, group or lane, half, offset in the chunk) for each word of scales.
template <class Visit>
void for_each_scale(OperandType type, const Visit& visit) {
  const int groups = type == OperandType::kBf16 ? 8 : 32, halves = type == OperandType::kBf16 ? 2 : 1;
  for (int warp = 0; warp < 4; ++warp) {
    for (int group = 0; group < groups; ++group) {
      for (int half = 0; half < halves; ++half) {
        visit(warp, group, half, chunk_code_bytes(type) + ((warp * groups + group) * halves + half) * 4);
      }
    }
  }
}

std::uint32_t load_word(const std::uint8_t* from) {
  std::uint32_t word;
  std::memcpy(&word, from, sizeof(word));
  return word;
}

void put_code(std::uint8_t* codes, std::int64_t at, std::uint32_t code) {
  codes[at / 2] = static_cast<std::uint8_t>(codes[at / 2] | code << (at % 2 * 4));
}

}  // namespace

void pack_weights(OperandType type, WeightRole role, const RawWeights& raw, std::uint8_t* packed) {
  const bool fp8 = type == OperandType::kFp8;
  const std::int64_t chunks = chunks_of(type, raw.cols);
  parallel_for(tiles_of(role, raw.rows), 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t at = begin * chunks; at < end * chunks; ++at) {
      std::uint8_t* to = packed + at * chunk_bytes(type);
      const std::int64_t tile = at / chunks, chunk = at % chunks;
      for_each_word(type, [&](int warp, int lane, int i, int offset) {
        const std::uint32_t word =
            fp8 ? pack_fp8_word(role, raw, tile, chunk, i / 8, warp, lane, i % 8 / 2, i % 2)
                : pack_word(role, raw, tile, chunk, warp, lane, i);
        std::memcpy(to + offset, &word, sizeof(word));
      });
      for_each_scale(type, [&](int warp, int group, int half, int offset) {
        const std::uint32_t word = fp8 ? pack_fp8_scales(role, raw, tile, chunk, warp, group)
                                       : pack_scales(role, raw, tile, chunk, warp, group, half);
        std::memcpy(to + offset, &word, sizeof(word));
      });
    }
  });
}

void unpack_weights(OperandType type, WeightRole role, const std::uint8_t* packed, std::int64_t rows,
                    std::int64_t cols, std::uint8_t* const codes[2], std::uint8_t* const scales[2]) {
  const bool fp8 = type == OperandType::kFp8;
  const std::int64_t chunks = chunks_of(type, cols);
  for (int m = 0; m < (role == WeightRole::kGateUp ? 2 : 1); ++m) {
    std::memset(codes[m], 0, static_cast<std::size_t>(rows * cols / 2));
  }
  for (std::int64_t at = 0; at < tiles_of(role, rows) * chunks; ++at) {
    const std::uint8_t* from = packed + at * chunk_bytes(type);
    const std::int64_t tile = at / chunks, chunk = at % chunks;
    for_each_word(type, [&](int warp, int lane, int i, int offset) {
      const std::uint32_t word = load_word(from + offset);
      for (int code = 0; code < 8; ++code) {
        const int pair = code / 2, element = code % 2;  // BF16
        const TileRow row = tile_row(role, tile, warp, lane / 4, fp8 ? i % 2 : pair % 2);
        const std::int64_t col = fp8 ? fp8_block(chunk, i / 8, lane) * 16 + i % 8 / 2 * 8 + code
                                     : chunk * 64 + i * 16 + pair / 2 * 8 + lane % 4 * 2 + element;
        if (row.row >= rows || col >= cols) continue;
        const int magnitude = fp8 ? 4 * code : magnitude_bit(pair) + 16 * element;
        const int sign = fp8 ? fp8_sign_bit(code) : sign_bit(pair) + 16 * element;
        put_code(codes[row.matrix], row.row * cols + col, (word >> magnitude & 7) | (word >> sign & 1) << 3);
      }
    });
    for_each_scale(type, [&](int warp, int group, int half, int offset) {
      const std::uint32_t word = load_word(from + offset);
      for (int i = 0; i < 4; ++i) {
        const TileRow row =
            fp8 ? tile_row(role, tile, warp, group / 4, i % 2) : tile_row(role, tile, warp, group, half);
        const std::int64_t block = fp8 ? fp8_block(chunk, i / 2, group) : chunk * 4 + i;
        if (row.row >= rows || block >= cols / 16) continue;
        scales[row.matrix][row.row * (cols / 16) + block] =
            fp8 ? static_cast<std::uint8_t>(word >> (8 * i)) : unpack_scale(scale_of_word(word, i));
      }
    });
  }
}

}  // namespace megamoe::sm90
