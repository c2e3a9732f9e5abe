#include "cuda/sm90/tensor_rate.h"

#include "cuda/gpu_test.h"

namespace megamoe::sm90 {
namespace {

class TensorRateTest : public cuda::GpuTest {
 protected:
  void SetUp() override {
    cuda::GpuTest::SetUp();
    if (!IsSkipped() && cuda::device_info(0).major != 9) GTEST_SKIP() << "needs a Hopper GPU";
  }
};

// A multiprocessor does 4096 operations in a cycle, in FP8 8192; Hopper's clocks stay below 2 GHz, and even a
// throttled one does more than a quarter of that.
TEST_F(TensorRateTest, StaysBelowWhatTheClockAllows) {
  const double bound = 4096 * 2e9 * cuda::device_info(0).multiprocessors;
  const double rate = tensor_rate(OperandType::kBf16, cuda::Stream());
  EXPECT_LT(rate, bound);
  EXPECT_GT(rate, bound / 4);
  const double fp8_rate = tensor_rate(OperandType::kFp8, cuda::Stream());
  EXPECT_LT(fp8_rate, 2 * bound);
  EXPECT_GT(fp8_rate, 1.2 * rate);
}

}  // namespace
}  // namespace megamoe::sm90
