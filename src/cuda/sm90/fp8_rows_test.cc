// fp8_rows_test.cc: rows to E4M3 on the GPU, byte for byte what a second implementation makes of them, where
// the GEMMs look for them.
#include "cuda/sm90/fp8_rows.h"

#include <cstring>
#include <utility>

#include "cuda/gpu_test.h"
#include "tests/independent.h"

namespace megamoe::sm90 {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;
using cuda::Output;

class Fp8RowsTest : public cuda::GpuTest {};

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// Tokens [tokens, cols] and the rows that read each, of experts in turn.
struct Case {
  std::vector<bf16> x;
  std::int64_t tokens, cols;
  int copies, experts;
  std::vector<std::int32_t> slot_to_row;  // [tokens, copies], or empty: row t is token t
  std::vector<std::int64_t> offsets;      // [experts + 1], or empty
  std::int64_t rows, most_rows;
};

void expect_quantised(const Case& c, bool told_experts) {
  const std::int64_t groups = (c.cols + 127) / 128, pitch = (c.most_rows + 3) / 4 * 4 + 4 * c.experts;
  // What is not written keeps the poison.
  for (const int poison : {0x7F, 0xFF, 0x00}) {
    std::vector<std::uint8_t> codes(size(c.most_rows * groups * 128), static_cast<std::uint8_t>(poison));
    std::vector<float> scales(size(groups * pitch));
    std::memset(static_cast<void*>(scales.data()), poison, scales.size() * sizeof(float));
    std::vector<std::int32_t> pair_experts(size(c.tokens * c.copies), -1);
    for (std::int64_t pair = 0; pair < c.tokens * c.copies; ++pair) {
      const std::int64_t token = pair / c.copies,
                         row = c.slot_to_row.empty() ? token : c.slot_to_row[size(pair)];
      if (row < 0) continue;
      std::int64_t place = row;
      for (std::int64_t e = 0; e < c.experts && !c.offsets.empty(); ++e) {
        const std::int64_t begin = c.offsets[size(e)];
        if (row < begin || row >= c.offsets[size(e + 1)]) continue;
        place = (begin + 3) / 4 * 4 + 4 * e + row - begin;
        pair_experts[size(pair)] = static_cast<std::int32_t>(e);
      }
      const independent::Row want = independent::make_row(
          {c.x.begin() + token * c.cols, c.x.begin() + (token + 1) * c.cols}, ActivationFormat::kFp8, 0.0f);
      for (std::int64_t k = 0; k < groups * 128; ++k) {
        const std::int64_t four = k % 64 / 4, at = k / 64 * 64 + (four % 4 * 4 + four / 4) * 4 + k % 4;
        codes[size(row * groups * 128 + at)] = k < c.cols ? want.codes[size(k)] : std::uint8_t{0};
      }
      for (std::int64_t g = 0; g < groups; ++g) scales[size(g * pitch + place)] = want.scales[size(g)];
    }
    const DeviceArray<bf16> x(c.x);
    const DeviceArray<std::int32_t> slot_to_row(c.slot_to_row);
    const DeviceArray<std::int64_t> offsets(c.offsets);
    const DeviceArray<std::int32_t> ids(told_experts ? pair_experts : std::vector<std::int32_t>());
    const Output<std::uint8_t> got_codes(c.most_rows * groups * 128, poison);
    const Output<float> got_scales(groups * pitch, poison);
    cuda_check(quantize_fp8({.x = x.data(),
                             .row_stride = c.cols,
                             .tokens = c.tokens,
                             .cols = c.cols,
                             .slot_to_row = slot_to_row.data(),
                             .copies = c.copies,
                             .ids = ids.data(),
                             .offsets = offsets.data(),
                             .experts = c.experts,
                             .most_rows = c.most_rows,
                             .codes = got_codes.data(),
                             .scales = got_scales.data()},
                            nullptr),
               "testing the quantiser");
    cuda_check(cudaDeviceSynchronize(), "testing the quantiser");
    EXPECT_TRUE(cuda::same_bytes(got_codes.download(), codes));
    EXPECT_TRUE(cuda::same_bytes(got_scales.download(), scales));
  }
}

// Where each row's expert is told, and where it is found.
void expect_quantised(const Case& c) {
  for (const bool told_experts : {false, true}) expect_quantised(c, told_experts);
}

// Groups of a number that makes the scale, and 127 that are no larger, of either sign: every BF16 under
// scales of all sizes; and all as they come, NaN and infinity among them.
TEST_F(Fp8RowsTest, EveryBf16) {
  Case c{{}, 0, 128, 1, 1, {}, {}, 0, 0};
  const auto add = [&](std::uint32_t largest, std::uint32_t first) {
    for (std::uint32_t bits = first; bits <= largest; ++bits) {
      if (c.x.size() % 128 == 0) c.x.push_back({static_cast<std::uint16_t>(largest)});
      c.x.push_back({static_cast<std::uint16_t>(bits | (bits & 1) << 15)});
    }
    while (c.x.size() % 128 != 0) c.x.push_back({0x8000});
  };
  for (const std::uint32_t largest : {0x0001u, 0x0080u, 0x1234u, 0x3F80u, 0x3FC1u, 0x4B7Fu, 0x7F7Fu})
    add(largest, 0);
  // Every significand of the largest, every one of the others down to those that become 0.
  for (std::uint32_t largest = 0x3F80; largest < 0x4000; ++largest) add(largest, largest - (20 << 7));
  for (std::uint32_t bits = 0; bits < 0x10000; ++bits) {
    c.x.push_back({static_cast<std::uint16_t>(bits * 0x9E37u)});
  }
  c.tokens = c.rows = c.most_rows = static_cast<std::int64_t>(c.x.size()) / 128;
  expect_quantised(c);
}

TEST_F(Fp8RowsTest, SmallRowsOfEveryShape) {
  cuda::Random random(1);
  for (const std::int64_t cols : {16, 112, 128, 144, 2064}) {
    for (const std::int64_t tokens : {1, 7, 40}) {
      const int copies = tokens == 7 ? 20 : 3;  // more than lanes of a group
      Case c{{}, tokens, cols, copies, 6, {}, {}, 0, 0};
      for (std::int64_t i = 0; i < tokens * cols; ++i) {
        c.x.push_back({static_cast<std::uint16_t>(
            random.integer(0, 40) == 0 ? random.bits() : 0x3F00 + random.bits() % 0x100)});
      }
      // Some slots are left out, the others get rows in any order.
      c.slot_to_row.assign(size(tokens * copies), -1);
      for (std::int32_t& row : c.slot_to_row) {
        if (random.integer(0, 3) > 0) row = static_cast<std::int32_t>(c.rows++);
      }
      for (std::size_t i = c.slot_to_row.size(); i-- > 1;) {
        std::swap(c.slot_to_row[i], c.slot_to_row[size(random.integer(0, static_cast<std::int64_t>(i)))]);
      }
      c.most_rows = tokens * copies;
      c.offsets = {0, c.rows / 5, c.rows / 5, c.rows / 2, c.rows / 2 + (c.rows > 2 ? 1 : 0), c.rows, c.rows};
      expect_quantised(c);
    }
  }
}

TEST_F(Fp8RowsTest, RefusesWhatItCannotRead) {
  const DeviceArray<bf16> x(64);
  const DeviceArray<std::uint8_t> codes(256);
  const DeviceArray<float> scales(64);
  const Fp8Quantize good{.x = x.data(),
                         .row_stride = 16,
                         .tokens = 2,
                         .cols = 16,
                         .most_rows = 2,
                         .codes = codes.data(),
                         .scales = scales.data()};
  EXPECT_EQ(quantize_fp8(good, nullptr), cudaSuccess);
  Fp8Quantize bad = good;
  bad.cols = 24;
  EXPECT_EQ(quantize_fp8(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.x = x.data() + 1;
  EXPECT_EQ(quantize_fp8(bad, nullptr), cudaErrorInvalidValue);
  bad = good;
  bad.row_stride = 20;
  EXPECT_EQ(quantize_fp8(bad, nullptr), cudaErrorInvalidValue);
  bad.tokens = 1;
  EXPECT_EQ(quantize_fp8(bad, nullptr), cudaSuccess);
  cuda_check(cudaDeviceSynchronize(), "testing the quantiser");
}

}  // namespace
}  // namespace megamoe::sm90
