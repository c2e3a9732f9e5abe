// matmul.cc: products of activations and weights, one output at a time.
//
// bf16   FP64 sum of the products x_k * w_k (each exact in FP64), times the tensor scale, rounded once.
// fp8    for each 128 columns the FP64 sum of the E4M3 products times the token's scale; the FP64 sum of
//        these, times 8 and the tensor scale, rounded once.
// nvfp4  FP32, in this order and no other, so that every CPU backend gives the same bits:
//          acc = 0;  for each block in ascending order:  acc = acc + dot * 0.25 * (s_w * s_x)
//          y = (acc * x tensor scale) * w tensor scale
//        with dot the integer sum of products of doubled codes. dot (12 bits) times s_w * s_x (8 bits) is
//        exact in FP32, so a block costs one rounding, that of the addition.
#include <algorithm>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "numerics/bf16.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"
#include "ref/operations.h"

namespace megamoe::ref {
namespace {

// Element k of row r of a weight, without its tensor scale. Exact.
double weight_value(const WeightMatrix& w, std::int64_t r, std::int64_t k) {
  switch (w.format) {
    case WeightFormat::kF32: return w.f32[r * w.cols + k];
    case WeightFormat::kBf16: return to_float(w.b16[r * w.cols + k]);
    case WeightFormat::kNvfp4: break;
  }
  const std::uint8_t code = nibble(w.codes + r * (w.cols / 2), k);
  return decode_e2m1(code) * decode_e4m3(w.scales[r * (w.cols / kNvfp4Block) + k / kNvfp4Block]);
}

float dot_bf16(const bf16* x, const WeightMatrix& w, std::int64_t r) {
  double sum = 0.0;
  for (std::int64_t k = 0; k < w.cols; ++k)
    sum += static_cast<double>(to_float(x[k])) * weight_value(w, r, k);
  return static_cast<float>(w.format == WeightFormat::kNvfp4 ? sum * w.tensor_scale : sum);
}

// `d` [ceil(cols / 128)]: the scales of the row of x.
float dot_fp8(const std::uint8_t* x, const float* d, const WeightMatrix& w, std::int64_t r) {
  const std::uint8_t* codes = w.codes + r * (w.cols / 2);
  const std::uint8_t* scales = w.scales + r * (w.cols / kNvfp4Block);
  double sum = 0.0;
  for (std::int64_t first = 0; first < w.cols; first += kFp8Tile) {
    const std::int64_t last = std::min(first + kFp8Tile, w.cols);
    double tile = 0.0;
    for (std::int64_t k = first; k < last; ++k) {
      const std::uint8_t folded = fp8_fold(nibble(codes, k), scales[k / kNvfp4Block]);
      tile += static_cast<double>(decode_e4m3(x[k])) * static_cast<double>(decode_e4m3(folded));
    }
    sum += tile * d[first / kFp8Tile];
  }
  return static_cast<float>(sum * (1.0 / kFp8FoldShift) * w.tensor_scale);
}

float dot_nvfp4(const std::uint8_t* x_codes, const std::uint8_t* x_scales, float x_tensor_scale,
                const WeightMatrix& w, std::int64_t r) {
  const std::uint8_t* w_codes = w.codes + r * (w.cols / 2);
  const std::uint8_t* w_scales = w.scales + r * (w.cols / kNvfp4Block);
  float acc = 0.0f;
  for (std::int64_t block = 0; block < w.cols / kNvfp4Block; ++block) {
    int dot = 0;  // four times the dot product: both factors are doubled
    for (std::int64_t k = block * kNvfp4Block; k < (block + 1) * kNvfp4Block; ++k) {
      dot += e2m1_doubled(nibble(x_codes, k)) * e2m1_doubled(nibble(w_codes, k));
    }
    const float scale = decode_e4m3(w_scales[block]) * decode_e4m3(x_scales[block]);
    acc += static_cast<float>(dot) * 0.25f * scale;
  }
  return (acc * x_tensor_scale) * w.tensor_scale;
}

}  // namespace

void matmul(const ActivationRows& x, const std::int32_t* row_map, std::int64_t first, std::int64_t count,
            const WeightMatrix& w, std::string_view where, float* y) {
  if (x.format != ActivationFormat::kBf16 && w.format != WeightFormat::kNvfp4) {
    fail(ErrorCode::kUnsupported, "activations in {} need NVFP4 weights, but {} is {}; use bf16 activations",
         to_string(x.format), where, to_string(w.format));
  }
  const std::int64_t tiles = (x.cols + kFp8Tile - 1) / kFp8Tile;
  parallel_for(w.rows, grain(count * w.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t j = 0; j < count; ++j) {
      const std::int64_t row = row_map == nullptr ? first + j : row_map[first + j];
      for (std::int64_t r = begin; r < end; ++r) {
        float& out = y[j * w.rows + r];
        switch (x.format) {
          case ActivationFormat::kBf16: out = dot_bf16(x.values + row * x.row_stride, w, r); break;
          case ActivationFormat::kFp8:
            out = dot_fp8(x.codes + row * x.cols, x.scales + row * tiles, w, r);
            break;
          case ActivationFormat::kNvfp4:
            out = dot_nvfp4(x.codes + row * (x.cols / 2), x.block_scales + row * (x.cols / kNvfp4Block),
                            x.scales[row], w, r);
            break;
        }
      }
    }
  });
}

}  // namespace megamoe::ref
