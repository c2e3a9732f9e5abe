#include "cuda/graph_timer.h"
#include "cuda/gpu_test.h"
#include "megamoe/error.h"

namespace megamoe::cuda {
namespace {

class GraphTimerTest : public GpuTest {};

TEST_F(GraphTimerTest, AGraphDoesWhatWasCapturedEveryTime) {
  const Stream stream;
  DeviceArray<std::uint8_t> a(1000), b(1000);
  a.fill(1), b.fill(0x7F);
  const CapturedGraph graph(stream, [&] {
    cuda_check(cudaMemcpyAsync(b.data(), a.data(), 1000, cudaMemcpyDeviceToDevice, stream.get()), "testing");
  });
  EXPECT_EQ(b.download(), std::vector<std::uint8_t>(1000, 0x7F));  // capturing ran nothing
  for (const int value : {2, 3}) {
    a.fill(value);
    cuda_check(cudaDeviceSynchronize(), "testing");
    EXPECT_GT(stream_seconds(stream, [&] { graph.launch(stream); }), 0);
    EXPECT_EQ(b.download(), std::vector<std::uint8_t>(1000, static_cast<std::uint8_t>(value)));
  }
}

TEST_F(GraphTimerTest, AFailedCaptureLeavesTheStreamUsable) {
  const Stream stream;
  EXPECT_THROW(CapturedGraph(stream, [] { throw Error(ErrorCode::kInternal, "no"); }), Error);
  DeviceArray<std::uint8_t> a(1000);
  a.fill(0);
  cuda_check(cudaDeviceSynchronize(), "testing");
  cuda_check(cudaMemsetAsync(a.data(), 3, 1000, stream.get()), "testing");
  stream.synchronize();
  EXPECT_EQ(a.download(), std::vector<std::uint8_t>(1000, 3));
}

// Between what a slow card's memory does and what none reaches.
TEST_F(GraphTimerTest, ACopyHasTheBandwidthOfMemory) {
  const double bandwidth = copy_bandwidth(Stream());
  EXPECT_GT(bandwidth, 50e9);
  EXPECT_LT(bandwidth, 50e12);
}

}  // namespace
}  // namespace megamoe::cuda
