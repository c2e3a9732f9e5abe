#include "cuda/sm90/host_operands.h"

#include <algorithm>

#include "cuda/sm90/weight_layout.h"

namespace megamoe::sm90 {

namespace {

// Bytes from row to row of BF16; a single row may come with any stride.
std::size_t pitch(const ActivationRows& rows) {
  return static_cast<std::size_t>(std::max(rows.row_stride, rows.cols)) * sizeof(bf16);
}

}  // namespace

DeviceRows::DeviceRows(const ActivationRows& host, const Routing* routing) : rows(host) {
  rows.row_stride = host.cols;
  if (routing != nullptr) offsets_ = routing->offsets, experts_ = routing->num_experts;
}

std::int64_t DeviceRows::scale_place(std::int64_t row) const {
  if (offsets_ == nullptr) return row;
  const std::int64_t expert = std::upper_bound(offsets_, offsets_ + experts_, row) - offsets_ - 1;
  return fp8_scale_place(offsets_[expert], expert) + row - offsets_[expert];
}

void DeviceRows::allocate() {
  switch (rows.format) {
    case ActivationFormat::kBf16:
      values_ = cuda::DeviceArray<bf16>(rows.rows * rows.cols);
      rows.values = values_.data();
      break;
    case ActivationFormat::kFp8:
      codes_ = cuda::DeviceArray<std::uint8_t>(rows.rows * fp8_row_bytes(rows.cols));
      scales_ = cuda::DeviceArray<float>(fp8_groups(rows.cols) * scale_pitch());
      rows.codes = codes_.data(), rows.scales = scales_.data();
      break;
    case ActivationFormat::kNvfp4:
      codes_ = cuda::DeviceArray<std::uint8_t>(rows.rows * rows.cols / 2);
      block_scales_ = cuda::DeviceArray<std::uint8_t>(rows.rows * rows.cols / 16);
      scales_ = to_device(rows.scales, rows.rows);  // given, of an output too
      rows.codes = codes_.data(), rows.block_scales = block_scales_.data(), rows.scales = scales_.data();
      break;
  }
}

DeviceRows DeviceRows::input(const ActivationRows& host, const Routing* routing, bool gathered) {
  DeviceRows result(host, routing);
  if (host.format != ActivationFormat::kFp8) {
    result.allocate();
    if (host.format == ActivationFormat::kNvfp4) {
      result.codes_.upload(host.codes), result.block_scales_.upload(host.block_scales);
    } else if (host.rows > 0) {
      cuda::cuda_check(
          cudaMemcpy2D(result.values_.data(), result.row_bytes(), host.values, pitch(host),
                       result.row_bytes(), static_cast<std::size_t>(host.rows), cudaMemcpyHostToDevice),
          "copying to the GPU");
    }
    return result;
  }
  if (!gathered) result.rows.rows = routing->offsets[routing->num_experts];
  result.allocate();
  const std::int64_t groups = fp8_groups(host.cols), width = fp8_row_bytes(host.cols);
  std::vector<std::uint8_t> codes(static_cast<std::size_t>(result.codes_.count()));
  std::vector<float> scales(static_cast<std::size_t>(result.scales_.count()));
  for (std::int64_t r = 0; r < result.rows.rows; ++r) {
    const std::int64_t from = gathered ? r : routing->row_to_token[r];
    for (std::int64_t col = 0; col < host.cols; ++col) {
      codes[static_cast<std::size_t>(r * width + fp8_column_place(static_cast<std::uint32_t>(col)))] =
          host.codes[from * host.cols + col];
    }
    for (std::int64_t g = 0; g < groups; ++g) {
      scales[static_cast<std::size_t>(g * result.scale_pitch() + result.scale_place(r))] =
          host.scales[from * groups + g];
    }
  }
  result.codes_.upload(codes.data()), result.scales_.upload(scales.data());
  return result;
}

DeviceRows DeviceRows::output(const ActivationRows& host, const Routing* routing) {
  DeviceRows result(host, routing);
  if (host.format == ActivationFormat::kFp8 && routing != nullptr) {
    result.rows.rows = routing->tokens * routing->top_k;
  }
  result.allocate();
  return result;
}

void DeviceRows::to_host(const ActivationRows& host) const {
  if (host.rows == 0) return;
  switch (host.format) {
    case ActivationFormat::kBf16:
      cuda::cuda_check(cudaMemcpy2D(host.values, pitch(host), values_.data(), row_bytes(), row_bytes(),
                                    static_cast<std::size_t>(host.rows), cudaMemcpyDeviceToHost),
                       "copying from the GPU");
      break;
    case ActivationFormat::kFp8: {
      const std::vector<std::uint8_t> codes = codes_.download();
      const std::vector<float> scales = scales_.download();
      const std::int64_t groups = fp8_groups(host.cols), width = fp8_row_bytes(host.cols);
      for (std::int64_t r = 0; r < host.rows; ++r) {
        for (std::int64_t col = 0; col < host.cols; ++col) {
          host.codes[r * host.cols + col] =
              codes[static_cast<std::size_t>(r * width + fp8_column_place(static_cast<std::uint32_t>(col)))];
        }
        for (std::int64_t g = 0; g < groups; ++g) {
          host.scales[r * groups + g] = scales[static_cast<std::size_t>(g * scale_pitch() + scale_place(r))];
        }
      }
      break;
    }
    case ActivationFormat::kNvfp4:
      sm90::to_host(codes_, host.codes, codes_.count());
      sm90::to_host(block_scales_, host.block_scales, block_scales_.count());
      break;
  }
}

}  // namespace megamoe::sm90
