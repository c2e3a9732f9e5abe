// host_operands.h: operands in host memory, copied to the GPU for one operation and back.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "cuda/device.h"

namespace megamoe::sm90 {

template <class T>
cuda::DeviceArray<T> to_device(const T* from, std::int64_t count) {
  cuda::DeviceArray<T> array(count);
  array.upload(from);
  return array;
}
template <class T>
void to_host(const cuda::DeviceArray<T>& from, T* to, std::int64_t count) {
  if (count == 0) return;
  cuda::cuda_check(
      cudaMemcpy(to, from.data(), static_cast<std::size_t>(count) * sizeof(T), cudaMemcpyDeviceToHost),
      "copying from the GPU");
}

[[noreturn]] void no_fp8();  // throws kUnsupported

// Rows of activations on the GPU, contiguous.
class DeviceRows {
 public:
  // Room for rows of this format; an input is copied.
  DeviceRows(const ActivationRows& host, bool input);
  void to_host(const ActivationRows& host) const;

  ActivationRows rows;

 private:
  std::size_t row_bytes() const { return static_cast<std::size_t>(rows.cols) * sizeof(bf16); }

  cuda::DeviceArray<bf16> values_;
  cuda::DeviceArray<std::uint8_t> codes_, block_scales_;
  cuda::DeviceArray<float> scales_;
};

class Counter {
 public:
  Counter() : value_(std::vector<unsigned long long>{0}) {}
  unsigned long long* data() const { return value_.data(); }
  std::int64_t read() const { return static_cast<std::int64_t>(value_.download()[0]); }

 private:
  cuda::DeviceArray<unsigned long long> value_;
};

}  // namespace megamoe::sm90
