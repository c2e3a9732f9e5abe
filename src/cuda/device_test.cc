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

}  // namespace
}  // namespace megamoe::cuda
