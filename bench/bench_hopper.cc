// bench_hopper.cc: both grouped GEMMs of a layer on Hopper, against the bandwidth of a copy in the same run.
//
//   bench_hopper [geometry [tokens...]]     geometry: a name from src/layer/geometries.cc (default
//   DeepSeek-V4-Flash)
//
// Random weights and tokens, uniform routing; the GEMMs of several sets of weights are captured in one graph,
// so that weights come from memory and not from the L2. Median of the replays. Before anything is timed, h
// made FP4 or FP8 in the epilogue is held against the quantiser on h in BF16, byte for byte.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <functional>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "base/check.h"
#include "cuda/device.h"
#include "cuda/graph_timer.h"
#include "cuda/quantize.h"
#include "cuda/sm90/fp8_rows.h"
#include "cuda/sm90/gemm.h"
#include "cuda/sm90/weight_layout.h"
#include "layer/geometries.h"

namespace megamoe {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;

std::mt19937_64 engine(1);

template <class T>
DeviceArray<T> random_bytes(std::int64_t count, const std::function<T(std::uint64_t, std::int64_t)>& make) {
  constexpr std::int64_t kPiece = 1 << 20;
  DeviceArray<T> array(count);
  std::vector<T> piece(static_cast<std::size_t>(std::min(count, kPiece)));
  for (std::size_t i = 0; i < piece.size(); ++i) piece[i] = make(engine(), static_cast<std::int64_t>(i));
  for (std::int64_t at = 0; at < count; at += kPiece) {
    cuda_check(cudaMemcpy(array.data() + at, piece.data(),
                          static_cast<std::size_t>(std::min(kPiece, count - at)) * sizeof(T),
                          cudaMemcpyHostToDevice),
               "copying to the GPU");
  }
  return array;
}

// Packed weights: any codes, scales from 2^-7 to 2. A piece is a whole number of chunks.
DeviceArray<std::uint8_t> random_weights(sm90::OperandType type, std::int64_t bytes) {
  const std::int64_t chunk = sm90::chunk_bytes(type), kPiece = 1024 * chunk;
  DeviceArray<std::uint8_t> array(bytes);
  std::vector<std::uint8_t> piece(static_cast<std::size_t>(kPiece));
  for (std::int64_t i = 0; i < kPiece; i += 4) {
    const std::uint64_t bits = engine();
    std::uint32_t word = static_cast<std::uint32_t>(bits);
    if (i % chunk >= sm90::chunk_code_bytes(type)) {
      std::uint8_t scales[4];
      for (int j = 0; j < 4; ++j) scales[j] = static_cast<std::uint8_t>(8 + (bits >> (8 * j)) % 56);
      if (type == sm90::OperandType::kFp8) {
        std::memcpy(&word, scales, sizeof(word));
      } else {
        for (std::uint8_t& scale : scales) scale = sm90::pack_scale(scale);
        word = sm90::scale_word(scales);
      }
    }
    std::memcpy(piece.data() + i, &word, sizeof(word));
  }
  for (std::int64_t at = 0; at < bytes; at += kPiece) {
    cuda_check(cudaMemcpy(array.data() + at, piece.data(),
                          static_cast<std::size_t>(std::min(kPiece, bytes - at)), cudaMemcpyHostToDevice),
               "copying to the GPU");
  }
  return array;
}

// Microseconds of `work`, captured once and replayed; the median.
double time_graph(const cuda::Stream& stream, const std::function<void()>& work) {
  const cuda::CapturedGraph graph(stream, work);
  std::vector<double> seconds;
  for (int i = 0; i < 9; ++i) {
    seconds.push_back(cuda::stream_seconds(stream, [&] { graph.launch(stream); }));
  }
  std::sort(seconds.begin(), seconds.end());
  return seconds[seconds.size() / 2] * 1e6;
}

struct Problem {
  std::int64_t hidden, intermediate;
  int experts, top_k;
};

void run(const Problem& problem, std::int64_t tokens, ActivationFormat format, double bandwidth,
         const cuda::Stream& stream) {
  const auto [hidden, intermediate, experts, top_k] = problem;
  const sm90::OperandType type = sm90::operand_type(format);
  const bool fp8 = type == sm90::OperandType::kFp8;
  std::vector<std::int64_t> offsets(static_cast<std::size_t>(experts) + 1);
  std::vector<int> ids(static_cast<std::size_t>(experts));
  std::iota(ids.begin(), ids.end(), 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (int slot = 0; slot < top_k; ++slot) {
      std::swap(ids[static_cast<std::size_t>(slot)],
                ids[static_cast<std::size_t>(slot) + engine() % static_cast<std::uint64_t>(experts - slot)]);
      ++offsets[static_cast<std::size_t>(ids[static_cast<std::size_t>(slot)]) + 1];
    }
  }
  const auto busy = experts - std::count(offsets.begin() + 1, offsets.end(), 0);
  std::partial_sum(offsets.begin(), offsets.end(), offsets.begin());
  const std::int64_t rows = offsets.back();
  const std::int64_t bytes1 = sm90::packed_bytes(type, sm90::WeightRole::kGateUp, intermediate, hidden);
  const std::int64_t bytes2 = sm90::packed_bytes(type, sm90::WeightRole::kPlain, hidden, intermediate);
  // Enough sets that what is read between two uses of one is several times the L2.
  const int sets =
      static_cast<int>(std::clamp<std::int64_t>((400LL << 20) / (busy * (bytes1 + bytes2)) + 1, 1, 16));
  const DeviceArray<std::uint8_t> weights1 = random_weights(type, sets * experts * bytes1),
                                  weights2 = random_weights(type, sets * experts * bytes2);
  const DeviceArray<std::int64_t> device_offsets(offsets);
  const DeviceArray<std::int32_t> gather =
      random_bytes<std::int32_t>(rows, [&](std::uint64_t bits, std::int64_t) {
        return static_cast<std::int32_t>(bits % static_cast<std::uint64_t>(tokens));
      });
  const DeviceArray<float> scales =
      random_bytes<float>(2 * experts, [](std::uint64_t, std::int64_t) { return 2e-4f; });
  const auto fp8_scales = [&](std::int64_t cols) {
    return sm90::fp8_groups(cols) * sm90::fp8_scale_pitch(rows, experts);
  };
  const DeviceArray<float> row_scales = random_bytes<float>(
      std::max({rows, tokens, fp8_scales(hidden)}), [](std::uint64_t, std::int64_t) { return 1e-3f; });
  const DeviceArray<bf16> x = random_bytes<bf16>(tokens * hidden, [](std::uint64_t bits, std::int64_t) {
    return bf16{static_cast<std::uint16_t>((bits & 0x80FF) | 0x3F00)};
  });
  const std::int64_t x_rows = fp8 ? rows : tokens;  // FP8 comes in expert order
  const DeviceArray<std::uint8_t> x_codes = random_bytes<std::uint8_t>(
      fp8 ? rows * sm90::fp8_row_bytes(hidden) : tokens * hidden / 2, [&](std::uint64_t bits, std::int64_t) {
        return static_cast<std::uint8_t>(fp8 ? bits & 0xF7 : bits);  // no NaN
      });
  const DeviceArray<std::uint8_t> x_scales = random_bytes<std::uint8_t>(
      tokens * hidden / 16,
      [](std::uint64_t bits, std::int64_t) { return static_cast<std::uint8_t>(0x20 + bits % 32); });
  const DeviceArray<bf16> h(rows * intermediate);
  const DeviceArray<std::uint8_t> h_codes(fp8 ? rows * sm90::fp8_row_bytes(intermediate)
                                              : rows * intermediate / 2),
      h_scales(rows * intermediate / 16);
  DeviceArray<float> h_fp8_scales(fp8_scales(intermediate));
  const DeviceArray<float> y(rows * hidden);

  const bool nvfp4 = format == ActivationFormat::kNvfp4;
  const cuda::DeviceBuffer workspace(std::max(sm90::gemm_workspace_bytes(format, true, rows, hidden),
                                              sm90::gemm_workspace_bytes(format, false, rows, intermediate)));
  sm90::Gemm1 first;
  first.in = {.weights = weights1.data(),
              .experts = experts,
              .weight_rows = intermediate,
              .cols = hidden,
              .offsets = device_offsets.data(),
              .max_rows = rows,
              .tokens = {.format = format,
                         .rows = x_rows,
                         .cols = hidden,
                         .row_stride = hidden,
                         .values = x.data(),
                         .codes = x_codes.data(),
                         .block_scales = x_scales.data(),
                         .scales = row_scales.data()},
              .gather = fp8 ? nullptr : gather.data(),
              .workspace = workspace.data()};
  first.weight_scales = scales.data();
  first.mode = nvfp4 ? L1Output::kNvfp4 : fp8 ? L1Output::kFp8 : L1Output::kCompactBf16;
  first.out = {.format = format,
               .rows = rows,
               .cols = intermediate,
               .row_stride = intermediate,
               .values = h.data(),
               .codes = h_codes.data(),
               .block_scales = h_scales.data(),
               .scales = fp8 ? h_fp8_scales.data() : row_scales.data()};
  sm90::Gemm2 second;
  second.in = {.weights = weights2.data(),
               .experts = experts,
               .weight_rows = hidden,
               .cols = intermediate,
               .offsets = device_offsets.data(),
               .max_rows = rows,
               .tokens = first.out,
               .gather = nullptr,
               .workspace = workspace.data()};
  second.weight_scales = scales.data();
  second.out = y.data();

  sm90::Gemm1 compact = first;  // verified before it is timed
  compact.mode = L1Output::kCompactBf16;
  cuda_check(sm90::gemm1(first, stream.get()), "the first GEMM");
  cuda_check(sm90::gemm1(compact, stream.get()), "the first GEMM");
  if (fp8) {
    const DeviceArray<std::uint8_t> codes(h_codes.count());
    DeviceArray<float> scales_of_codes(h_fp8_scales.count());
    h_fp8_scales.fill(0), scales_of_codes.fill(0);  // between experts nothing is written
    cuda_check(sm90::gemm1(first, stream.get()), "the first GEMM");
    cuda_check(sm90::quantize_fp8({.x = h.data(),
                                   .row_stride = intermediate,
                                   .tokens = rows,
                                   .cols = intermediate,
                                   .offsets = device_offsets.data(),
                                   .experts = experts,
                                   .most_rows = rows,
                                   .codes = codes.data(),
                                   .scales = scales_of_codes.data()},
                                  stream.get()),
               "quantising");
    stream.synchronize();
    if (codes.download() != h_codes.download() || scales_of_codes.download() != h_fp8_scales.download()) {
      fail(ErrorCode::kInternal, "h from the epilogue differs from the quantiser's at {} tokens", tokens);
    }
  }
  if (nvfp4) {
    const DeviceArray<std::uint8_t> codes(h_codes.count()), block_scales(h_scales.count());
    cuda_check(cuda::quantize({cuda::ElementType::kBf16, h.data(), intermediate}, nullptr, rows, intermediate,
                              cuda::TensorScales::kGiven,
                              {codes.data(), block_scales.data(), row_scales.data(), nullptr}, stream.get()),
               "quantising");
    stream.synchronize();
    if (codes.download() != h_codes.download() || block_scales.download() != h_scales.download()) {
      fail(ErrorCode::kInternal, "h from the epilogue differs from the quantiser's at {} tokens", tokens);
    }
  }
  const int repeats = std::max(sets, tokens <= 64 ? 4 : 1);
  const auto gemms = [&](bool one, bool two) {
    return time_graph(stream,
                      [&] {
                        for (int i = 0; i < repeats; ++i) {
                          first.in.weights = weights1.data() + i % sets * experts * bytes1;
                          second.in.weights = weights2.data() + i % sets * experts * bytes2;
                          if (one) cuda_check(sm90::gemm1(first, stream.get()), "the first GEMM");
                          if (two) cuda_check(sm90::gemm2(second, stream.get()), "the second GEMM");
                        }
                      }) /
           repeats;
  };
  const double us1 = gemms(true, false), us2 = gemms(false, true), us = gemms(true, true);
  const double payload = static_cast<double>(busy * (bytes1 + bytes2)) / us * 1e-6;
  const double tflops = 6.0 * static_cast<double>(rows * hidden * intermediate) / us * 1e-6;
  fmt::print("{:>6} {:>6} {:>5} {:>10.1f} {:>10.1f} {:>10.1f} {:>8.2f} {:>7.0f} % {:>8.0f}\n", tokens,
             to_string(format), sm90::choose_tile(type, rows, experts).tokens, us1, us2, us, payload,
             100.0 * payload / bandwidth, tflops);
}

}  // namespace
}  // namespace megamoe

int main(int argc, char** argv) {
  using namespace megamoe;
  try {
    const std::string name = argc > 1 ? argv[1] : "deepseek-v4-flash";
    const ModelGeometry& geometry = find_geometry(name);
    std::vector<std::int64_t> tokens;
    for (int i = 2; i < argc; ++i) tokens.push_back(std::stoll(argv[i]));
    if (tokens.empty()) tokens = {1, 8, 64, 512, 4096, 16384};
    const cuda::Stream stream;
    const double bandwidth = cuda::copy_bandwidth(stream) * 1e-12;  // TB/s
    const LayerConfig& c = geometry.config;
    fmt::print(
        "{}, {}: H {} I {} E {} top-{}; a copy moves {:.2f} TB/s; both GEMMs, no sort, quantise or combine\n",
        cuda::device_info(0).name, name, c.hidden, c.intermediate, c.num_experts, c.top_k, bandwidth);
    fmt::print("{:>6} {:>6} {:>5} {:>10} {:>10} {:>10} {:>8} {:>9} {:>8}\n", "tokens", "format", "tile",
               "first us", "second us", "both us", "TB/s", "of copy", "TFLOP/s");
    for (const ActivationFormat format :
         {ActivationFormat::kBf16, ActivationFormat::kFp8, ActivationFormat::kNvfp4}) {
      for (const std::int64_t t : tokens) {
        run({c.hidden, c.intermediate, static_cast<int>(c.num_experts), c.top_k}, t, format, bandwidth,
            stream);
      }
    }
  } catch (const std::exception& error) {
    fmt::print(stderr, "bench_hopper: {}\n", error.what());
    return 1;
  }
}
