// expert_matrix.cc: finds a matrix' bytes in its tensors, then decodes them.
//
// Whatever the encoding, codes and scales are grids of small units: an element, a byte of two codes, a scale
// of a block. A projection is every row_step-th row of such a grid [stored_rows, units], one grid for each
// expert, row-major or (transposed) column-major.
#include "checkpoint/expert_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/check.h"
#include "base/parallel.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/fp16.h"
#include "numerics/mxfp4.h"
#include "numerics/mxfp4_to_nvfp4.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

constexpr std::int64_t kGrainBytes = 1 << 16;  // what is worth handing to a thread

std::int64_t rows_of_grain(std::int64_t row_bytes) { return kGrainBytes / (row_bytes + 1) + 1; }

const std::string& name_of(const TensorRef* tensor) { return tensor->info->name; }

// "tensor (expert 3)" where the tensor holds several experts.
std::string place(const ExpertMatrix& matrix, const TensorRef* tensor) {
  return matrix.fused_experts ? fmt::format("{} (expert {})", name_of(tensor), matrix.expert)
                              : name_of(tensor);
}

std::int64_t stored_row(const ExpertMatrix& matrix, std::int64_t row) {
  return matrix.row_first + row * matrix.row_step;
}

// The first byte of the expert's grid of `units` units of `unit_bytes` in each of its stored rows.
const std::uint8_t* grid_of(const ExpertMatrix& matrix, const TensorRef* tensor, std::int64_t units,
                            std::int64_t unit_bytes) {
  MEGAMOE_CHECK(tensor != nullptr);
  const std::int64_t grid = checked_mul(checked_mul(matrix.stored_rows, units), unit_bytes);
  const std::int64_t begin = matrix.fused_experts ? checked_mul(matrix.expert, grid) : 0;
  MEGAMOE_CHECK(checked_add(begin, grid) <= tensor->info->bytes());
  return reinterpret_cast<const std::uint8_t*>(tensor->bytes().data()) + begin;
}

bool rows_are_adjacent(const ExpertMatrix& matrix) { return !matrix.transposed && matrix.row_step == 1; }

// The projection's rows where they lie one after the other; null where they do not.
const std::uint8_t* view_units(const ExpertMatrix& matrix, const TensorRef* tensor, std::int64_t units,
                               std::int64_t unit_bytes) {
  if (!rows_are_adjacent(matrix)) return nullptr;
  return grid_of(matrix, tensor, units, unit_bytes) + matrix.row_first * units * unit_bytes;
}

template <std::int64_t kBytes>
void gather_columns(const ExpertMatrix& matrix, const std::uint8_t* grid, std::int64_t units,
                    std::uint8_t* out) {
  // Tiles, so that neither side is walked with a large stride for long.
  constexpr std::int64_t kTile = 64;
  parallel_for((matrix.rows + kTile - 1) / kTile, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r0 = begin * kTile; r0 < std::min(end * kTile, matrix.rows); r0 += kTile) {
      const std::int64_t r1 = std::min(r0 + kTile, matrix.rows);
      for (std::int64_t u0 = 0; u0 < units; u0 += kTile) {
        for (std::int64_t r = r0; r < r1; ++r) {
          for (std::int64_t u = u0; u < std::min(u0 + kTile, units); ++u) {
            std::memcpy(out + (r * units + u) * kBytes,
                        grid + (u * matrix.stored_rows + stored_row(matrix, r)) * kBytes, kBytes);
          }
        }
      }
    }
  });
}

// The projection's rows, one after the other, into `out` [rows, units].
void gather_units(const ExpertMatrix& matrix, const TensorRef* tensor, std::int64_t units,
                  std::int64_t unit_bytes, void* out_memory) {
  const std::uint8_t* grid = grid_of(matrix, tensor, units, unit_bytes);
  auto* out = static_cast<std::uint8_t*>(out_memory);
  if (!matrix.transposed) {
    const std::int64_t row_bytes = units * unit_bytes;
    parallel_for(matrix.rows, rows_of_grain(row_bytes), [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t r = begin; r < end; ++r) {
        std::memcpy(out + r * row_bytes, grid + stored_row(matrix, r) * row_bytes,
                    static_cast<std::size_t>(row_bytes));
      }
    });
    return;
  }
  switch (unit_bytes) {
    case 1: gather_columns<1>(matrix, grid, units, out); break;
    case 2: gather_columns<2>(matrix, grid, units, out); break;
    case 4: gather_columns<4>(matrix, grid, units, out); break;
    default: fail(ErrorCode::kInternal, "no gather for units of {} bytes", unit_bytes);
  }
}

std::vector<std::uint8_t> gather_bytes(const ExpertMatrix& matrix, const TensorRef* tensor,
                                       std::int64_t units) {
  std::vector<std::uint8_t> out(static_cast<std::size_t>(checked_mul(matrix.rows, units)));
  gather_units(matrix, tensor, units, 1, out.data());
  return out;
}

float load_f32(const std::uint8_t* bytes) {
  float value;
  std::memcpy(&value, bytes, sizeof(value));
  return value;
}

// Element `i` of a tensor of any float type (or E8M0) as FP32.
float element_of(const TensorRef& tensor, std::int64_t i) {
  const auto* bytes = reinterpret_cast<const std::uint8_t*>(tensor.bytes().data());
  std::uint16_t half;
  switch (tensor.info->dtype) {
    case DType::kF32: return load_f32(bytes + 4 * i);
    case DType::kBF16: std::memcpy(&half, bytes + 2 * i, 2); return to_float(bf16{half});
    case DType::kF16: std::memcpy(&half, bytes + 2 * i, 2); return to_float(fp16{half});
    case DType::kE8M0: return decode_e8m0(bytes[i]);
    default:
      fail(ErrorCode::kUnsupported, "{} ({}): expected F32, F16 or BF16", tensor.info->name,
           describe(*tensor.info));
  }
}

// A scale of a whole tensor as the multiplier.
float read_scalar(const ExpertMatrix& matrix, const TensorRef* tensor) {
  const std::int64_t count = tensor->info->elements();
  const std::int64_t own = matrix.fused_experts && count != 1 ? matrix.expert : 0;
  if (own >= count) {
    fail(ErrorCode::kInvalidFile, "{} ({}): expected a scale, got {}", place(matrix, tensor),
         describe(*tensor->info), count == 0 ? "none" : "too few");
  }
  const float stored = element_of(*tensor, own);
  const float value = matrix.reciprocal ? 1.0f / stored : stored;
  if (!(std::isfinite(stored) && stored > 0.0f && std::isfinite(value) && value > 0.0f)) {
    fail(ErrorCode::kInvalidFile, "{}: the scale must be finite and positive, got {}", place(matrix, tensor),
         stored);
  }
  return value;
}

// Refuses negative and NaN block scales, in the order of rows.
void check_e4m3_scales(const ExpertMatrix& matrix, const std::uint8_t* scales) {
  const std::int64_t groups = matrix.cols / kNvfp4Block;
  const auto valid = [](std::uint8_t scale) { return scale < kE4M3NaN || scale == 0x80; };  // -0 is 0
  parallel_for(matrix.rows, rows_of_grain(groups), [&](std::int64_t begin, std::int64_t end) {
    std::uint8_t faults = 0;  // looked for without a branch, as there are none as a rule
    for (std::int64_t i = begin * groups; i < end * groups; ++i) faults |= valid(scales[i]) ? 0 : 1;
    if (faults == 0) return;
    for (std::int64_t i = begin * groups; i < end * groups; ++i) {
      if (valid(scales[i])) continue;
      fail(ErrorCode::kInvalidFile, "{}: row {}, block {} has the scale 0x{:02x}, which is {}",
           place(matrix, matrix.block_scale), stored_row(matrix, i / groups), i % groups, scales[i],
           (scales[i] & 0x7F) == kE4M3NaN ? "NaN" : "negative");
    }
  });
}

void check_e8m0_scales(const ExpertMatrix& matrix, const std::vector<std::uint8_t>& scales) {
  const std::int64_t groups = matrix.cols / kMxfp4Block;
  for (std::size_t i = 0; i < scales.size(); ++i) {
    if (scales[i] != kE8M0NaN) continue;
    const auto block = static_cast<std::int64_t>(i);
    fail(ErrorCode::kInvalidFile, "{}: row {}, block {} has the scale 0xff, which is NaN",
         place(matrix, matrix.block_scale), stored_row(matrix, block / groups), block % groups);
  }
}

struct Codes {
  std::vector<std::uint8_t> codes;
  std::vector<std::uint8_t> scales;
};

Codes gather_codes(const ExpertMatrix& matrix, std::int64_t block) {
  return {gather_bytes(matrix, matrix.weight, matrix.cols / 2),
          gather_bytes(matrix, matrix.block_scale, matrix.cols / block)};
}

// The largest exponent of an MXFP4 matrix, its scales checked first.
std::optional<int> max_exponent(const ExpertMatrix& matrix, const Codes& data) {
  check_e8m0_scales(matrix, data.scales);
  return mxfp4_max_exponent({data.codes.data(), data.scales.data(), matrix.rows, matrix.cols});
}

std::vector<float> matrix_of_floats(const ExpertMatrix& matrix) {
  return std::vector<float>(static_cast<std::size_t>(checked_mul(matrix.rows, matrix.cols)));
}

// Calls body(row) for each row, on the threads.
template <class Body>
void for_each_row(const ExpertMatrix& matrix, const Body& body) {
  parallel_for(matrix.rows, rows_of_grain(4 * matrix.cols), [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) body(r);
  });
}

std::vector<float> dense_f32(const ExpertMatrix& matrix) {
  std::vector<float> out = matrix_of_floats(matrix);
  const DType dtype = matrix.weight->info->dtype;
  if (dtype == DType::kF32) {
    gather_units(matrix, matrix.weight, matrix.cols, 4, out.data());
    return out;
  }
  std::vector<std::uint16_t> halves(out.size());
  gather_units(matrix, matrix.weight, matrix.cols, 2, halves.data());
  for_each_row(matrix, [&](std::int64_t r) {
    for (std::int64_t i = r * matrix.cols; i < (r + 1) * matrix.cols; ++i) {
      const auto j = static_cast<std::size_t>(i);
      out[j] = dtype == DType::kBF16 ? to_float(bf16{halves[j]}) : to_float(fp16{halves[j]});
    }
  });
  return out;
}

std::vector<float> nvfp4_f32(const ExpertMatrix& matrix) {
  const Codes data = gather_codes(matrix, kNvfp4Block);
  check_e4m3_scales(matrix, data.scales.data());
  const float tensor_scale = read_scalar(matrix, matrix.tensor_scale);
  std::vector<float> out = matrix_of_floats(matrix);
  for_each_row(matrix, [&](std::int64_t r) {
    for (std::int64_t i = r * matrix.cols; i < (r + 1) * matrix.cols; ++i) {
      out[static_cast<std::size_t>(i)] = nvfp4_value(
          nibble(data.codes.data(), i), data.scales[static_cast<std::size_t>(i / kNvfp4Block)], tensor_scale);
    }
  });
  return out;
}

std::vector<float> mxfp4_f32(const ExpertMatrix& matrix) {
  const Codes data = gather_codes(matrix, kMxfp4Block);
  check_e8m0_scales(matrix, data.scales);
  std::vector<float> out = matrix_of_floats(matrix);
  for_each_row(matrix, [&](std::int64_t r) {
    for (std::int64_t i = r * matrix.cols; i < (r + 1) * matrix.cols; ++i) {
      const auto j = static_cast<std::size_t>(i);
      out[j] =
          mxfp4_value(nibble(data.codes.data(), i), data.scales[static_cast<std::size_t>(i / kMxfp4Block)]);
      if (!std::isfinite(out[j])) {
        fail(ErrorCode::kInvalidFile, "{}: row {}, block {} holds a value beyond FP32",
             place(matrix, matrix.block_scale), stored_row(matrix, r), i % matrix.cols / kMxfp4Block);
      }
    }
  });
  return out;
}

// The FP8 scale at `index` of the tensor of scales; 0 is allowed, it belongs to a block of zeros.
float fp8_scale(const ExpertMatrix& matrix, std::int64_t index) {
  const float value = element_of(*matrix.block_scale, index);
  if (!std::isfinite(value) || value < 0.0f) {
    fail(ErrorCode::kInvalidFile, "{}: scale {} must be finite and not negative, got {}",
         name_of(matrix.block_scale), index, value);
  }
  return value;
}

std::vector<float> fp8_f32(const ExpertMatrix& matrix) {
  std::vector<float> out = matrix_of_floats(matrix);
  const std::vector<std::uint8_t> codes = gather_bytes(matrix, matrix.weight, matrix.cols);
  const bool blocks = matrix.encoding == Encoding::kFp8Block;
  const std::int64_t row_blocks = (matrix.stored_rows + kFp8Block - 1) / kFp8Block;
  const std::int64_t col_blocks = (matrix.cols + kFp8Block - 1) / kFp8Block;
  const std::int64_t count = matrix.block_scale->info->elements();
  const std::int64_t own = count / (matrix.fused_experts && count != 1 ? matrix.weight->info->shape.front()
                                                                       : 1);  // scales of one expert
  const std::int64_t first = matrix.fused_experts && count != 1 ? matrix.expert * own : 0;
  for_each_row(matrix, [&](std::int64_t r) {
    const std::int64_t stored = stored_row(matrix, r);
    float scale = blocks ? 0.0f : fp8_scale(matrix, first + (own == 1 ? 0 : stored));
    for (std::int64_t c = 0; c < matrix.cols; ++c) {
      if (blocks && c % kFp8Block == 0) {
        const std::int64_t rb = stored / kFp8Block, cb = c / kFp8Block;
        scale = fp8_scale(matrix, first + (matrix.transposed ? cb * row_blocks + rb : rb * col_blocks + cb));
      }
      const auto j = static_cast<std::size_t>(r * matrix.cols + c);
      out[j] = decode_e4m3(codes[j]) * scale;
    }
  });
  return out;
}

}  // namespace

std::vector<float> read_f32(const ExpertMatrix& matrix) {
  switch (matrix.encoding) {
    case Encoding::kDense: return dense_f32(matrix);
    case Encoding::kNvfp4: return nvfp4_f32(matrix);
    case Encoding::kMxfp4: return mxfp4_f32(matrix);
    case Encoding::kFp8Block:
    case Encoding::kFp8Tensor: return fp8_f32(matrix);
  }
  fail(ErrorCode::kInternal, "unknown encoding");
}

std::vector<bf16> read_bf16(const ExpertMatrix& matrix) {
  MEGAMOE_CHECK(matrix.encoding == Encoding::kDense && matrix.weight->info->dtype == DType::kBF16);
  std::vector<bf16> out(static_cast<std::size_t>(checked_mul(matrix.rows, matrix.cols)));
  gather_units(matrix, matrix.weight, matrix.cols, 2, out.data());
  return out;
}

const bf16* view_bf16(const ExpertMatrix& matrix) {
  if (matrix.encoding != Encoding::kDense || matrix.weight->info->dtype != DType::kBF16) return nullptr;
  const std::uint8_t* bytes = view_units(matrix, matrix.weight, matrix.cols, 2);
  const bool aligned = reinterpret_cast<std::uintptr_t>(bytes) % alignof(bf16) == 0;
  return aligned ? reinterpret_cast<const bf16*>(bytes) : nullptr;
}

std::optional<Nvfp4View> view_nvfp4(const ExpertMatrix& matrix) {
  if (matrix.encoding != Encoding::kNvfp4 || !rows_are_adjacent(matrix)) return std::nullopt;
  Nvfp4View view;
  view.codes = view_units(matrix, matrix.weight, matrix.cols / 2, 1);
  view.scales = view_units(matrix, matrix.block_scale, matrix.cols / kNvfp4Block, 1);
  view.tensor_scale = read_scalar(matrix, matrix.tensor_scale);
  check_e4m3_scales(matrix, view.scales);
  return view;
}

Nvfp4Data read_nvfp4(const ExpertMatrix& matrix, const ExpertMatrix* scale_partner) {
  Nvfp4Data out;
  if (matrix.encoding == Encoding::kNvfp4) {
    Codes data = gather_codes(matrix, kNvfp4Block);
    check_e4m3_scales(matrix, data.scales.data());
    out.codes = std::move(data.codes);
    out.scales = std::move(data.scales);
    out.tensor_scale = read_scalar(matrix, matrix.tensor_scale);
    return out;
  }
  MEGAMOE_CHECK(matrix.encoding == Encoding::kMxfp4);
  Codes data = gather_codes(matrix, kMxfp4Block);
  std::optional<int> k_max = max_exponent(matrix, data);
  if (scale_partner != nullptr && scale_partner->encoding == Encoding::kMxfp4) {
    const std::optional<int> other = max_exponent(*scale_partner, gather_codes(*scale_partner, kMxfp4Block));
    if (other) k_max = std::max(k_max.value_or(*other), *other);
  }
  out.scales.resize(data.scales.size() * 2);
  const Mxfp4View view{data.codes.data(), data.scales.data(), matrix.rows, matrix.cols};
  const Mxfp4Cast cast = cast_mxfp4_to_nvfp4(view, k_max, data.codes.data(), out.scales.data());
  out.codes = std::move(data.codes);
  out.tensor_scale = cast.tensor_scale;
  out.inexact_blocks = cast.inexact_blocks;
  return out;
}

float read_input_scale(const ExpertMatrix& matrix) {
  return matrix.input_scale == nullptr ? 0.0f : read_scalar(matrix, matrix.input_scale);
}

std::vector<float> read_bias(const ExpertMatrix& matrix) {
  std::vector<float> out;
  if (matrix.bias == nullptr) return out;
  out.reserve(static_cast<std::size_t>(matrix.rows));
  const std::int64_t first = matrix.fused_experts ? matrix.expert * matrix.stored_rows : 0;
  for (std::int64_t r = 0; r < matrix.rows; ++r) {
    out.push_back(element_of(*matrix.bias, first + stored_row(matrix, r)));
  }
  return out;
}

std::vector<float> read_f32(const TensorRef& tensor) {
  std::vector<float> out(static_cast<std::size_t>(tensor.info->elements()));
  for (std::size_t i = 0; i < out.size(); ++i) out[i] = element_of(tensor, static_cast<std::int64_t>(i));
  return out;
}

std::int64_t count_nans(const std::vector<float>& values) {
  return std::count_if(values.begin(), values.end(), [](float value) { return std::isnan(value); });
}

}  // namespace megamoe
