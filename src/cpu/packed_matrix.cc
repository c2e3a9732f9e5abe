#include "cpu/packed_matrix.h"

#include <algorithm>
#include <cstring>

#include "cpu/vec.h"

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

// In each half of both numbers nibble n becomes byte n % 4, the low half of it for n < 4.
V2q pair_columns(V2q codes) {
  const auto spread = [](V2q nibbles) {  // four, one to a byte
    nibbles = (nibbles | nibbles << 8) & 0x00FF00FF00FF00FFu;
    return (nibbles | nibbles << 4) & 0x0F0F0F0F0F0F0F0Fu;
  };
  return spread(codes & 0x0000FFFF0000FFFFu) | spread(codes >> 16 & 0x0000FFFF0000FFFFu) << 4;
}

// `count` blocks' scales, of rows `stride` bytes apart.
void pack_scales(const std::uint8_t* in, std::int64_t stride, std::int64_t count, std::uint8_t* out) {
  if (count == kPackedGroup) {
    V16u rows[4];
    for (std::int64_t i = 0; i < kPanel; ++i, in += stride)
      std::memcpy(reinterpret_cast<std::uint8_t*>(rows) + i * 4, in, 4);
    for (const V16u of_block : columns_of_bytes(rows).columns) store(out, of_block), out += kPanel;
    return;
  }
  for (std::int64_t r = 0; r < kPanel; ++r) {
    for (std::int64_t b = 0; b < count; ++b) out[b * kPanel + r] = in[r * stride + b];
  }
}

void pack_nvfp4_panel(const WeightMatrix& w, std::int64_t row, std::uint8_t* out) {
  const std::int64_t blocks = w.cols / kNvfp4Block;
  for_each_packed_block(out, blocks, [&](std::int64_t block, std::uint8_t* scales, std::uint8_t* codes) {
    if (block % kPackedGroup == 0) {
      pack_scales(w.scales + row * blocks + block, blocks, std::min(kPackedGroup, blocks - block), scales);
    }
    const auto two_rows = [&](std::int64_t r) {
      const std::uint8_t* in = w.codes + ((row + r) * blocks + block) * 8;
      return reinterpret_cast<V4i>(
          pair_columns(V2q{load<std::uint64_t>(in), load<std::uint64_t>(in + blocks * 8)}));
    };
    for (std::int64_t r = 0; r < kPanel; r += 4) {
      const V4i a = two_rows(r), b = two_rows(r + 2);
      store(codes + r * 4, __builtin_shufflevector(a, b, 0, 2, 4, 6));       // columns 0 to 7
      store(codes + 64 + r * 4, __builtin_shufflevector(a, b, 1, 3, 5, 7));  // 8 to 15
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
