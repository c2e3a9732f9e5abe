#include "cuda/gather.h"

#include <cstring>

#include "cuda/gpu_test.h"

namespace megamoe::cuda {
namespace {

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

class GatherTest : public GpuTest {};

// `actual` of at most `most` rows out of `tokens`, whose rows lie `more` elements further apart than they are
// wide; the number is on the GPU unless there are as many as there may be. Between rows of x lies NaN; the
// map holds poison beyond the rows, and the result must keep it.
void expect_gathered(std::int64_t tokens, std::int64_t actual, std::int64_t most, std::int64_t cols,
                     std::int64_t more, int poison) {
  SCOPED_TRACE(::testing::Message() << actual << " of " << most << " rows out of " << tokens << " x " << cols
                                    << ", stride +" << more << ", poison " << poison);
  Random random(static_cast<std::uint64_t>(cols + more));
  const std::int64_t stride = cols + more;
  std::vector<bf16> x(size(tokens * stride), bf16{0x7FC1}), want(size(most * cols));
  for (std::int64_t t = 0; t < tokens; ++t) {
    for (std::int64_t k = 0; k < cols; ++k)
      x[size(t * stride + k)] = {static_cast<std::uint16_t>(random.bits())};
  }
  std::memset(static_cast<void*>(want.data()), poison, want.size() * sizeof(bf16));
  std::vector<std::int32_t> map(size(most), 0x7F7F7F7F);
  for (std::int64_t r = 0; r < actual; ++r) {
    map[size(r)] = static_cast<std::int32_t>(random.integer(0, tokens - 1));
    std::copy_n(x.begin() + map[size(r)] * stride, cols, want.begin() + r * cols);
  }
  const DeviceArray<bf16> d_x(x);
  const DeviceArray<std::int32_t> d_map(map);
  const DeviceArray<std::int64_t> d_actual(std::vector<std::int64_t>{actual});
  const Output<bf16> out(most * cols, poison);
  cuda_check(gather_rows(d_x.data(), stride, d_map.data(),
                         actual == most ? RowCount(most) : RowCount(most, d_actual.data()), cols, out.data(),
                         nullptr),
             "testing gather_rows");
  EXPECT_TRUE(same_bytes(out.download(), want));
}

TEST_F(GatherTest, GathersRows) {
  for (const int poison : {0x7F, 0xFF, 0x00}) {
    for (const std::int64_t cols : {8, 16, 48, 80, 272, 2064}) {
      for (const std::int64_t more : {0, 8, 24}) expect_gathered(9, 31, 31, cols, more, poison);
    }
  }
}

TEST_F(GatherTest, OnlyTheRowsThatThereAre) {
  for (const int poison : {0x7F, 0xFF, 0x00}) {
    for (const std::int64_t actual : {0, 1, 17, 31}) expect_gathered(9, actual, 33, 144, 16, poison);
  }
}

TEST_F(GatherTest, NoRowsAndMoreThanAGridAxis) {
  expect_gathered(1, 0, 0, 64, 0, 0x7F);
  expect_gathered(300, 66000, 66000, 2048, 0, 0x7F);  // 66,000 blocks
  expect_gathered(300, 70000, 70001, 16, 8, 0x7F);
}

// Rows, strides and results that are not whole vectors of 16 bytes.
TEST_F(GatherTest, RefusesWhatItCannotCopy) {
  const DeviceArray<bf16> x(std::vector<bf16>(256, bf16{0}));
  const DeviceArray<std::int32_t> map(std::vector<std::int32_t>{0, 1});
  const Output<bf16> out(64);
  const auto gather = [&](const bf16* from, std::int64_t stride, std::int64_t cols, bf16* to) {
    return gather_rows(from, stride, map.data(), 2, cols, to, nullptr);
  };
  EXPECT_EQ(gather(x.data() + 1, 32, 32, out.data()), cudaErrorInvalidValue);
  EXPECT_EQ(gather(x.data(), 36, 32, out.data()), cudaErrorInvalidValue);
  EXPECT_EQ(gather(x.data(), 32, 20, out.data()), cudaErrorInvalidValue);
  EXPECT_EQ(gather(x.data(), 32, 16, out.data() + 4), cudaErrorInvalidValue);
  EXPECT_EQ(out.download(), Output<bf16>(64).download());
  EXPECT_EQ(gather(x.data() + 8, 32, 32, out.data()), cudaSuccess);
}

}  // namespace
}  // namespace megamoe::cuda
