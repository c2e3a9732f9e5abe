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

void pack_nvfp4_block(const WeightMatrix& w, std::int64_t row, std::int64_t block, std::uint8_t* out) {
  for (std::int64_t r = 0; r < kPanel; ++r) {
    out[r] = w.scales[(row + r) * (w.cols / kNvfp4Block) + block];
    const std::uint8_t* codes = w.codes + (row + r) * (w.cols / 2) + block * (kNvfp4Block / 2);
    for (std::int64_t q = 0; q < kNvfp4Block / 2; ++q) out[kPanel + q * kPanel + r] = codes[q];
  }
}

}  // namespace

PackedMatrix::PackedMatrix(const WeightMatrix& matrix, const float* bias)
    : format_(matrix.format),
      rows_(matrix.rows),
      cols_(matrix.cols),
      tensor_scale_(matrix.format == WeightFormat::kNvfp4 ? matrix.tensor_scale : 1.0f) {
  const std::int64_t panels = rows_ / kPanel, blocks = cols_ / kNvfp4Block;
  data_ = AlignedBuffer<std::uint8_t>(checked_mul(checked_mul(panels, blocks), block_bytes(format_)));
  std::uint8_t* out = data_.data();
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    for (std::int64_t block = 0; block < blocks; ++block, out += block_bytes(format_)) {
      const std::int64_t first = panel * kPanel * cols_ + block * kNvfp4Block;
      switch (format_) {
        case WeightFormat::kF32: pack_block(matrix.f32 + first, cols_, out); break;
        case WeightFormat::kBf16: pack_block(matrix.b16 + first, cols_, out); break;
        case WeightFormat::kNvfp4: pack_nvfp4_block(matrix, panel * kPanel, block, out); break;
      }
    }
  }
  if (bias != nullptr) {
    bias_ = AlignedBuffer<float>(rows_);
    std::copy_n(bias, rows_, bias_.data());
  }
}

const std::uint8_t* PackedMatrix::at(std::int64_t panel, std::int64_t column) const {
  return data_.data() + (panel * (cols_ / kNvfp4Block) + column / kNvfp4Block) * block_bytes(format_);
}

}  // namespace megamoe::cpu
