// quantize.cc: whole matrices to NVFP4 and back.
#include "megamoe/quantize.h"

#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "base/parallel.h"
#include "base/processor.h"
#include "numerics/amax.h"
#include "numerics/bf16.h"
#include "numerics/four_over_six.h"
#include "numerics/fp16.h"
#include "numerics/nvfp4.h"
#include "numerics/quantize_x86.h"

namespace megamoe {
namespace {

constexpr std::int64_t kElementsPerPiece = 1 << 14;  // the least that is worth handing to a thread

std::int64_t rows_per_piece(std::int64_t cols) {
  return std::max<std::int64_t>(1, kElementsPerPiece / std::max<std::int64_t>(cols, 1));
}

constexpr float to_float(float x) { return x; }

template <class T>
BlockCounts quantize_row(const T* x, float g, std::int64_t blocks, bool four_over_six, std::uint8_t* codes,
                         std::uint8_t* scales) {
#ifdef __x86_64__
  if (!four_over_six && has_avx512()) return quantize_row_avx512(x, g, blocks, codes, scales);
  if (!four_over_six && has_avx2()) return quantize_row_avx2(x, g, blocks, codes, scales);
#endif
  const auto quantize_block = four_over_six ? four_over_six_quantize_block : nvfp4_quantize_block;
  BlockCounts counts;
  for (std::int64_t b = 0; b < blocks; ++b) {
    float values[kNvfp4Block];
    for (int i = 0; i < kNvfp4Block; ++i) values[i] = to_float(x[b * kNvfp4Block + i]);
    const Nvfp4Scale scale = quantize_block(values, g, codes + b * (kNvfp4Block / 2));
    scales[b] = scale.code;
    counts.saturated += scale.saturated;
    counts.nonfinite += scale.code == kE4M3NaN;
  }
  return counts;
}

template <class T>
float finite_amax(const T* x, std::int64_t count) {
#ifdef __x86_64__
  if (has_avx2()) return finite_amax_avx2(x, count);
#endif
  float a = 0.0f;
  for (std::int64_t c = 0; c < count; ++c) {
    const float m = magnitude(to_float(x[c]));
    a = m > a && is_finite(m) ? m : a;
  }
  return a;
}

template <class T>
void check_view(const MatrixView<const T>& x) {
  if (x.rows < 0 || x.cols < 0 || x.cols % kNvfp4Block != 0) {
    fail(ErrorCode::kInvalidArgument,
         "a matrix to quantize must have a multiple of {} columns, got a shape of [{}, {}]", kNvfp4Block,
         x.rows, x.cols);
  }
  if (x.rows > 1 && x.row_stride < x.cols) {
    fail(ErrorCode::kInvalidArgument,
         "the row stride of a matrix of {} columns must not be below that, got {}", x.cols, x.row_stride);
  }
  if (x.data == nullptr && x.rows > 0 && x.cols > 0) {
    fail(ErrorCode::kInvalidArgument, "the matrix to quantize [{}, {}] has no data", x.rows, x.cols);
  }
}

// The largest finite magnitude of each row. A maximum does not depend on the order it is taken in.
template <class T>
std::vector<float> row_amax(const MatrixView<const T>& x) {
  std::vector<float> amax(static_cast<std::size_t>(x.rows), 0.0f);
  parallel_for(x.rows, rows_per_piece(x.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r)
      amax[static_cast<std::size_t>(r)] = finite_amax(x.row(r), x.cols);
  });
  return amax;
}

float largest(const std::vector<float>& amax) {
  return amax.empty() ? 0.0f : *std::max_element(amax.begin(), amax.end());
}

template <class T>
std::vector<float> choose_tensor_scales(const MatrixView<const T>& x, const QuantizeOptions& options) {
  if (options.mode == QuantizeOptions::TensorScale::kGiven) {
    const float g = options.tensor_scale;
    if (!(g > 0.0f) || !is_finite(kE2M1Max * g)) {
      fail(ErrorCode::kInvalidArgument,
           "a given tensor scale must be greater than 0 and 6 times it finite, got {}", g);
    }
    return {g};
  }
  const float range = options.four_over_six ? kFourOverSixRange : kNvfp4Range;
  std::vector<float> scales = row_amax(x);
  if (options.mode == QuantizeOptions::TensorScale::kTensor) {
    scales = {largest(scales)};
  }
  for (float& scale : scales) scale = nvfp4_tensor_scale(scale, range);
  return scales;
}

template <class T>
Nvfp4Tensor quantize_matrix(MatrixView<const T> x, const QuantizeOptions& options) {
  check_view(x);
  const std::int64_t blocks = x.cols / kNvfp4Block;
  Nvfp4Tensor out;
  out.rows = x.rows;
  out.cols = x.cols;
  out.tensor_scales = choose_tensor_scales(x, options);
  out.codes.resize(static_cast<std::size_t>(checked_mul(x.rows, x.cols / 2)));
  out.scales.resize(static_cast<std::size_t>(checked_mul(x.rows, blocks)));
  const bool per_row = options.mode == QuantizeOptions::TensorScale::kRow;
  std::atomic<std::int64_t> saturated{0}, nonfinite{0};
  parallel_for(x.rows, rows_per_piece(x.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float g = out.tensor_scales[static_cast<std::size_t>(per_row ? r : 0)];
      const BlockCounts counts =
          quantize_row(x.row(r), g, blocks, options.four_over_six, out.codes.data() + r * (x.cols / 2),
                       out.scales.data() + r * blocks);
      saturated += counts.saturated;
      nonfinite += counts.nonfinite;
    }
  });
  out.saturated_blocks = saturated;
  out.nonfinite_blocks = nonfinite;
  return out;
}

}  // namespace

Nvfp4Tensor quantize(MatrixView<const float> x, const QuantizeOptions& options) {
  return quantize_matrix(x, options);
}
Nvfp4Tensor quantize(MatrixView<const bf16> x, const QuantizeOptions& options) {
  return quantize_matrix(x, options);
}
Nvfp4Tensor quantize(MatrixView<const fp16> x, const QuantizeOptions& options) {
  return quantize_matrix(x, options);
}

float tensor_amax(MatrixView<const float> x) { return largest(row_amax(x)); }
float tensor_amax(MatrixView<const bf16> x) { return largest(row_amax(x)); }

std::vector<float> dequantize(const Nvfp4Tensor& x) {
  if (x.rows < 0 || x.cols < 0 || x.cols % kNvfp4Block != 0) {
    fail(ErrorCode::kInvalidArgument, "an NVFP4 matrix must have a multiple of {} columns, got [{}, {}]",
         kNvfp4Block, x.rows, x.cols);
  }
  const std::int64_t blocks = x.cols / kNvfp4Block;
  const auto expect = [&](std::size_t size, std::int64_t expected, const char* what) {
    if (static_cast<std::int64_t>(size) != expected) {
      fail(ErrorCode::kInvalidArgument, "an NVFP4 matrix [{}, {}] must have {} {}, got {}", x.rows, x.cols,
           expected, what, size);
    }
  };
  expect(x.codes.size(), checked_mul(x.rows, x.cols / 2), "bytes of codes");
  expect(x.scales.size(), checked_mul(x.rows, blocks), "block scales");
  const bool per_row = x.tensor_scales.size() != 1;
  if (per_row) expect(x.tensor_scales.size(), x.rows, "tensor scales (or 1)");

  std::vector<float> values(static_cast<std::size_t>(checked_mul(x.rows, x.cols)));
  parallel_for(x.rows, rows_per_piece(x.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      const float g = x.tensor_scales[static_cast<std::size_t>(per_row ? r : 0)];
      const std::uint8_t* codes = x.codes.data() + r * (x.cols / 2);
      const std::uint8_t* scales = x.scales.data() + r * blocks;
      float* out = values.data() + r * x.cols;
      for (std::int64_t c = 0; c < x.cols; ++c) {
        out[c] = nvfp4_value(nibble(codes, c), scales[c / kNvfp4Block], g);
      }
    }
  });
  return values;
}

}  // namespace megamoe
