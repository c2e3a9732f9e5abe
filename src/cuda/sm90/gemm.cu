// gemm.cu: checks a call, describes its tokens and hands it to the kernels of its operands.
#include "cuda/sm90/gemm.h"

#include <atomic>

#include "cuda/gather.h"
#include "cuda/quantize.h"
#include "cuda/sm90/epilogue.cuh"
#include "cuda/sm90/few_rows.cuh"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/launch_gemm.cuh"

namespace megamoe::sm90 {
namespace {

// H and I at most: pieces of work are counted in 32 bits.
constexpr std::int64_t kMaxSize = 1 << 20;

// cuTensorMapEncodeTiled, from the driver: a program that links with it would not start without one.
using EncodeTiled = decltype(&cuTensorMapEncodeTiled);
cudaError_t find_encode_tiled(EncodeTiled* encode) {
  static std::atomic<EncodeTiled> found = nullptr;  // any thread may be the first, and more than one
  *encode = found;
  if (*encode != nullptr) return cudaSuccess;
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult result;
  const cudaError_t status =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &entry, 12000, cudaEnableDefault, &result);
  if (status != cudaSuccess) return status;
  if (result != cudaDriverEntryPointSuccess) return cudaErrorSymbolNotFound;
  found = *encode = reinterpret_cast<EncodeTiled>(entry);
  return cudaSuccess;
}

// A matrix [rows, cols] of which boxes are copied to shared memory.
struct Boxes {
  CUtensorMapDataType type;
  const void* data;
  std::int64_t rows, cols, row_bytes;
  int box_rows, box_cols;
  CUtensorMapSwizzle swizzle;
};
cudaError_t describe(const Boxes& boxes, CUtensorMap* map) {
  EncodeTiled encode = nullptr;
  if (const cudaError_t status = find_encode_tiled(&encode); status != cudaSuccess) return status;
  const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(boxes.cols), static_cast<cuuint64_t>(boxes.rows)};
  const cuuint64_t strides[1] = {static_cast<cuuint64_t>(boxes.row_bytes)};
  const cuuint32_t box[2] = {static_cast<cuuint32_t>(boxes.box_cols),
                             static_cast<cuuint32_t>(boxes.box_rows)};
  const cuuint32_t steps[2] = {1, 1};
  const CUresult result = encode(map, boxes.type, 2, const_cast<void*>(boxes.data), sizes, strides, box,
                                 steps, CU_TENSOR_MAP_INTERLEAVE_NONE, boxes.swizzle,
                                 CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

// A chunk's columns of a tile's tokens, 128 bytes of each, as the swizzled tiles of wgmma want them; for FP8
// their scales, too.
cudaError_t describe_tokens(const ActivationRows& tokens, int experts, int tile_tokens, GemmParams* params) {
  const bool fp8 = tokens.format == ActivationFormat::kFp8;
  const void* data = fp8 ? static_cast<const void*>(tokens.codes) : tokens.values;
  const TileWidths widths = tile_widths(operand_type(tokens.format), tile_tokens);
  for (int i = 0; i < widths.count; ++i) {
    const cudaError_t status =
        describe({.type = fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
                  .data = data,
                  .rows = tokens.rows,
                  .cols = fp8 ? fp8_row_bytes(tokens.cols) : tokens.cols,
                  .row_bytes = fp8 ? fp8_row_bytes(tokens.cols) : tokens.row_stride * 2,
                  .box_rows = widths.share(i),
                  .box_cols = chunk_cols(operand_type(tokens.format)),
                  .swizzle = CU_TENSOR_MAP_SWIZZLE_128B},
                 &params->tokens[i]);
    if (status != cudaSuccess) return status;
  }
  if (!fp8) return cudaSuccess;
  return describe({.type = CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
                   .data = tokens.scales,
                   .rows = fp8_groups(tokens.cols),
                   .cols = fp8_scale_pitch(tokens.rows, experts),
                   .row_bytes = fp8_scale_pitch(tokens.rows, experts) * 4,
                   .box_rows = 1,
                   .box_cols = tile_tokens,
                   .swizzle = CU_TENSOR_MAP_SWIZZLE_NONE},
                  &params->token_scales);
}

// BF16 rows in expert order: the tokens themselves, or made of them at `workspace`. NVFP4 tokens are decoded
// here, once and without their tensor scales, rather than by every tile that reads them.
// `launched`: there was something to do.
cudaError_t order_tokens(const GroupedInput& in, cudaStream_t stream, ActivationRows* ordered,
                         bool* launched) {
  *ordered = in.tokens;
  *launched = false;
  if (in.tokens.format == ActivationFormat::kFp8) return cudaSuccess;
  if (in.tokens.format == ActivationFormat::kBf16 && in.gather == nullptr) return cudaSuccess;
  if (in.tokens.format == ActivationFormat::kNvfp4 && in.decoded) {
    *ordered = {.rows = in.max_rows, .cols = in.cols, .row_stride = in.cols, .values = in.tokens.values};
    return cudaSuccess;
  }
  *launched = true;
  auto* made = static_cast<bf16*>(in.workspace);
  const cuda::RowCount rows(in.max_rows, in.offsets + in.experts);
  *ordered = {.rows = in.max_rows, .cols = in.cols, .row_stride = in.cols, .values = made};
  if (in.tokens.format == ActivationFormat::kBf16) {
    return cuda::gather_rows(in.tokens.values, in.tokens.row_stride, in.gather, rows, in.cols, made, stream);
  }
  const cuda::Nvfp4In tokens{
      .codes = in.tokens.codes, .scales = in.tokens.block_scales, .row_map = in.gather};
  return cuda::dequantize(tokens, rows, in.cols, cuda::ElementType::kBf16, made, stream);
}

bool valid(const GroupedInput& in) {
  return in.experts > 0 && in.experts <= kMaxExperts && in.cols > 0 && in.cols % 16 == 0 &&
         in.cols <= kMaxSize && in.weight_rows <= kMaxSize && in.max_rows < (1ll << 31) &&
         (in.tokens.format != ActivationFormat::kFp8 || in.gather == nullptr);
}

template <class Epilogue>
cudaError_t run(const GroupedInput& in, WeightRole role, const Epilogue& epilogue, cudaStream_t stream) {
  if (!valid(in)) return cudaErrorInvalidValue;
  const OperandType type = operand_type(in.tokens.format);
  const TileChoice tile = in.tile == TileChoice{} ? choose_tile(type, in.max_rows, in.experts) : in.tile;
  if (!is_tile(type, tile)) return cudaErrorInvalidValue;
  if (in.max_rows == 0) return cudaSuccess;
  GemmParams params{};
  params.weights = in.weights;
  params.tiles = static_cast<int>(tiles_of(role, in.weight_rows));
  params.cols = static_cast<int>(in.cols);
  params.offsets = in.offsets;
  params.experts = in.experts;
  if ((in.max_rows / tile.tokens + in.experts) * params.tiles > INT32_MAX) return cudaErrorInvalidValue;
  ActivationRows tokens;
  bool launched = false;
  if (const cudaError_t status = order_tokens(in, stream, &tokens, &launched); status != cudaSuccess)
    return status;
  params.offsets_settled = in.offsets_settled || launched;
  if (const cudaError_t status = describe_tokens(tokens, in.experts, tile.tokens, &params);
      status != cudaSuccess) {
    return status;
  }
  return type == OperandType::kFp8 ? launch_fp8(tile, params, epilogue, stream)
                                   : launch_bf16(tile, params, epilogue, stream);
}

TokensIn tokens_in(const GroupedInput& in) {
  const int shift = operand_shift(operand_type(in.tokens.format));
  return {static_cast<float>(1 << -shift),
          in.tokens.format == ActivationFormat::kNvfp4 ? in.tokens.scales : nullptr, in.gather};
}

// run(role, epilogue) of a first GEMM.
template <class Run>
cudaError_t with_epilogue(const Gemm1& call, const Run& run) {
  if (call.mode == L1Output::kFp8 && call.in.tokens.format != ActivationFormat::kFp8)
    return cudaErrorInvalidValue;
  HiddenOut out{};
  out.mode = call.mode;
  out.intermediate = static_cast<int>(call.in.weight_rows);
  if (call.mode != L1Output::kNvfp4 || call.decode_out)
    out.values = reinterpret_cast<__nv_bfloat16*>(call.out.values);
  out.codes = call.out.codes;
  out.block_scales = call.out.block_scales;
  out.tensor_scales = call.out.scales;
  out.fp8_scales = call.out.scales;
  out.fp8_pitch = fp8_scale_pitch(call.in.max_rows, call.in.experts);
  out.saturated = call.saturated;
  if (call.activation.gated()) {
    const GatedEpilogue epilogue{
        out, call.activation, tokens_in(call.in), call.weight_scales, call.gate_bias, call.up_bias};
    return run(WeightRole::kGateUp, epilogue);
  }
  if (call.mode == L1Output::kInterleavedBf16) return cudaErrorInvalidValue;
  const Relu2Epilogue epilogue{out, tokens_in(call.in), call.weight_scales, call.up_bias};
  return run(WeightRole::kPlain, epilogue);
}
PlainEpilogue epilogue_of(const Gemm2& call) {
  return {call.in.weight_rows, tokens_in(call.in), call.weight_scales, call.bias, call.out};
}

FewParams::Gemm few_params(const GroupedInput& in, WeightRole role) {
  const bool decoded = in.tokens.format == ActivationFormat::kNvfp4;
  return {.tokens = in.tokens.values,
          .token_stride = decoded ? in.cols : in.tokens.row_stride,
          .weights = in.weights,
          .tiles = static_cast<int>(tiles_of(role, in.weight_rows)),
          .cols = static_cast<int>(in.cols)};
}

}  // namespace

cudaError_t gemm1(const Gemm1& call, cudaStream_t stream) {
  return with_epilogue(
      call, [&](WeightRole role, const auto& epilogue) { return run(call.in, role, epilogue, stream); });
}

cudaError_t gemm2(const Gemm2& call, cudaStream_t stream) {
  return run(call.in, WeightRole::kPlain, epilogue_of(call), stream);
}

cudaError_t few_gemms(const FewGemms& call, cudaStream_t stream) {
  const GroupedInput &first = call.first.in, &second = call.second.in;
  for (const GroupedInput* in : {&first, &second}) {
    const bool readable = in->tokens.format == ActivationFormat::kBf16 ||
                          (in->tokens.format == ActivationFormat::kNvfp4 && in->decoded);
    if (!valid(*in) || !readable || in->max_rows > kFewRows) return cudaErrorInvalidValue;
  }
  const bool combines = call.combine.y != nullptr, sorts = first.max_rows <= kWarpPairs,
             sorted = call.row_tiles != nullptr && call.num_row_tiles != nullptr &&
                      call.row_to_token != nullptr && call.row_to_slot != nullptr;
  if ((combines && (!sorts || call.combine.shared != nullptr)) || (!sorts && !sorted) || call.top_k < 1)
    return cudaErrorInvalidValue;
  if (first.max_rows == 0) return cudaSuccess;
  FewParams params{};
  if (!sorts) {
    params.row_tiles = call.row_tiles;
    params.num_row_tiles = call.num_row_tiles;
    params.row_to_token = call.row_to_token;
    params.row_to_slot = call.row_to_slot;
  }
  params.ids = call.ids;
  params.routing_weights = call.routing_weights;
  params.pairs = static_cast<int>(first.max_rows);
  params.top_k = call.top_k;
  params.experts = first.experts;
  params.by_pair = call.by_pair;
  const std::int64_t token_rows = call.by_pair ? first.max_rows : first.max_rows / call.top_k;
  params.awaited_tokens =
      first.tokens.format == ActivationFormat::kBf16 ? 0 : static_cast<std::uint32_t>(token_rows);
  params.combines = combines;
  params.combine = call.combine;
  params.combines_aligned = cuda::combines_aligned(call.combine);
  params.counters = call.counters;
  return with_epilogue(call.first, [&](WeightRole role, const auto& epilogue) {
    params.gemms[0] = few_params(first, role);
    params.gemms[1] = few_params(second, WeightRole::kPlain);
    return launch_few(params, epilogue, epilogue_of(call.second), stream);
  });
}

}  // namespace megamoe::sm90
