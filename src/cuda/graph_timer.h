// graph_timer.h: times what is put on a stream: as one captured graph, or as it is.
#pragma once

#include <functional>

#include "cuda/device.h"

namespace megamoe::cuda {

// Work for a stream, captured once and run as often as is wanted.
class CapturedGraph {
 public:
  // What `work` puts on the stream; nothing of it runs. It may not wait, allocate or use another stream.
  CapturedGraph(const Stream& stream, const std::function<void()>& work);
  ~CapturedGraph();
  CapturedGraph(const CapturedGraph&) = delete;
  CapturedGraph& operator=(const CapturedGraph&) = delete;

  void launch(const Stream& stream) const;

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Seconds from the beginning to the end of what `work` puts on the stream, by the GPU's clock. Waits for it.
double stream_seconds(const Stream& stream, const std::function<void()>& work);

// Bytes read and written in a second by a copy of 1 GiB within the GPU's memory: the best of a few. Not in a
// graph: there a copy may go to the copy engines, which are slower.
double copy_bandwidth(const Stream& stream);

}  // namespace megamoe::cuda
