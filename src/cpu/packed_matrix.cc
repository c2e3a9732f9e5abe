#include "cpu/packed_matrix.h"

#include <algorithm>
#include <cstring>

namespace megamoe::cpu {
namespace {

std::int64_t block_bytes(WeightFormat format) {
  switch (format) {
    case WeightFormat::kF32: return kPanel * kNvfp4Block * 4;
    case WeightFormat::kBf16: return kPanel * kNvfp4Block * 2;
    case WeightFormat::kNvfp4: break;
  }
  return kPackedBlockBytes;
}

// One panel and block of 16 columns of [rows, cols] values.
template <class T>
void pack_block(const T* in, std::int64_t cols, std::uint8_t* out) {
  for (std::int64_t k = 0; k < kNvfp4Block; ++k) {
    for (std::int64_t r = 0; r < kPanel; ++r) {
      std::memcpy(out + (k * kPanel + r) * static_cast<std::int64_t>(sizeof(T)), in + r * cols + k,
                  sizeof(T));
    }
  }
}

// Nibble n of `codes` becomes byte n % 4, the low half of it for n < 4.
std::uint32_t pair_columns(std::uint32_t codes) {
  const auto spread = [](std::uint32_t nibbles) {  // four, one to a byte
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FFu;
    return (nibbles | nibbles << 4) & 0x0F0F0F0Fu;
  };
  return spread(codes & 0xFFFFu) | spread(codes >> 16) << 4;
}

void pack_nvfp4_panel(const WeightMatrix& w, std::int64_t row, std::uint8_t* out) {
  const std::int64_t blocks = w.cols / kNvfp4Block;
  for_each_packed_block(out, blocks, [&](std::int64_t block, std::uint8_t* scales, std::uint8_t* codes) {
    for (std::int64_t r = 0; r < kPanel; ++r) {
      const std::int64_t in = (row + r) * blocks + block;
      scales[r] = w.scales[in];
      std::uint32_t halves[2];  // columns 0 to 7 and 8 to 15, the first in the lowest bits
      for (std::int64_t half = 0; half < 2; ++half) {
        const std::uint8_t* bytes = w.codes + in * 8 + half * 4;
        halves[half] = pair_columns(bytes[0] | bytes[1] << 8 | bytes[2] << 16 |
                                    static_cast<std::uint32_t>(bytes[3]) << 24);
        std::memcpy(codes + half * 64 + r * 4, &halves[half], 4);
      }
    }
  });
}

}  // namespace

std::int64_t PackedMatrix::bytes_of(const WeightMatrix& matrix) {
  return checked_mul(checked_mul(matrix.rows / kPanel, matrix.cols / kNvfp4Block),
                     block_bytes(matrix.format));
}

PackedMatrix::PackedMatrix(const WeightMatrix& matrix, const float* bias, std::uint8_t* memory)
    : format_(matrix.format),
      rows_(matrix.rows),
      cols_(matrix.cols),
      tensor_scale_(matrix.format == WeightFormat::kNvfp4 ? matrix.tensor_scale : 1.0f) {
  if (memory == nullptr) {
    own_ = AlignedBuffer<std::uint8_t>(bytes_of(matrix));
    memory = own_.data();
  }
  data_ = memory;
  const std::int64_t panels = rows_ / kPanel, blocks = cols_ / kNvfp4Block;
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    if (format_ == WeightFormat::kNvfp4) {
      pack_nvfp4_panel(matrix, panel * kPanel, memory + panel * blocks * kPackedBlockBytes);
      continue;
    }
    for (std::int64_t block = 0; block < blocks; ++block) {
      std::uint8_t* out = memory + (panel * blocks + block) * block_bytes(format_);
      const std::int64_t first = panel * kPanel * cols_ + block * kNvfp4Block;
      if (format_ == WeightFormat::kF32) {
        pack_block(matrix.f32 + first, cols_, out);
      } else {
        pack_block(matrix.b16 + first, cols_, out);
      }
    }
  }
  if (bias != nullptr) {
    bias_ = AlignedBuffer<float>(rows_);
    std::copy_n(bias, rows_, bias_.data());
  }
}

const std::uint8_t* PackedMatrix::at(std::int64_t panel, std::int64_t column) const {
  return data_ + (panel * (cols_ / kNvfp4Block) + column / kNvfp4Block) * block_bytes(format_);
}

}  // namespace megamoe::cpu
