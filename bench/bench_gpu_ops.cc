// bench_gpu_ops.cc: the operations around the GEMMs on a GPU, each against a copy measured in the same run.
//
// Bytes are those that must move: every input read once, every output written once. Random data, buffers
// beyond the L2; the median of several runs.
#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "cuda/combine.h"
#include "cuda/device.h"
#include "cuda/quantize.h"
#include "cuda/route.h"
#include "cuda/sort.h"

namespace megamoe::cuda {
namespace {

// Milliseconds of one run of `work`, the median of 11.
double median_ms(const std::function<cudaError_t()>& work) {
  cudaEvent_t begin, end;
  cuda_check(cudaEventCreate(&begin), "timing");
  cuda_check(cudaEventCreate(&end), "timing");
  for (int i = 0; i < 3; ++i) cuda_check(work(), "timing");
  constexpr int kRepeats = 4;
  std::vector<float> times;
  for (int i = 0; i < 11; ++i) {
    cuda_check(cudaEventRecord(begin), "timing");
    for (int repeat = 0; repeat < kRepeats; ++repeat) cuda_check(work(), "timing");
    cuda_check(cudaEventRecord(end), "timing");
    cuda_check(cudaEventSynchronize(end), "timing");
    float ms = 0;
    cuda_check(cudaEventElapsedTime(&ms, begin, end), "timing");
    times.push_back(ms / kRepeats);
  }
  cuda_check(cudaEventDestroy(begin), "timing");
  cuda_check(cudaEventDestroy(end), "timing");
  std::nth_element(times.begin(), times.begin() + 5, times.end());
  return times[5];
}

double copy_tbs = 0;

void report(const char* name, double bytes, const std::function<cudaError_t()>& work) {
  const double ms = median_ms(work), tbs = bytes / ms * 1e-9;
  if (copy_tbs == 0) copy_tbs = tbs;
  std::printf("%-44s %9.1f us %7.3f TB/s %6.1f %% of copy\n", name, ms * 1e3, tbs, 100 * tbs / copy_tbs);
}

// Bell-shaped BF16 bits, without the cost of drawing each.
std::vector<std::uint16_t> random_bf16(std::int64_t count) {
  std::mt19937_64 engine(1);
  std::normal_distribution<float> bell;
  std::vector<std::uint16_t> period(1 << 20);
  for (std::uint16_t& x : period) {
    const float value = bell(engine);
    std::uint32_t bits;
    static_assert(sizeof(bits) == sizeof(value));
    std::copy_n(reinterpret_cast<const char*>(&value), sizeof(bits), reinterpret_cast<char*>(&bits));
    x = static_cast<std::uint16_t>(bits >> 16);
  }
  std::vector<std::uint16_t> values(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = period[i % (period.size() - 7)];
  return values;
}

void bench() {
  const std::int64_t rows = 16384, cols = 7168, count = rows * cols;
  const DeviceArray<std::uint16_t> x(random_bf16(2 * count));
  const DeviceArray<std::uint8_t> codes(count / 2), scales(count / 16), target(4 * count);
  const DeviceArray<float> tensor_scales(std::vector<float>(static_cast<std::size_t>(rows), 0.002f));
  const auto* values = reinterpret_cast<const bf16*>(x.data());
  const Nvfp4Out out{codes.data(), scales.data(), tensor_scales.data(), nullptr};
  const double elements = static_cast<double>(count), fp4 = elements * 9 / 16;

  report("copy 470 MB", 8 * elements, [&] {
    return cudaMemcpyAsync(target.data(), x.data(), static_cast<std::size_t>(4 * count),
                           cudaMemcpyDeviceToDevice);
  });
  for (const TensorScales mode : {TensorScales::kGiven, TensorScales::kDynamicRow}) {
    const bool given = mode == TensorScales::kGiven;
    report(given ? "quantize bf16 16384 x 7168, static" : "quantize bf16 16384 x 7168, by row",
           2 * elements + fp4, [&] {
             return quantize({ElementType::kBf16, values, cols}, nullptr, rows, cols, mode, out, nullptr);
           });
    report(given ? "deinterleave_quantize 16384 x 2 x 7168" : "deinterleave_quantize, by row",
           4 * elements + fp4,
           [&] { return deinterleave_quantize(values, 2 * cols, rows, cols, mode, out, nullptr); });
    report(given ? "swiglu_quantize 16384 x 7168" : "swiglu_quantize, by row", 4 * elements + fp4, [&] {
      return swiglu_quantize({}, values, cols, values + count, cols, rows, cols, mode, out, nullptr);
    });
    report(given ? "quantize fp16, static" : "quantize fp16, by row", 2 * elements + fp4, [&] {
      return quantize({ElementType::kFp16, values, cols}, nullptr, rows, cols, mode, out, nullptr);
    });
    report(given ? "quantize f32, static" : "quantize f32, by row", 4 * elements + fp4, [&] {
      return quantize({ElementType::kF32, values, cols}, nullptr, rows, cols, mode, out, nullptr);
    });
  }
  const Nvfp4In in{codes.data(), scales.data(), tensor_scales.data(), false};
  report("dequantize to bf16", 2 * elements + fp4,
         [&] { return dequantize(in, rows, cols, ElementType::kBf16, target.data(), nullptr); });
  const DeviceArray<float> amax(rows);
  report("row_amax bf16", 2 * elements, [&] {
    return row_amax({ElementType::kBf16, values, cols}, rows, cols, amax.data(), nullptr);
  });

  // DeepSeek-V4-Flash: 256 experts, top 6, hidden 4096.
  const int experts = 256, top_k = 6;
  const std::int64_t hidden = 4096, most = 16384;
  std::vector<float> logits(static_cast<std::size_t>(most * experts));
  std::mt19937_64 engine(2);
  std::normal_distribution<float> bell;
  for (float& l : logits) l = bell(engine);
  const DeviceArray<float> d_logits(logits), weights(most * top_k);
  const DeviceArray<std::int32_t> ids(most * top_k), row_to_token(most * top_k), row_to_slot(most * top_k),
      slot_to_row(most * top_k);
  const DeviceArray<std::int64_t> offsets(experts + 1);
  const DeviceArray<std::uint8_t> workspace(sort_workspace_bytes(most, top_k, experts));
  const DeviceArray<float> expert_out(most * top_k * hidden);
  cuda_check(cudaMemset(expert_out.data(), 0x3C, static_cast<std::size_t>(expert_out.bytes())), "timing");
  const DeviceArray<bf16> y(most * hidden);
  for (const std::int64_t tokens :
       {std::int64_t{1}, std::int64_t{64}, std::int64_t{512}, std::int64_t{4096}, most}) {
    char name[64];
    const double pairs = static_cast<double>(tokens * top_k);
    std::snprintf(name, sizeof(name), "route %lld of 256, top 6", static_cast<long long>(tokens));
    report(name, static_cast<double>(tokens * experts) * 4 + pairs * 8, [&] {
      return route({.logits = d_logits.data(),
                    .selection_bias = nullptr,
                    .hash_ids = nullptr,
                    .tokens = tokens,
                    .experts = experts,
                    .top_k = top_k,
                    .router = {.scoring = Scoring::kSqrtSoftplus},
                    .ids = ids.data(),
                    .weights = weights.data()},
                   nullptr);
    });
    std::snprintf(name, sizeof(name), "sort %lld", static_cast<long long>(tokens));
    report(name, pairs * 20, [&] {
      return sort({.ids = ids.data(),
                   .weights = weights.data(),
                   .tokens = tokens,
                   .top_k = top_k,
                   .experts = experts,
                   .offsets = offsets.data(),
                   .row_to_token = row_to_token.data(),
                   .row_to_slot = row_to_slot.data(),
                   .slot_to_row = slot_to_row.data(),
                   .bad_id = nullptr,
                   .workspace = workspace.data()},
                  nullptr);
    });
    std::snprintf(name, sizeof(name), "combine %lld x 4096", static_cast<long long>(tokens));
    report(name, pairs * static_cast<double>(hidden) * 4 + static_cast<double>(tokens * hidden) * 2, [&] {
      return combine({.expert_out = expert_out.data(),
                      .slot_to_row = slot_to_row.data(),
                      .weights = weights.data(),
                      .shared = nullptr,
                      .y = y.data(),
                      .y_stride = hidden,
                      .tokens = tokens,
                      .top_k = top_k,
                      .hidden = hidden},
                     nullptr);
    });
  }
}

}  // namespace
}  // namespace megamoe::cuda

int main() {
  if (megamoe::cuda::device_count() == 0) {
    std::puts("no usable GPU");
    return 1;
  }
  megamoe::cuda::bench();
}
