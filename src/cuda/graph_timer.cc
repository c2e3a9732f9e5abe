#include "cuda/graph_timer.h"

#include <algorithm>
#include <limits>

namespace megamoe::cuda {
namespace {

class TimedEvent {
 public:
  TimedEvent() { cuda_check(cudaEventCreate(&event_), "making an event"); }
  ~TimedEvent() { cudaEventDestroy(event_); }
  TimedEvent(const TimedEvent&) = delete;
  TimedEvent& operator=(const TimedEvent&) = delete;

  cudaEvent_t get() const { return event_; }
  void record(const Stream& stream) const { cuda_check(cudaEventRecord(event_, stream.get()), "timing"); }

 private:
  cudaEvent_t event_ = nullptr;
};

}  // namespace

CapturedGraph::CapturedGraph(const Stream& stream, const std::function<void()>& work) {
  cuda_check(cudaStreamBeginCapture(stream.get(), cudaStreamCaptureModeThreadLocal), "capturing a graph");
  cudaGraph_t graph = nullptr;
  try {
    work();
  } catch (...) {
    cudaStreamEndCapture(stream.get(), &graph);  // else the stream stays unusable
    cudaGraphDestroy(graph);
    cudaGetLastError();
    throw;
  }
  cuda_check(cudaStreamEndCapture(stream.get(), &graph), "capturing a graph");
  const cudaError_t status = cudaGraphInstantiate(&exec_, graph, 0);
  cudaGraphDestroy(graph);
  cuda_check(status, "making a graph");
}

CapturedGraph::~CapturedGraph() { cudaGraphExecDestroy(exec_); }

void CapturedGraph::launch(const Stream& stream) const {
  cuda_check(cudaGraphLaunch(exec_, stream.get()), "launching a graph");
}

double stream_seconds(const Stream& stream, const std::function<void()>& work) {
  const TimedEvent begin, end;
  begin.record(stream);
  work();
  end.record(stream);
  cuda_check(cudaEventSynchronize(end.get()), "waiting for the GPU");
  float milliseconds = 0;
  cuda_check(cudaEventElapsedTime(&milliseconds, begin.get(), end.get()), "timing");
  return milliseconds * 1e-3;
}

double copy_bandwidth(const Stream& stream) {
  constexpr std::int64_t kBytes = 1LL << 30;
  const DeviceBuffer from(kBytes), to(kBytes);
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < 9; ++i) {
    best = std::min(
        best, stream_seconds(stream, [&] {
          cuda_check(cudaMemcpyAsync(to.data(), from.data(), kBytes, cudaMemcpyDeviceToDevice, stream.get()),
                     "copying");
        }));
  }
  return 2.0 * kBytes / best;
}

}  // namespace megamoe::cuda
