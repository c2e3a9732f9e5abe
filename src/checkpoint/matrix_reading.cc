// matrix_reading.cc: the table of encodings and what each demands of its tensors.
#include "checkpoint/matrix_reading.h"

#include <initializer_list>

#include "base/check.h"

namespace megamoe {
namespace {

// The one of `choices` that is there; null if none; an error if several are.
const TensorRef* one_of(const MatrixParts& parts, std::initializer_list<TensorPart> choices) {
  const TensorRef* found = nullptr;
  for (TensorPart part : choices) {
    if (parts[part] == nullptr) continue;
    if (found != nullptr) {
      fail(ErrorCode::kInvalidFile, "{} and {} are both there, expected one of them", found->info->name,
           parts[part]->info->name);
    }
    found = parts[part];
  }
  return found;
}

const TensorRef* block_scale_of(const MatrixParts& parts) {
  return one_of(parts,
                {TensorPart::kWeightScale, TensorPart::kScale, TensorPart::kScales, TensorPart::kScaleInv});
}

const TensorRef* tensor_scale_of(const MatrixParts& parts) {
  return one_of(parts, {TensorPart::kTensorScale, TensorPart::kGlobalScale});
}

void refuse_extra(const TensorRef& weight, const TensorRef* extra, const char* kind) {
  if (extra != nullptr) {
    fail(ErrorCode::kInvalidFile, "{} is {} and cannot have {}", named(weight), kind, named(*extra));
  }
}

// A scalar is stored as [] or [1]; a tensor of all experts may have one for each.
void check_scalar(const TensorRef& tensor, std::int64_t num_experts) {
  const std::int64_t count = tensor.info->elements();
  if (tensor.info->dtype != DType::kF32 || (count != 1 && (num_experts == 0 || count != num_experts))) {
    fail(ErrorCode::kInvalidFile, "{}: expected one F32 number{}", named(tensor),
         num_experts == 0 ? "" : ", or one for each expert");
  }
}

struct Shape2 {
  std::int64_t lead, a, b;  // lead 0: no dimension of experts
};

// Splits [E,] a, b off a shape; an all-ones tail counts as no dimensions when `ones` is set.
Shape2 split_shape(const TensorRef& tensor, bool all_experts, std::size_t extra_dims = 0) {
  const auto& shape = tensor.info->shape;
  const std::size_t lead = all_experts ? 1 : 0;
  if (shape.size() != lead + 2 + extra_dims) {
    fail(ErrorCode::kInvalidFile, "{}: expected {} dimensions", named(tensor), lead + 2 + extra_dims);
  }
  for (std::int64_t dim : shape) {
    if (dim == 0) fail(ErrorCode::kInvalidFile, "{}: an expert's tensor cannot be empty", named(tensor));
  }
  return {all_experts ? shape[0] : 0, shape[lead], shape[lead + 1]};
}

bool shape_is(const TensorRef& tensor, std::int64_t lead, std::int64_t a, std::int64_t b) {
  const std::vector<std::int64_t> wanted =
      lead == 0 ? std::vector<std::int64_t>{a, b} : std::vector<std::int64_t>{lead, a, b};
  return tensor.info->shape == wanted;
}

Family family_of(const MatrixParts& parts, Encoding encoding) {
  if (parts[TensorPart::kBlocks] != nullptr) return Family::kGptOss;
  if (parts[TensorPart::kPacked] != nullptr) return Family::kCompressedTensors;
  if (encoding == Encoding::kMxfp4 && parts[TensorPart::kScale] != nullptr) return Family::kDeepSeekV4;
  if (encoding == Encoding::kNvfp4 || encoding == Encoding::kMxfp4) return Family::kModelOpt;
  return Family::kPlain;
}

std::vector<MatrixReading> dense_readings(const MatrixParts& parts, const TensorRef& weight,
                                          bool all_experts) {
  refuse_extra(weight, block_scale_of(parts), "unquantised");
  refuse_extra(weight, tensor_scale_of(parts), "unquantised");
  const Shape2 s = split_shape(weight, all_experts);
  std::vector<MatrixReading> out = {{Encoding::kDense, Family::kPlain, false, s.lead, s.a, s.b}};
  if (all_experts) out.push_back({Encoding::kDense, Family::kPlain, true, s.lead, s.b, s.a});
  return out;
}

std::vector<MatrixReading> fp4_readings(const MatrixParts& parts, const TensorRef& weight, bool all_experts) {
  const TensorRef* scale = block_scale_of(parts);
  if (scale == nullptr) {
    fail(ErrorCode::kInvalidFile, "{} holds packed codes but there is no block scale beside it",
         named(weight));
  }
  const DType dtype = scale->info->dtype;
  const bool nvfp4 = dtype == DType::kE4M3;
  if (!nvfp4 && dtype != DType::kU8 && dtype != DType::kE8M0) {
    fail(ErrorCode::kInvalidFile, "{}: the block scales of {} must be F8_E4M3, F8_E8M0 or U8", named(*scale),
         weight.info->name);
  }
  const Encoding encoding = nvfp4 ? Encoding::kNvfp4 : Encoding::kMxfp4;
  const bool blocks = parts[TensorPart::kBlocks] != nullptr;
  const Shape2 s = split_shape(weight, all_experts, blocks ? 1 : 0);
  if (blocks && weight.info->shape.back() != 16) {
    fail(ErrorCode::kInvalidFile, "{}: expected blocks of 16 bytes", named(weight));
  }
  const std::int64_t per_unit = blocks ? 32 : weight.info->dtype == DType::kF4 ? 1 : 2;
  const std::int64_t per_scale = nvfp4 ? 16 : 32;
  std::vector<MatrixReading> out;
  const auto try_reading = [&](bool transposed, std::int64_t rows, std::int64_t units) {
    const std::int64_t cols = checked_mul(units, per_unit);
    if (cols % per_scale != 0) return;
    const std::int64_t groups = cols / per_scale;
    if (shape_is(*scale, s.lead, transposed ? groups : rows, transposed ? rows : groups)) {
      out.push_back({encoding, family_of(parts, encoding), transposed, s.lead, rows, cols});
    }
  };
  try_reading(false, s.a, s.b);
  // Packed along the first dimension: only ever seen where one tensor holds all experts.
  if (all_experts && !blocks && weight.info->dtype != DType::kF4) try_reading(true, s.b, s.a);
  if (out.empty()) {
    fail(ErrorCode::kInvalidFile, "{} and {} do not fit: expected one scale for {} columns of each row",
         named(weight), named(*scale), per_scale);
  }

  const TensorRef* tensor_scale = tensor_scale_of(parts);
  if (!nvfp4) {
    refuse_extra(weight, tensor_scale, "MXFP4");
  } else if (tensor_scale == nullptr) {
    fail(ErrorCode::kInvalidFile, "{} is NVFP4 but its tensor scale {} is missing", named(weight),
         parts.module + (parts[TensorPart::kPacked] != nullptr ? ".weight_global_scale"
                         : all_experts                         ? "_weight_scale_2"
                                                               : ".weight_scale_2"));
  } else {
    const bool packed = parts[TensorPart::kPacked] != nullptr;
    if (packed != (parts[TensorPart::kGlobalScale] != nullptr)) {
      fail(ErrorCode::kInvalidFile, "{} and {} follow different conventions", weight.info->name,
           tensor_scale->info->name);
    }
    check_scalar(*tensor_scale, s.lead);
  }
  return out;
}

std::vector<MatrixReading> fp8_readings(const MatrixParts& parts, const TensorRef& weight, bool all_experts) {
  const TensorRef* scale = block_scale_of(parts);
  if (scale == nullptr) {
    fail(ErrorCode::kInvalidFile, "{} is FP8 but there is no scale beside it", named(weight));
  }
  refuse_extra(weight, tensor_scale_of(parts), "FP8");
  const DType dtype = scale->info->dtype;
  if (!is_float(dtype) && dtype != DType::kE8M0) {
    fail(ErrorCode::kUnsupported, "{}: FP8 weights need F32, BF16 or F8_E8M0 scales", named(*scale));
  }
  const Shape2 s = split_shape(weight, all_experts);
  std::vector<MatrixReading> out;
  const auto try_reading = [&](bool transposed, std::int64_t rows, std::int64_t cols) {
    const std::int64_t row_blocks = (rows - 1) / kFp8Block + 1, col_blocks = (cols - 1) / kFp8Block + 1;
    const std::int64_t count = scale->info->elements();
    const std::int64_t experts = all_experts ? s.lead : 1;
    const bool per_row = shape_is(*scale, s.lead, rows, 1) ||
                         (!all_experts && scale->info->shape == std::vector<std::int64_t>{rows}) ||
                         (all_experts && scale->info->shape == std::vector<std::int64_t>{s.lead, rows});
    const bool block =
        shape_is(*scale, s.lead, transposed ? col_blocks : row_blocks, transposed ? row_blocks : col_blocks);
    // A matrix of a single block may call its scale either way; the value is the same.
    if (block && (scale == parts[TensorPart::kScaleInv] || !is_float(dtype))) {
      out.push_back({Encoding::kFp8Block, Family::kPlain, transposed, s.lead, rows, cols});
    } else if (is_float(dtype) && (count == 1 || (all_experts && count == experts) || per_row)) {
      out.push_back({Encoding::kFp8Tensor, Family::kPlain, transposed, s.lead, rows, cols});
    } else if (block) {
      out.push_back({Encoding::kFp8Block, Family::kPlain, transposed, s.lead, rows, cols});
    }
  };
  try_reading(false, s.a, s.b);
  if (all_experts) try_reading(true, s.b, s.a);
  if (out.empty()) {
    fail(ErrorCode::kUnsupported,
         "{} and {} do not fit: expected one scale for the tensor, for each row or for {}x{} elements",
         named(weight), named(*scale), kFp8Block, kFp8Block);
  }
  return out;
}

void check_bias(const TensorRef& bias, const MatrixReading& reading) {
  const std::vector<std::int64_t> wanted =
      reading.num_experts == 0 ? std::vector<std::int64_t>{reading.stored_rows}
                               : std::vector<std::int64_t>{reading.num_experts, reading.stored_rows};
  if (!is_float(bias.info->dtype) || bias.info->shape != wanted) {
    fail(ErrorCode::kInvalidFile, "{}: expected a floating-point bias [{}]", named(bias),
         fmt::join(wanted, ", "));
  }
}

}  // namespace

const TensorRef& weight_tensor(const MatrixParts& parts) {
  const TensorRef* weight = one_of(parts, {TensorPart::kWeight, TensorPart::kPacked, TensorPart::kBlocks});
  if (weight == nullptr) {
    fail(ErrorCode::kInvalidFile, "{} has scales or a bias but no weight", parts.module);
  }
  return *weight;
}

std::vector<MatrixReading> matrix_readings(const MatrixParts& parts, bool all_experts) {
  const TensorRef& weight = weight_tensor(parts);
  switch (weight.info->dtype) {
    case DType::kF32:
    case DType::kF16:
    case DType::kBF16: return dense_readings(parts, weight, all_experts);
    case DType::kU8:
    case DType::kI8:
    case DType::kF4: return fp4_readings(parts, weight, all_experts);
    case DType::kE4M3: return fp8_readings(parts, weight, all_experts);
    default:
      fail(ErrorCode::kUnsupported, "{}: expert weights of this type are not supported", named(weight));
  }
}

ExpertMatrix make_matrix(const MatrixParts& parts, const MatrixReading& reading, std::int64_t expert,
                         std::int64_t rows, std::int64_t row_first, std::int64_t row_step) {
  ExpertMatrix out;
  out.encoding = reading.encoding;
  out.rows = rows;
  out.cols = reading.cols;
  out.weight = &weight_tensor(parts);
  out.block_scale = block_scale_of(parts);
  out.tensor_scale = tensor_scale_of(parts);
  // An input scale beside other weights is one for FP8 activations.
  (out.encoding == Encoding::kNvfp4 ? out.input_scale : out.unused_input_scale) =
      one_of(parts, {TensorPart::kInputScale, TensorPart::kInputGlobalScale});
  out.bias = parts[TensorPart::kBias];
  out.reciprocal = parts[TensorPart::kPacked] != nullptr;
  out.transposed = reading.transposed;
  out.expert = expert;
  out.fused_experts = reading.num_experts != 0;
  out.row_first = row_first;
  out.row_step = row_step;
  out.stored_rows = reading.stored_rows;
  if (out.input_scale != nullptr) {
    if (out.reciprocal != (parts[TensorPart::kInputGlobalScale] != nullptr)) {
      fail(ErrorCode::kInvalidFile, "{} and {} follow different conventions", out.weight->info->name,
           out.input_scale->info->name);
    }
    check_scalar(*out.input_scale, reading.num_experts);
  }
  if (out.bias != nullptr) check_bias(*out.bias, reading);
  return out;
}

}  // namespace megamoe
