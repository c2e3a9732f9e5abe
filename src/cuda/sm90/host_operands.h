// host_operands.h: operands in host memory, copied to the GPU for one operation and back.
#pragma once

#include <cstdint>
#include <vector>

#include "backend/backend.h"
#include "cuda/device.h"
#include "cuda/sm90/fp8_rows.h"

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

// Rows of activations on the GPU, contiguous; FP8 as fp8_rows.h says.
class DeviceRows {
 public:
  // A copy of an input, which the GEMM after `routing` reads, if FP8; and if it is not `gathered`, it has a
  // row for each token, and the copy one for each routed row.
  static DeviceRows input(const ActivationRows& host, const Routing* routing = nullptr, bool gathered = true);
  // Room for a result; of FP8 for as many rows as `routing` may have.
  static DeviceRows output(const ActivationRows& host, const Routing* routing = nullptr);
  void to_host(const ActivationRows& host) const;

  ActivationRows rows;

 private:
  DeviceRows(const ActivationRows& host, const Routing* routing);
  void allocate();
  std::int64_t scale_pitch() const { return fp8_scale_pitch(rows.rows, experts_); }
  std::int64_t scale_place(std::int64_t row) const;
  std::size_t row_bytes() const { return static_cast<std::size_t>(rows.cols) * sizeof(bf16); }

  const std::int64_t* offsets_ = nullptr;  // [experts_ + 1], in host memory; null: all rows are of one
  std::int64_t experts_ = 1;
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
