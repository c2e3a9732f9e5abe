// gemm_run_test.cc: what gemm_test.h declares.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/sm90/gemm_test.h"
#include "cuda/sm90/pack.h"
#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "tests/independent.h"

namespace megamoe::sm90 {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;
using cuda::Output;

constexpr std::int64_t kRowsBehind = 3;  // of an output: must stay as they are

template <class T>
DeviceArray<T> to_device(const T* from, std::int64_t count) {
  DeviceArray<T> array(count);
  array.upload(from);
  return array;
}

// The first rows * width elements; fails where a later one was written.
template <class T>
std::vector<T> used_rows(const Output<T>& output, std::int64_t rows, std::int64_t width, int poison) {
  std::vector<T> values = output.download();
  const std::vector<std::uint8_t> untouched(size(kRowsBehind * width) * sizeof(T),
                                            static_cast<std::uint8_t>(poison));
  EXPECT_EQ(std::memcmp(values.data() + rows * width, untouched.data(), untouched.size()), 0)
      << "rows behind the last expert's were written";
  values.resize(size(rows * width));
  return values;
}

// NVFP4 rows but for their tensor scales: exact in BF16.
std::vector<bf16> decode(const testing::Rows& rows) {
  std::vector<bf16> values(size(rows.rows * rows.cols));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const auto code = static_cast<std::uint8_t>(rows.codes[i / 2] >> (i % 2 * 4) & 0xF);
    values[i] = to_bf16(decode_e2m1(code) * decode_e4m3(rows.block_scales[i / 16]));
  }
  return values;
}

// Where the kernels keep column k of a row of FP8: in each 64 the 16 groups of 4 columns lie transposed.
std::int64_t fp8_place(std::int64_t k) {
  const std::int64_t four = k % 64 / 4;
  return k / 64 * 64 + (four % 4 * 4 + four / 4) * 4 + k % 4;
}
std::int64_t next_four(std::int64_t n) { return (n + 3) / 4 * 4; }
std::int64_t fp8_pitch(std::int64_t rows, int experts) { return next_four(rows) + 4 * experts; }
// Where the scales of row r are: an expert's begin at a multiple of 4, with a gap of up to 8 before them.
std::int64_t fp8_scale(const RoutedRows& routed, std::int64_t r) {
  std::size_t e = 0;
  while (routed.offsets[e + 1] <= r) ++e;
  return next_four(routed.offsets[e]) + 4 * static_cast<std::int64_t>(e) + r - routed.offsets[e];
}
std::int64_t fp8_width(std::int64_t cols) { return (cols + 127) / 128 * 128; }

// Rows of activations on the GPU. FP8: the row of each routed row.
class DeviceRows {
 public:
  DeviceRows(const testing::Rows& host, bool strided, const RoutedRows& routed,
             const std::vector<std::int32_t>& gather)
      : rows(host.view()) {
    if (host.format == ActivationFormat::kFp8) {
      if (!gather.empty()) rows.rows = static_cast<std::int64_t>(gather.size());
      const std::int64_t width = fp8_width(host.cols), pitch = fp8_pitch(rows.rows, routed.experts()),
                         groups = width / 128;
      std::vector<std::uint8_t> codes(size(rows.rows * width));
      std::vector<float> scales(size(pitch * groups), NAN);
      for (std::int64_t r = 0; r < routed.rows(); ++r) {
        const std::int64_t from = gather.empty() ? r : gather[size(r)];
        for (std::int64_t k = 0; k < host.cols; ++k) {
          codes[size(r * width + fp8_place(k))] = host.codes[size(from * host.cols + k)];
        }
        for (std::int64_t g = 0; g < groups; ++g) {
          scales[size(g * pitch + fp8_scale(routed, r))] = host.scales[size(from * groups + g)];
        }
      }
      codes_ = DeviceArray<std::uint8_t>(codes);
      scales_ = DeviceArray<float>(scales);
      rows.codes = codes_.data();
      rows.scales = scales_.data();
      return;
    }
    if (host.format == ActivationFormat::kBf16) {
      rows.row_stride = host.cols + (strided ? 24 : 0);
      std::vector<bf16> wide(size(host.rows * rows.row_stride), bf16{0x7FC0});
      for (std::int64_t r = 0; r < host.rows; ++r) {
        std::copy_n(host.values.data() + r * host.cols, host.cols, wide.data() + r * rows.row_stride);
      }
      values_ = DeviceArray<bf16>(wide);
      rows.values = values_.data();
      return;
    }
    codes_ = DeviceArray<std::uint8_t>(host.codes);
    block_scales_ = DeviceArray<std::uint8_t>(host.block_scales);
    scales_ = DeviceArray<float>(host.scales);
    rows.codes = codes_.data();
    rows.block_scales = block_scales_.data();
    rows.scales = scales_.data();
  }

  // NVFP4: decoded, in the order of the routed rows, with room for max_rows, instead of codes and block
  // scales.
  void decode_all(const testing::Rows& host, const RoutedRows& routed,
                  const std::vector<std::int32_t>& gather, std::int64_t max_rows) {
    const std::vector<bf16> from = decode(host);
    std::vector<bf16> routed_rows;
    for (std::int64_t r = 0; r < routed.rows(); ++r) {
      const auto row = from.begin() + (gather.empty() ? r : gather[size(r)]) * host.cols;
      routed_rows.insert(routed_rows.end(), row, row + host.cols);
    }
    routed_rows.resize(size(max_rows * host.cols), bf16{0x7FC0});
    values_ = DeviceArray<bf16>(routed_rows);
    rows.values = values_.data();
    rows.codes = rows.block_scales = nullptr;
  }

  ActivationRows rows;

 private:
  DeviceArray<bf16> values_;
  DeviceArray<std::uint8_t> codes_, block_scales_;
  DeviceArray<float> scales_;
};

// What goes with every call: the routing on the GPU, and the workspace. `gather` may be empty.
class DeviceRouting {
 public:
  DeviceRouting(const RoutedRows& routed, const std::vector<std::int32_t>& gather, ActivationFormat format,
                GroupedInput& in, int poison)
      : offsets_(routed.offsets),
        gather_(gather),
        workspace_(gemm_workspace_bytes(format, !gather.empty(), in.max_rows, in.cols), poison) {
    in.offsets = offsets_.data();
    in.gather = gather_.data();
    in.workspace = workspace_.data();
  }
  void check() const { workspace_.download(); }  // looks at its guards

 private:
  DeviceArray<std::int64_t> offsets_;
  DeviceArray<std::int32_t> gather_;
  Output<std::uint8_t> workspace_;
};

}  // namespace

struct DeviceLayer::Role {
  Role(WeightRole role, const std::vector<const WeightMatrix*>& matrices, std::size_t per_expert)
      : rows(matrices[0]->rows), cols(matrices[0]->cols) {
    const auto experts = static_cast<std::int64_t>(matrices.size() / per_expert);
    std::vector<DeviceArray<std::uint8_t>> on_device;
    std::vector<RawWeights> raw;
    std::vector<float> tensor_scales;
    for (std::size_t i = 0; i < matrices.size(); ++i) {
      const std::size_t m = i % per_expert;
      if (m == 0) raw.push_back({{nullptr, nullptr}, {nullptr, nullptr}, rows, cols});
      raw.back().codes[m] = on_device.emplace_back(to_device(matrices[i]->codes, rows * cols / 2)).data();
      raw.back().scales[m] = on_device.emplace_back(to_device(matrices[i]->scales, rows * cols / 16)).data();
      tensor_scales.push_back(matrices[i]->tensor_scale);
    }
    const DeviceArray<RawWeights> table(raw);
    for (const OperandType type : {OperandType::kBf16, OperandType::kFp8}) {
      DeviceArray<std::uint8_t>& to = packed[static_cast<int>(type)];
      to = DeviceArray<std::uint8_t>(experts * packed_bytes(type, role, rows, cols));
      cuda_check(
          pack_layer(type, role, table.data(), static_cast<int>(experts), rows, cols, to.data(), nullptr),
          "packing weights");
    }
    cuda_check(cudaDeviceSynchronize(), "packing weights");
    scales = DeviceArray<float>(tensor_scales);
  }
  void set_bias(int which, const std::vector<ExpertWeights>& experts, const float* ExpertWeights::*member) {
    if (experts[0].*member == nullptr) return;
    std::vector<float> all;
    for (const ExpertWeights& expert : experts) all.insert(all.end(), expert.*member, expert.*member + rows);
    bias[which] = DeviceArray<float>(all);
  }

  std::int64_t rows, cols;
  DeviceArray<std::uint8_t> packed[2];  // by OperandType
  DeviceArray<float> scales;            // [experts], or [experts][2]
  DeviceArray<float> bias[2];           // [experts, rows], empty where there is none
};

DeviceLayer::DeviceLayer(const LayerWeights& weights) : config_(weights.config) {
  const bool gated = config_.activation.gated();
  std::vector<const WeightMatrix*> first, second;
  for (const ExpertWeights& expert : weights.experts) {
    if (gated) first.push_back(&expert.gate);
    first.push_back(&expert.up);
    second.push_back(&expert.down);
  }
  first_ = std::make_unique<Role>(gated ? WeightRole::kGateUp : WeightRole::kPlain, first, gated ? 2 : 1);
  second_ = std::make_unique<Role>(WeightRole::kPlain, second, 1);
  first_->set_bias(0, weights.experts, &ExpertWeights::gate_bias);
  first_->set_bias(1, weights.experts, &ExpertWeights::up_bias);
  second_->set_bias(0, weights.experts, &ExpertWeights::down_bias);
}

DeviceLayer::~DeviceLayer() = default;

GroupedInput DeviceLayer::input(const Role& role, ActivationFormat format, const RoutedRows& routed,
                                const GemmOptions& options) const {
  EXPECT_EQ(routed.experts(), config_.num_experts);
  GroupedInput in;
  in.weights = role.packed[static_cast<int>(operand_type(format))].data();
  in.experts = static_cast<int>(config_.num_experts);
  in.weight_rows = role.rows;
  in.cols = role.cols;
  in.max_rows = options.max_rows != 0 ? options.max_rows : routed.rows();
  EXPECT_GE(in.max_rows, routed.rows());
  in.tile = options.tile;
  return in;
}

HiddenResult DeviceLayer::gemm1(const testing::Rows& x, const RoutedRows& routed, L1Output mode,
                                const std::vector<float>& h_scales, const GemmOptions& options) const {
  const std::int64_t rows = routed.rows(), intermediate = config_.intermediate, all = rows + kRowsBehind;
  const bool fp4 = mode == L1Output::kNvfp4, fp8 = mode == L1Output::kFp8;
  const std::int64_t width = mode == L1Output::kInterleavedBf16 ? 2 * intermediate : intermediate;
  // FP8 comes in expert order.
  const std::vector<std::int32_t> none, &gather = x.format == ActivationFormat::kFp8 ? none : routed.gather;
  DeviceRows tokens(x, options.strided, routed, routed.gather);
  const bool decode_x = options.decoded && x.format == ActivationFormat::kNvfp4;
  const bool decode_h = options.decoded && fp4;
  const Output<bf16> values((fp4 && !decode_h) || fp8 ? 0 : all * width, options.poison);
  const std::int64_t code_width = decode_h ? 0 : fp4 ? intermediate / 2 : fp8 ? fp8_width(intermediate) : 0;
  const Output<std::uint8_t> codes(all * code_width, options.poison),
      block_scales(fp4 && !decode_h ? all * intermediate / 16 : 0, options.poison);
  const DeviceArray<float> scales(h_scales);
  const DeviceArray<unsigned long long> saturated(std::vector<unsigned long long>{100});
  Gemm1 call;
  call.in = input(*first_, x.format, routed, options);
  if (decode_x) tokens.decode_all(x, routed, routed.gather, call.in.max_rows);
  call.in.tokens = tokens.rows;
  call.in.decoded = decode_x;
  call.decode_out = decode_h;
  const std::int64_t pitch = fp8_pitch(call.in.max_rows, routed.experts()),
                     groups = fp8 ? code_width / 128 : 0;
  const Output<float> fp8_scales(groups * pitch, options.poison);
  const DeviceRouting routing(routed, gather, x.format, call.in, options.poison);
  call.activation = config_.activation;
  call.weight_scales = first_->scales.data();
  call.gate_bias = first_->bias[0].data();
  call.up_bias = first_->bias[1].data();
  call.mode = mode;
  call.out = {.format = fp4   ? ActivationFormat::kNvfp4
                        : fp8 ? ActivationFormat::kFp8
                              : ActivationFormat::kBf16,
              .rows = rows,
              .cols = width,
              .row_stride = width,
              .values = values.data(),
              .codes = codes.data(),
              .block_scales = block_scales.data(),
              .scales = fp4   ? scales.data()
                        : fp8 ? fp8_scales.data()
                              : nullptr};
  call.saturated = saturated.data();
  cuda_check(sm90::gemm1(call, nullptr), "testing the first GEMM");
  cuda_check(cudaDeviceSynchronize(), "testing the first GEMM");
  routing.check();
  HiddenResult result{testing::Rows(call.out.format, rows, width, 0), saturated.download()[0] - 100};
  if (decode_h) {
    result.h = testing::Rows(ActivationFormat::kBf16, rows, width, 0);
    result.h.values = used_rows(values, rows, width, options.poison);
  } else if (fp4) {
    result.h.codes = used_rows(codes, rows, intermediate / 2, options.poison);
    result.h.block_scales = used_rows(block_scales, rows, intermediate / 16, options.poison);
    result.h.scales = h_scales;
    EXPECT_TRUE(cuda::same_bytes(scales.download(), h_scales));
  } else if (fp8) {
    const std::vector<std::uint8_t> rows_of_codes = used_rows(codes, rows, code_width, options.poison);
    const std::vector<float> all_scales = fp8_scales.download();
    for (std::int64_t r = 0; r < rows; ++r) {
      for (std::int64_t k = 0; k < code_width; ++k) {
        const std::uint8_t code = rows_of_codes[size(r * code_width + fp8_place(k))];
        if (k < intermediate) {
          result.h.codes[size(r * intermediate + k)] = code;
        } else {
          EXPECT_EQ(code, 0) << "beyond the last column, row " << r;
        }
      }
      for (std::int64_t g = 0; g < groups; ++g) {
        result.h.scales[size(r * groups + g)] = all_scales[size(g * pitch + fp8_scale(routed, r))];
      }
    }
  } else {
    result.h.values = used_rows(values, rows, width, options.poison);
  }
  return result;
}

std::vector<float> DeviceLayer::gemm2(const testing::Rows& h, const RoutedRows& routed,
                                      const GemmOptions& options) const {
  return gemm2_in_a_row({h}, routed, options)[0];
}

std::vector<std::vector<float>> DeviceLayer::gemm2_in_a_row(const std::vector<testing::Rows>& h,
                                                            const RoutedRows& routed,
                                                            const GemmOptions& options) const {
  const std::int64_t rows = routed.rows();
  Gemm2 call;
  call.in = input(*second_, h[0].format, routed, options);
  call.weight_scales = second_->scales.data();
  call.bias = second_->bias[0].data();
  const DeviceRouting routing(routed, {}, h[0].format, call.in, options.poison);
  std::vector<DeviceRows> tokens;
  std::vector<Output<float>> outputs;
  for (const testing::Rows& one : h) {
    tokens.emplace_back(one, options.strided, routed, std::vector<std::int32_t>());
    call.in.decoded = options.decoded && one.format == ActivationFormat::kNvfp4;
    if (call.in.decoded) tokens.back().decode_all(one, routed, {}, call.in.max_rows);
    outputs.emplace_back((rows + kRowsBehind) * config_.hidden, options.poison);
  }
  for (std::size_t i = 0; i < h.size(); ++i) {
    call.in.tokens = tokens[i].rows;
    call.out = outputs[i].data();
    cuda_check(sm90::gemm2(call, nullptr), "testing the second GEMM");
  }
  cuda_check(cudaDeviceSynchronize(), "testing the second GEMM");
  routing.check();
  std::vector<std::vector<float>> results;
  for (const Output<float>& y : outputs)
    results.push_back(used_rows(y, rows, config_.hidden, options.poison));
  return results;
}

RoutedRows ragged_rows(std::int64_t rows, int experts, std::int64_t tokens, cuda::Random& random) {
  // Some experts get many, some few, at least one none.
  std::vector<std::int64_t> share(size(experts));
  for (std::int64_t& s : share) s = random.integer(0, 2) == 0 ? random.integer(1, 3) : random.integer(4, 40);
  if (experts > 1) share[size(random.integer(0, experts - 1))] = 0;
  std::int64_t total = 0;
  for (const std::int64_t s : share) total += s;
  RoutedRows routed;
  routed.offsets.assign(size(experts) + 1, 0);
  for (std::int64_t r = 0; r < rows; ++r) {
    std::int64_t at = random.integer(0, total - 1);
    std::size_t e = 0;
    while (at >= share[e]) at -= share[e++];
    ++routed.offsets[e + 1];
  }
  for (std::size_t e = 1; e < routed.offsets.size(); ++e) routed.offsets[e] += routed.offsets[e - 1];
  if (tokens > 0) {
    for (std::int64_t r = 0; r < rows; ++r) {
      routed.gather.push_back(static_cast<std::int32_t>(random.integer(0, tokens - 1)));
    }
  }
  return routed;
}

void expect_same(const HiddenResult& got, const HiddenResult& want) {
  EXPECT_TRUE(cuda::same_bytes(got.h.values, want.h.values));
  EXPECT_TRUE(cuda::same_bytes(got.h.codes, want.h.codes));
  EXPECT_TRUE(cuda::same_bytes(got.h.block_scales, want.h.block_scales));
  EXPECT_TRUE(cuda::same_bytes(got.h.scales, want.h.scales));
  EXPECT_EQ(got.saturated, want.saturated);
}

HiddenResult decoded(const HiddenResult& coded) {
  HiddenResult result{testing::Rows(ActivationFormat::kBf16, coded.h.rows, coded.h.cols, 0), coded.saturated};
  result.h.values = decode(coded.h);
  return result;
}

void expect_equal(const testing::Verdict& v) {
  EXPECT_GT(v.checked, 0);
  EXPECT_EQ(v.different, 0) << v.first_different;
  EXPECT_EQ(v.different_scales, 0) << v.first_different;
}

HiddenResult as_fp8(const testing::Rows& h) {
  HiddenResult result{testing::Rows(ActivationFormat::kFp8, h.rows, h.cols, 0)};
  const std::int64_t groups = (h.cols + 127) / 128;
  for (std::int64_t r = 0; r < h.rows; ++r) {
    const auto row = independent::make_row(
        {h.values.begin() + r * h.cols, h.values.begin() + (r + 1) * h.cols}, ActivationFormat::kFp8, 0.0f);
    std::ranges::copy(row.codes, result.h.codes.begin() + r * h.cols);
    std::ranges::copy(row.scales, result.h.scales.begin() + r * groups);
  }
  return result;
}

std::vector<L1Output> modes_of(const LayerConfig& config, ActivationFormat format) {
  const L1Output fused = format == ActivationFormat::kFp8 ? L1Output::kFp8 : L1Output::kNvfp4;
  if (!config.activation.gated()) return {L1Output::kCompactBf16, fused};
  return {L1Output::kCompactBf16, L1Output::kInterleavedBf16, fused};
}

}  // namespace megamoe::sm90
