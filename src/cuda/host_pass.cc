#include "cuda/host_pass.h"

#include <algorithm>

namespace megamoe::cuda {
namespace {

// The operands on the GPU, and what follows them in one buffer.
struct Operands {
  bf16 *x, *y;        // [tokens, H]
  std::int32_t* ids;  // [tokens, top_k]
  float* weights;     // [tokens, top_k]
  unsigned long long* saturated;
  std::byte* workspace;
  std::int64_t bytes;

  Operands(std::int64_t tokens, std::int64_t hidden, std::int64_t top_k, std::int64_t workspace_bytes,
           std::byte* base) {
    Arena arena(base, kDeviceAlignment);
    x = arena.take<bf16>(tokens, hidden);
    y = arena.take<bf16>(tokens, hidden);
    ids = arena.take<std::int32_t>(tokens, top_k);
    weights = arena.take<float>(tokens, top_k);
    saturated = arena.take<unsigned long long>(1);
    workspace = arena.take<std::byte>(workspace_bytes);
    bytes = arena.used();
  }
};

template <class T>
std::size_t bytes_of(std::int64_t count) {
  return static_cast<std::size_t>(count) * sizeof(T);
}

// Bytes from row to row; a single row may come with any stride.
template <class T>
std::size_t pitch(const MatrixView<T>& rows) {
  return bytes_of<T>(std::max(rows.row_stride, rows.cols));
}

// Host rows with any stride to contiguous ones on the GPU.
template <class T>
void upload(MatrixView<const T> from, T* to, cudaStream_t stream) {
  cuda_check(cudaMemcpy2DAsync(to, bytes_of<T>(from.cols), from.data, pitch(from), bytes_of<T>(from.cols),
                               static_cast<std::size_t>(from.rows), cudaMemcpyHostToDevice, stream),
             "copying to the GPU");
}

// Waits for the stream, whatever comes: until then it may read and write the caller's memory.
class Finish {
 public:
  explicit Finish(const Stream& stream) : stream_(stream) {}
  ~Finish() { cudaStreamSynchronize(stream_.get()); }
  Finish(const Finish&) = delete;
  Finish& operator=(const Finish&) = delete;

 private:
  const Stream& stream_;
};

}  // namespace

std::int64_t HostPass::run(const DevicePass& pass, MatrixView<const bf16> x,
                           MatrixView<const std::int32_t> ids, MatrixView<const float> weights,
                           MatrixView<bf16> y) {
  if (x.rows == 0) return 0;
  const std::lock_guard lock(mutex_);
  const DeviceScope device(device_);
  if (stream_ == nullptr) stream_ = std::make_unique<Stream>();
  cudaStream_t stream = stream_->get();
  const std::int64_t workspace_bytes = pass.workspace_bytes(x.rows);
  const auto lay_out = [&](void* base) {
    return Operands(x.rows, x.cols, ids.cols, workspace_bytes, static_cast<std::byte*>(base));
  };
  if (const std::int64_t bytes = lay_out(nullptr).bytes; bytes > buffer_.bytes()) {
    buffer_ = DeviceBuffer();  // first, so that both need not fit
    buffer_ = DeviceBuffer(bytes);
  }
  const Operands on_gpu = lay_out(buffer_.data());
  unsigned long long saturated = 0;
  {
    const Finish finish(*stream_);
    upload(x, on_gpu.x, stream);
    upload(ids, on_gpu.ids, stream);
    upload(weights, on_gpu.weights, stream);
    cuda_check(cudaMemsetAsync(on_gpu.saturated, 0, sizeof(saturated), stream), "clearing a counter");
    pass.enqueue({.x = {on_gpu.x, x.rows, x.cols},
                  .ids = on_gpu.ids,
                  .weights = on_gpu.weights,
                  .y = {on_gpu.y, y.rows, y.cols},
                  .workspace = on_gpu.workspace,
                  .stream = stream,
                  .saturated = on_gpu.saturated,
                  .bad_pair = nullptr});
    cuda_check(cudaMemcpy2DAsync(y.data, pitch(y), on_gpu.y, bytes_of<bf16>(y.cols), bytes_of<bf16>(y.cols),
                                 static_cast<std::size_t>(y.rows), cudaMemcpyDeviceToHost, stream),
               "copying from the GPU");
    cuda_check(
        cudaMemcpyAsync(&saturated, on_gpu.saturated, sizeof(saturated), cudaMemcpyDeviceToHost, stream),
        "copying from the GPU");
    stream_->synchronize();
  }
  return static_cast<std::int64_t>(saturated);
}

}  // namespace megamoe::cuda
