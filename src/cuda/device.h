// device.h: owners of GPU memory and streams, and CUDA's errors as ours.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace megamoe::cuda {

// Throws what CUDA reports; `doing` completes "CUDA failed while ...".
void cuda_check(cudaError_t status, std::string_view doing);

struct DeviceInfo {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0;
  std::int64_t memory = 0;            // bytes
  std::int64_t l2 = 0;                // bytes
  std::int64_t shared_per_block = 0;  // bytes, the most a kernel may ask for
};

// GPUs that this process can use; 0 where there is no driver.
int device_count();
DeviceInfo device_info(int device);

// The device that this thread's calls go to.
int current_device();

// Makes a device the current one for a scope.
class DeviceScope {
 public:
  explicit DeviceScope(int device);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  int before_;
  bool moved_;
};

// For a scope, lets this thread do while a stream is captured what a strict capture forbids: kernels are
// loaded, and their attributes set, when they are first launched.
class RelaxedCapture {
 public:
  RelaxedCapture();
  ~RelaxedCapture();
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;

 private:
  cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
};

// Bytes of the current device's memory, 256-byte aligned, uninitialised.
class DeviceBuffer {
 public:
  DeviceBuffer() = default;
  explicit DeviceBuffer(std::int64_t bytes);
  ~DeviceBuffer();
  DeviceBuffer(DeviceBuffer&& other) noexcept;
  DeviceBuffer& operator=(DeviceBuffer&& other) noexcept;

  void* data() const { return data_; }
  std::int64_t bytes() const { return bytes_; }

 private:
  void* data_ = nullptr;
  std::int64_t bytes_ = 0;
};

// Bytes of host memory that the GPU copies from without a detour, uninitialised.
class PinnedBuffer {
 public:
  explicit PinnedBuffer(std::int64_t bytes);
  ~PinnedBuffer();
  PinnedBuffer(const PinnedBuffer&) = delete;
  PinnedBuffer& operator=(const PinnedBuffer&) = delete;

  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

// A place in a stream that the host can wait for.
class Event {
 public:
  Event();
  ~Event();
  Event(const Event&) = delete;
  Event& operator=(const Event&) = delete;

  void record(cudaStream_t stream) const;
  void synchronize() const;  // returns at once where nothing was recorded

 private:
  cudaEvent_t event_ = nullptr;
};

class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;

  cudaStream_t get() const { return stream_; }
  void synchronize() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// `count` elements of T on the device.
template <class T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(std::int64_t count);
  explicit DeviceArray(const std::vector<T>& values) : DeviceArray(static_cast<std::int64_t>(values.size())) {
    upload(values.data());
  }

  T* data() const { return static_cast<T*>(buffer_.data()); }
  std::int64_t count() const { return count_; }
  std::int64_t bytes() const { return buffer_.bytes(); }

  // All wait until the bytes are there, and for everything before them on the default stream.
  // NOTE: cudaMemcpy from ordinary host memory and cudaMemset alone may return earlier, and other streams
  // would not wait for them.
  void upload(const T* from) {
    if (count_ == 0) return;
    cuda_check(cudaMemcpy(data(), from, static_cast<std::size_t>(bytes()), cudaMemcpyHostToDevice),
               "copying to the GPU");
    cuda_check(cudaStreamSynchronize(nullptr), "copying to the GPU");
  }
  std::vector<T> download() const {
    std::vector<T> values(static_cast<std::size_t>(count_));
    if (count_ > 0)
      cuda_check(cudaMemcpy(values.data(), data(), static_cast<std::size_t>(bytes()), cudaMemcpyDeviceToHost),
                 "copying from the GPU");
    return values;
  }
  void fill(int byte) {
    if (count_ == 0) return;
    cuda_check(cudaMemset(data(), byte, static_cast<std::size_t>(bytes())), "filling GPU memory");
    cuda_check(cudaStreamSynchronize(nullptr), "filling GPU memory");
  }

 private:
  DeviceBuffer buffer_;
  std::int64_t count_ = 0;
};

// Bytes of `count` elements of `size`, checked.
std::int64_t array_bytes(std::int64_t count, std::int64_t size);

template <class T>
DeviceArray<T>::DeviceArray(std::int64_t count)
    : buffer_(array_bytes(count, static_cast<std::int64_t>(sizeof(T)))), count_(count) {}

}  // namespace megamoe::cuda
