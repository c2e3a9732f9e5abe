// gpu_test.cc: main of the tests that need a GPU.
#include "cuda/gpu_test.h"

#include <cmath>
#include <cstdio>

#include "numerics/bf16.h"

namespace megamoe::cuda {
namespace {

bool is_a_nan(float x) { return std::isnan(x); }
bool is_a_nan(bf16 x) { return std::isnan(to_float(x)); }

template <class T>
::testing::AssertionResult compare_numbers(const std::vector<T>& got, std::vector<T> want) {
  for (std::size_t i = 0; i < got.size() && i < want.size(); ++i) {
    if (is_a_nan(got[i]) && is_a_nan(want[i])) want[i] = got[i];
  }
  return same_bytes(got, want);
}

}  // namespace

::testing::AssertionResult same_numbers(const std::vector<float>& got, const std::vector<float>& want) {
  return compare_numbers(got, want);
}
::testing::AssertionResult same_numbers(const std::vector<bf16>& got, const std::vector<bf16>& want) {
  return compare_numbers(got, want);
}

}  // namespace megamoe::cuda

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (megamoe::cuda::device_count() == 0) {
    std::puts("no usable GPU: the tests of this program are skipped");
  } else {
    const megamoe::cuda::DeviceInfo info = megamoe::cuda::device_info(0);
    std::printf("%s, compute capability %d.%d, %d multiprocessors\n", info.name.c_str(), info.major,
                info.minor, info.multiprocessors);
  }
  return RUN_ALL_TESTS();
}
