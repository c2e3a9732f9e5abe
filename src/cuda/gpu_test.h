// gpu_test.h: what the tests that need a GPU share.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <random>
#include <vector>

#include "cuda/device.h"
#include "cuda/quantize.h"
#include "megamoe/types.h"

namespace megamoe::cuda {

// Skips where there is no GPU.
class GpuTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (device_count() == 0) GTEST_SKIP() << "no usable GPU";
  }
};

class Random {
 public:
  explicit Random(std::uint64_t seed) : engine_(seed) {}
  std::uint64_t bits() { return engine_(); }
  std::int64_t integer(std::int64_t low, std::int64_t high) {  // both included
    return low + static_cast<std::int64_t>(engine_() % static_cast<std::uint64_t>(high - low + 1));
  }
  float uniform(float low, float high) {
    return low + (high - low) * static_cast<float>(engine_() >> 40) * 0x1p-24f;
  }
  float bell() { return uniform(-1, 1) + uniform(-1, 1) + uniform(-1, 1); }

 private:
  std::mt19937_64 engine_;
};

// An output of `count` elements, filled with a poison byte, with guards before and behind it.
template <class T>
class Output {
 public:
  explicit Output(std::int64_t count, int poison = 0x7F)
      : bytes_(count * static_cast<std::int64_t>(sizeof(T))), poison_(poison), memory_(bytes_ + 2 * kGuard) {
    memory_.fill(poison);
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data() + kGuard); }

  std::vector<T> download() const {
    const std::vector<std::uint8_t> all = memory_.download();
    for (std::int64_t i = 0; i < bytes_ + 2 * kGuard; ++i) {
      if (i == kGuard) i += bytes_;
      if (all[static_cast<std::size_t>(i)] != static_cast<std::uint8_t>(poison_)) {
        ADD_FAILURE() << "written at byte " << i - kGuard << " of " << bytes_;
        break;
      }
    }
    std::vector<T> values(static_cast<std::size_t>(bytes_) / sizeof(T));
    if (bytes_ > 0) {
      std::memcpy(static_cast<void*>(values.data()), all.data() + kGuard, static_cast<std::size_t>(bytes_));
    }
    return values;
  }

 private:
  static constexpr std::int64_t kGuard = 256;  // keeps the alignment
  std::int64_t bytes_;
  int poison_;
  DeviceArray<std::uint8_t> memory_;
};

// Fails with the first difference and the number of all.
template <class T>
::testing::AssertionResult same_bytes(const std::vector<T>& got, const std::vector<T>& want) {
  if (got.size() != want.size())
    return ::testing::AssertionFailure() << got.size() << " against " << want.size();
  std::size_t different = 0, first = 0;
  for (std::size_t i = got.size(); i-- > 0;) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) != 0) {
      ++different;
      first = i;
    }
  }
  if (different == 0) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << different << " of " << got.size() << " differ, the first at " << first;
}

// As same_bytes, all NaNs being one.
::testing::AssertionResult same_numbers(const std::vector<float>& got, const std::vector<float>& want);
::testing::AssertionResult same_numbers(const std::vector<bf16>& got, const std::vector<bf16>& want);

// encode_test.cu: the encoder alone, for n values x under the divisor d [n / 16], and for n scales.
cudaError_t encode_codes_for_test(ElementType type, const void* x, const float* d, std::int64_t n,
                                  std::uint8_t* codes);
cudaError_t block_scales_for_test(const float* amax, float g, std::int64_t n, std::uint8_t* codes,
                                  std::uint8_t* saturated);

}  // namespace megamoe::cuda
