#include "cuda/sm90/host_operands.h"

#include <algorithm>

#include "base/check.h"

namespace megamoe::sm90 {

void no_fp8() {
  fail(ErrorCode::kUnsupported, "the hopper backend runs bf16 and nvfp4 activations, got fp8");
}

namespace {

// Bytes from row to row of BF16; a single row may come with any stride.
std::size_t pitch(const ActivationRows& rows) {
  return static_cast<std::size_t>(std::max(rows.row_stride, rows.cols)) * sizeof(bf16);
}

}  // namespace

DeviceRows::DeviceRows(const ActivationRows& host, bool input) : rows(host) {
  rows.row_stride = host.cols;
  switch (host.format) {
    case ActivationFormat::kBf16:
      values_ = cuda::DeviceArray<bf16>(host.rows * host.cols);
      if (input && host.rows > 0) {
        cuda::cuda_check(cudaMemcpy2D(values_.data(), row_bytes(), host.values, pitch(host), row_bytes(),
                                      static_cast<std::size_t>(host.rows), cudaMemcpyHostToDevice),
                         "copying to the GPU");
      }
      rows.values = values_.data();
      break;
    case ActivationFormat::kNvfp4:
      codes_ = cuda::DeviceArray<std::uint8_t>(host.rows * host.cols / 2);
      block_scales_ = cuda::DeviceArray<std::uint8_t>(host.rows * host.cols / 16);
      scales_ = to_device(host.scales, host.rows);  // given, of an output too
      if (input) codes_.upload(host.codes), block_scales_.upload(host.block_scales);
      rows.codes = codes_.data(), rows.block_scales = block_scales_.data(), rows.scales = scales_.data();
      break;
    case ActivationFormat::kFp8: no_fp8();
  }
}

void DeviceRows::to_host(const ActivationRows& host) const {
  if (host.rows == 0) return;
  if (host.format == ActivationFormat::kBf16) {
    cuda::cuda_check(cudaMemcpy2D(host.values, pitch(host), values_.data(), row_bytes(), row_bytes(),
                                  static_cast<std::size_t>(host.rows), cudaMemcpyDeviceToHost),
                     "copying from the GPU");
  } else {
    sm90::to_host(codes_, host.codes, codes_.count());
    sm90::to_host(block_scales_, host.block_scales, block_scales_.count());
  }
}

}  // namespace megamoe::sm90
