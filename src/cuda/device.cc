// device.cc: memory, streams and errors of the CUDA runtime.
#include "cuda/device.h"

#include <utility>

#include "base/check.h"

namespace megamoe::cuda {

void cuda_check(cudaError_t status, std::string_view doing) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next call that looks would report this error again
  const ErrorCode code = status == cudaErrorMemoryAllocation ? ErrorCode::kOutOfMemory
                         : status == cudaErrorNoDevice || status == cudaErrorInsufficientDriver ||
                                 status == cudaErrorNoKernelImageForDevice
                             ? ErrorCode::kUnsupported
                             : ErrorCode::kInternal;
  fail(code, "CUDA failed while {}: {} ({})", doing, cudaGetErrorString(status), cudaGetErrorName(status));
}

int device_count() {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) {
    cudaGetLastError();
    return 0;
  }
  return count;
}

DeviceInfo device_info(int device) {
  cudaDeviceProp properties;
  cuda_check(cudaGetDeviceProperties(&properties, device), "reading a GPU's properties");
  DeviceInfo info;
  info.name = properties.name;
  info.major = properties.major;
  info.minor = properties.minor;
  info.multiprocessors = properties.multiProcessorCount;
  info.memory = static_cast<std::int64_t>(properties.totalGlobalMem);
  info.l2 = properties.l2CacheSize;
  info.shared_per_block = static_cast<std::int64_t>(properties.sharedMemPerBlockOptin);
  return info;
}

int current_device() {
  int device = 0;
  cuda_check(cudaGetDevice(&device), "asking for the current GPU");
  return device;
}

DeviceScope::DeviceScope(int device) : before_(current_device()), moved_(device != before_) {
  if (moved_) cuda_check(cudaSetDevice(device), "changing to another GPU");
}

DeviceScope::~DeviceScope() {
  if (moved_) cudaSetDevice(before_);
}

RelaxedCapture::RelaxedCapture() {
  cuda_check(cudaThreadExchangeStreamCaptureMode(&mode_), "relaxing the rules of a capture");
}

RelaxedCapture::~RelaxedCapture() { cudaThreadExchangeStreamCaptureMode(&mode_); }

DeviceBuffer::DeviceBuffer(std::int64_t bytes) : bytes_(bytes) {
  if (bytes < 0) fail(ErrorCode::kInvalidArgument, "a GPU buffer must have at least 0 bytes, got {}", bytes);
  if (bytes == 0) return;
  const cudaError_t status = cudaMalloc(&data_, static_cast<std::size_t>(bytes));
  if (status == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    fail(ErrorCode::kOutOfMemory, "the GPU has {} of {} bytes free, {} were asked for", available, total,
         bytes);
  }
  cuda_check(status, "allocating GPU memory");
}

DeviceBuffer::~DeviceBuffer() { cudaFree(data_); }

DeviceBuffer::DeviceBuffer(DeviceBuffer&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

DeviceBuffer& DeviceBuffer::operator=(DeviceBuffer&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

PinnedBuffer::PinnedBuffer(std::int64_t bytes) {
  if (bytes == 0) return;
  cuda_check(cudaMallocHost(&data_, static_cast<std::size_t>(bytes)), "allocating pinned memory");
}

PinnedBuffer::~PinnedBuffer() { cudaFreeHost(data_); }

Event::Event() { cuda_check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming), "making an event"); }

Event::~Event() { cudaEventDestroy(event_); }

void Event::record(cudaStream_t stream) const {
  cuda_check(cudaEventRecord(event_, stream), "recording an event");
}

void Event::synchronize() const { cuda_check(cudaEventSynchronize(event_), "waiting for the GPU"); }

Stream::Stream() {
  cuda_check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "making a stream");
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::synchronize() const { cuda_check(cudaStreamSynchronize(stream_), "waiting for the GPU"); }

std::int64_t array_bytes(std::int64_t count, std::int64_t size) { return checked_mul(count, size); }

}  // namespace megamoe::cuda
