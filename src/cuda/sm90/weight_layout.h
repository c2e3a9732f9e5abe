// weight_layout.h: how the Hopper kernels keep NVFP4 weights: 4.5 bits each, in the order the decoder reads
// them, which depends on the operands that they are decoded to.
//
// A tile is 64 rows: of one matrix, or of gate and up together, alternating every 8 rows; rows beyond the
// matrix are zero. A chunk is one tile by 64 columns (128 where operands are FP8), read by one bulk copy; the
// chunks of a tile follow each other along K, the tiles along the rows, the experts last. wgmma takes the
// tile's 64 rows: warp w, group g = lane / 4 and half h stand for row 16 w + 8 h + g.
//
// BF16, 2304 bytes: a step of wgmma has 16 columns.
//
//   chunk   codes   [warp 4][lane 32][step 4]  32 bits: what one thread feeds one step
//           scales  [warp 4][group 8][half 2]  32 bits: the scales of one row's four blocks
//   word    eight codes of one thread and step: pair p (rows of half p % 2, columns
//           2 (lane % 4) + 8 (p / 2) + {0, 1}), the even column in the low 16 bits. In each 16 bits the
//           pair's three magnitude bits and its sign lie at
//             pair 0: 8..6, 15   pair 1: 5..3, 12   pair 2: 2..0, 14   pair 3: 11..9, 13
//           so that a shift and a mask make a BF16 of them: the magnitude bits on the border of exponent and
//           mantissa are the value times 2^-126.
//   scale   eeeee mmm with a bias that makes every E4M3 a normal number: as BF16 with the exponent raised by
//           224 it is the scale times 2^119. 0xF9 is NaN. A block of scale 0 has its codes cleared and the
//           scale 1.
//   scales  of steps 0 and 1 in bits 11..4 of the low and the high half of the word; of steps 2 and 3
//   likewise
//           once the word is rotated left by 8: a mask and the exponent make two BF16 of them at once.
//
// FP8, 4608 bytes: a step of wgmma has 32 columns, and tokens hold the columns of each 64 in another order
// (fp8_column_place), in which thread lane % 4 has all of block lane % 4: a row's scale is looked up once.
//
//   chunk   codes   [columns 64 2][warp 4][lane 32][step 2][half 2]  32 bits: half a block of one row
//           scales  [warp 4][lane 32][columns 64 2][half 2]          8 bits: E4M3, -0 as 0
//   word    codes 8 step .. + 7 of the block; code i has its magnitude in bits 4 i + 2 .. 4 i, where the
//           instruction that picks bytes from a table wants them. The signs of codes 0 to 3 are bits 7, 15,
//           23, 31; of codes 4 to 7 bits 3, 11, 19, 27.
#pragma once

#include <cstdint>

#include "numerics/hd.h"

namespace megamoe::sm90 {

// What weights are decoded to.
enum class OperandType { kBf16, kFp8 };

inline constexpr int kTileRows = 64;
MEGAMOE_HD constexpr int chunk_cols(OperandType type) { return type == OperandType::kBf16 ? 64 : 128; }
MEGAMOE_HD constexpr int chunk_code_bytes(OperandType type) { return kTileRows * chunk_cols(type) / 2; }
MEGAMOE_HD constexpr int chunk_bytes(OperandType type) {
  return chunk_code_bytes(type) + kTileRows * chunk_cols(type) / 16;
}

// A decoded operand is its value times 2^operand_shift().
MEGAMOE_HD constexpr int operand_shift(OperandType type) { return type == OperandType::kBf16 ? -7 : -3; }

enum class WeightRole {
  kGateUp,  // first GEMM of a gated layer: 8 rows of gate, the same 8 of up, the next 8 of gate, ...
  kPlain,   // one matrix
};

struct TileRow {
  int matrix;        // 0: gate, 1: up; 0 for kPlain
  std::int64_t row;  // of that matrix
};

// The row of the weights at (tile, warp, group, half).
MEGAMOE_HD constexpr TileRow tile_row(WeightRole role, std::int64_t tile, int warp, int group, int half) {
  if (role == WeightRole::kGateUp) return {half, tile * (kTileRows / 2) + warp * 8 + group};
  return {0, tile * kTileRows + warp * 16 + half * 8 + group};
}

MEGAMOE_HD constexpr std::int64_t tiles_of(WeightRole role, std::int64_t rows) {
  const int per_tile = role == WeightRole::kGateUp ? kTileRows / 2 : kTileRows;
  return (rows + per_tile - 1) / per_tile;
}
MEGAMOE_HD constexpr std::int64_t chunks_of(OperandType type, std::int64_t cols) {
  return (cols + chunk_cols(type) - 1) / chunk_cols(type);
}

// Where the sign and the lowest magnitude bit of pair p lie in its 16 bits.
MEGAMOE_HD constexpr int sign_bit(int pair) { return pair == 0 ? 15 : pair == 1 ? 12 : pair == 2 ? 14 : 13; }
MEGAMOE_HD constexpr int magnitude_bit(int pair) { return pair == 0 ? 6 : pair == 1 ? 3 : pair == 2 ? 0 : 9; }

// The packed byte of a non-negative E4M3 scale other than 0.
MEGAMOE_HD constexpr std::uint8_t pack_scale(std::uint8_t e4m3) {
  if ((e4m3 & 0x7F) == 0x7F) return 0xF9;
  int exponent = (e4m3 >> 3) & 15, mantissa = e4m3 & 7;
  if (exponent == 0) {  // m * 2^-9 becomes 1.f * 2^e
    exponent = 1;
    while (mantissa < 8) {
      mantissa <<= 1;
      --exponent;
    }
    mantissa &= 7;
  }
  return static_cast<std::uint8_t>((exponent + 15) << 3 | mantissa);
}
// The word of one row's four packed scales, and step `step` of it.
MEGAMOE_HD constexpr std::uint32_t scale_word(const std::uint8_t (&packed)[4]) {
  const std::uint32_t early = packed[0] << 4 | static_cast<std::uint32_t>(packed[1]) << 20;
  const std::uint32_t late = packed[2] << 4 | static_cast<std::uint32_t>(packed[3]) << 20;
  return early | late >> 8 | late << 24;
}
MEGAMOE_HD constexpr std::uint8_t scale_of_word(std::uint32_t word, int step) {
  const std::uint32_t turned = step < 2 ? word : word << 8 | word >> 24;
  return static_cast<std::uint8_t>(turned >> (step % 2 * 16 + 4));
}

// The inverse of pack_scale.
MEGAMOE_HD constexpr std::uint8_t unpack_scale(std::uint8_t packed) {
  if (packed == 0xF9) return 0x7F;
  const int exponent = (packed >> 3) - 15, mantissa = packed & 7;
  if (exponent >= 1) return static_cast<std::uint8_t>(exponent << 3 | mantissa);
  return static_cast<std::uint8_t>((8 | mantissa) >> (1 - exponent));
}

// One matrix (or gate and up) as stored: codes [rows, cols / 2] and scales [rows, cols / 16].
struct RawWeights {
  const std::uint8_t* codes[2];
  const std::uint8_t* scales[2];
  std::int64_t rows;  // of each matrix
  std::int64_t cols;
};

// The scale of a block, whose sign only a zero may have.
MEGAMOE_HD constexpr std::uint8_t raw_scale(const RawWeights& raw, const TileRow& at, std::int64_t block) {
  return raw.scales[at.matrix][at.row * (raw.cols / 16) + block] & 0x7F;
}

// Bytes of one expert.
constexpr std::int64_t packed_bytes(OperandType type, WeightRole role, std::int64_t rows, std::int64_t cols) {
  return tiles_of(role, rows) * chunks_of(type, cols) * chunk_bytes(type);
}

// ---- BF16

// One thread's share of a chunk: the 32-bit word of (warp, lane, step).
MEGAMOE_HD constexpr std::uint32_t pack_word(WeightRole role, const RawWeights& raw, std::int64_t tile,
                                             std::int64_t chunk, int warp, int lane, int step) {
  std::uint32_t word = 0;
  for (int pair = 0; pair < 4; ++pair) {
    const TileRow at = tile_row(role, tile, warp, lane / 4, pair % 2);
    const std::int64_t col = chunk * 64 + step * 16 + pair / 2 * 8 + lane % 4 * 2;
    if (at.row >= raw.rows || col >= raw.cols) continue;
    if (raw_scale(raw, at, col / 16) == 0) continue;
    const std::uint32_t both = raw.codes[at.matrix][at.row * (raw.cols / 2) + col / 2];
    const std::uint32_t magnitudes = (both & 7) | (both >> 4 & 7) << 16;
    const std::uint32_t signs = (both >> 3 & 1) | (both >> 7 & 1) << 16;
    word |= magnitudes << magnitude_bit(pair) | signs << sign_bit(pair);
  }
  return word;
}
// The scales of one row's four blocks in a chunk.
MEGAMOE_HD constexpr std::uint32_t pack_scales(WeightRole role, const RawWeights& raw, std::int64_t tile,
                                               std::int64_t chunk, int warp, int group, int half) {
  const TileRow at = tile_row(role, tile, warp, group, half);
  std::uint8_t packed[4] = {};
  for (int step = 0; step < 4; ++step) {
    const std::int64_t block = chunk * 4 + step;
    const bool inside = at.row < raw.rows && block < raw.cols / 16;
    const std::uint8_t scale = inside ? raw_scale(raw, at, block) : std::uint8_t{0};
    packed[step] = pack_scale(scale == 0 ? std::uint8_t{0x38} : scale);
  }
  return scale_word(packed);
}

// ---- FP8

// Where column `col` of a row of tokens lies: within each 64, quarter q of block b is quarter b of "block" q.
MEGAMOE_HD constexpr std::uint32_t fp8_column_place(std::uint32_t col) {
  const std::uint32_t block = col / 16 % 4, quarter = col / 4 % 4;
  return col / 64 * 64 + quarter * 16 + block * 4 + col % 4;
}

// Where code i of a word has its sign.
MEGAMOE_HD constexpr int fp8_sign_bit(int code) { return code < 4 ? 8 * code + 7 : 8 * (code - 4) + 3; }

// The block of (chunk, columns 64) that `lane` has.
MEGAMOE_HD constexpr std::int64_t fp8_block(std::int64_t chunk, int part, int lane) {
  return (chunk * 2 + part) * 4 + lane % 4;
}

// One thread's share of a chunk: the word of (columns 64, warp, lane, step, half).
MEGAMOE_HD constexpr std::uint32_t pack_fp8_word(WeightRole role, const RawWeights& raw, std::int64_t tile,
                                                 std::int64_t chunk, int part, int warp, int lane, int step,
                                                 int half) {
  const TileRow at = tile_row(role, tile, warp, lane / 4, half);
  const std::int64_t block = fp8_block(chunk, part, lane);
  if (at.row >= raw.rows || block >= raw.cols / 16) return 0;
  const std::uint8_t* codes = raw.codes[at.matrix] + (at.row * (raw.cols / 16) + block) * 8 + step * 4;
  std::uint32_t word = 0;
  for (int i = 0; i < 8; ++i) {
    const std::uint32_t code = codes[i / 2] >> (i % 2 * 4);
    word |= (code & 7) << (4 * i) | (code >> 3 & 1) << fp8_sign_bit(i);
  }
  return word;
}
// One thread's scales of a chunk: bytes 2 * (columns 64) + half.
MEGAMOE_HD constexpr std::uint32_t pack_fp8_scales(WeightRole role, const RawWeights& raw, std::int64_t tile,
                                                   std::int64_t chunk, int warp, int lane) {
  std::uint32_t word = 0;
  for (int i = 0; i < 4; ++i) {
    const TileRow at = tile_row(role, tile, warp, lane / 4, i % 2);
    const std::int64_t block = fp8_block(chunk, i / 2, lane);
    if (at.row >= raw.rows || block >= raw.cols / 16) continue;
    word |= static_cast<std::uint32_t>(raw_scale(raw, at, block)) << (8 * i);
  }
  return word;
}

// ---- Both

// The whole expert, on the host; what the device's packing is tested against.
void pack_weights(OperandType type, WeightRole role, const RawWeights& raw, std::uint8_t* packed);
// The inverse: codes and scales of matrix 0 (and 1).
void unpack_weights(OperandType type, WeightRole role, const std::uint8_t* packed, std::int64_t rows,
                    std::int64_t cols, std::uint8_t* const codes[2], std::uint8_t* const scales[2]);

}  // namespace megamoe::sm90
