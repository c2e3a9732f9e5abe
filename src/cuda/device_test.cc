#include <cstring>

#include "cuda/gpu_test.h"
#include "megamoe/error.h"

namespace megamoe::cuda {
namespace {

TEST(CudaErrors, SayWhatFailed) {
  try {
    cuda_check(cudaErrorIllegalAddress, "testing");
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kInternal);
    EXPECT_NE(std::string(error.what()).find("CUDA failed while testing"), std::string::npos) << error.what();
  }
  EXPECT_NO_THROW(cuda_check(cudaSuccess, "testing"));
}

class DeviceTest : public GpuTest {};

TEST_F(DeviceTest, BuffersKeepAndMoveTheirBytes) {
  const std::vector<int> values = {1, 2, 3, 4, 5};
  DeviceArray<int> a(values);
  DeviceArray<int> b = std::move(a);
  EXPECT_EQ(b.download(), values);
  b = DeviceArray<int>();
  EXPECT_EQ(b.count(), 0);
  EXPECT_TRUE(b.download().empty());
}

TEST_F(DeviceTest, MemoryThatIsNotThereIsOneError) {
  try {
    DeviceBuffer(std::int64_t{1} << 50);
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), ErrorCode::kOutOfMemory);
  }
  EXPECT_EQ(cudaGetLastError(), cudaSuccess);
  EXPECT_THROW(DeviceArray<double>(INT64_MAX / 4), Error);
  EXPECT_GT(DeviceBuffer(1 << 20).bytes(), 0);
}

TEST_F(DeviceTest, StreamsWait) {
  const Stream stream;
  DeviceArray<std::uint8_t> a(1000);
  cuda_check(cudaMemsetAsync(a.data(), 3, 1000, stream.get()), "testing");
  stream.synchronize();
  EXPECT_EQ(a.download(), std::vector<std::uint8_t>(1000, 3));
}

TEST_F(DeviceTest, EventsWaitAndPinnedMemoryArrives) {
  const Stream stream;
  const Event never, copied;
  never.synchronize();
  const PinnedBuffer host(1000);
  std::memset(host.data(), 5, 1000);
  DeviceArray<std::uint8_t> a(1000);
  cuda_check(cudaMemcpyAsync(a.data(), host.data(), 1000, cudaMemcpyHostToDevice, stream.get()), "testing");
  copied.record(stream.get());
  copied.synchronize();
  EXPECT_EQ(a.download(), std::vector<std::uint8_t>(1000, 5));
}

TEST_F(DeviceTest, AScopeGivesTheDeviceBack) {
  const int last = device_count() - 1, before = current_device();
  {
    const DeviceScope other(last);
    EXPECT_EQ(current_device(), last);
    const DeviceScope same(last);
    EXPECT_EQ(current_device(), last);
  }
  EXPECT_EQ(current_device(), before);
  EXPECT_THROW({ const DeviceScope none(device_count()); }, Error);
  EXPECT_EQ(current_device(), before);
}

}  // namespace
}  // namespace megamoe::cuda
