// layout_test.cc: the swizzle of scales and the interleaving of gate and up, there and back.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "base/test_error.h"
#include "megamoe/layout.h"
#include "megamoe/types.h"
#include "numerics/interleave.h"
#include "numerics/oracle.h"
#include "numerics/swizzle.h"

namespace megamoe {
namespace {

using Bytes = std::vector<std::uint8_t>;

Bytes random_bytes(std::int64_t count, std::uint64_t seed) {
  Bytes bytes(static_cast<std::size_t>(count));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    bytes[i] = static_cast<std::uint8_t>(oracle::mix(seed * 1000003 + i) % 255 + 1);  // never 0, the padding
  }
  return bytes;
}

// K = 80 has 5 scale columns, which pad to 8.
TEST(Swizzle, RoundTripsOddShapesAndPadsWithZero) {
  const std::pair<std::int64_t, std::int64_t> shapes[] = {{3, 5},   {129, 5}, {48, 5},  {1, 1},    {128, 4},
                                                          {127, 3}, {256, 8}, {257, 9}, {300, 180}};
  for (const auto& [rows, cols] : shapes) {
    const Bytes in = random_bytes(rows * cols, 1);
    const std::int64_t padded_rows = (rows + 127) / 128 * 128, padded_cols = (cols + 3) / 4 * 4;
    ASSERT_EQ(swizzled_bytes(rows, cols), padded_rows * padded_cols);
    for (const std::uint8_t poison : {0x7f, 0xff, 0x00}) {
      Bytes swizzled(static_cast<std::size_t>(padded_rows * padded_cols), poison);
      swizzle_scales(in.data(), rows, cols, swizzled.data());
      const std::int64_t zeros = std::count(swizzled.begin(), swizzled.end(), 0);
      EXPECT_EQ(zeros, padded_rows * padded_cols - rows * cols) << "all padding, and nothing else, is 0";
      Bytes back(in.size(), poison);
      unswizzle_scales(swizzled.data(), rows, cols, back.data());
      EXPECT_EQ(back, in) << rows << "x" << cols;
    }
  }
}

// Walks the layout the other way round: which scale stands at each byte.
TEST(Swizzle, IsTheDocumentedOrder) {
  const std::int64_t rows = 300, cols = 11, tiles_across = 3;
  std::int64_t offset = 0;
  for (std::int64_t tile = 0; tile < 3 * tiles_across; ++tile) {
    for (std::int64_t low = 0; low < 32; ++low) {
      for (std::int64_t quarter = 0; quarter < 4; ++quarter) {
        for (std::int64_t c = 0; c < 4; ++c, ++offset) {
          const std::int64_t row = tile / tiles_across * 128 + quarter * 32 + low;
          const std::int64_t col = tile % tiles_across * 4 + c;
          ASSERT_EQ(swizzled_offset(row, col, cols), offset) << row << "," << col;
        }
      }
    }
  }
  EXPECT_EQ(offset, swizzled_bytes(rows, cols));
}

TEST(Swizzle, RefusesImpossibleSizes) {
  constexpr std::int64_t kHuge = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(swizzled_bytes(0, 5), 0);
  EXPECT_EQ(swizzled_bytes(5, 0), 0);
  swizzle_scales(nullptr, 0, 5, nullptr);
  unswizzle_scales(nullptr, 5, 0, nullptr);
  EXPECT_EQ(code_of([] { swizzled_bytes(kHuge, 4); }), ErrorCode::kOutOfMemory);
  EXPECT_EQ(code_of([] { swizzled_bytes(std::int64_t{1} << 40, std::int64_t{1} << 40); }),
            ErrorCode::kOutOfMemory);
  EXPECT_EQ(code_of([] { swizzled_bytes(-1, 4); }), ErrorCode::kInvalidArgument);
}

TEST(Interleave, AlternatesGroupsOfEight) {
  std::vector<bf16> gate(24), up(24), out(48, bf16{0x7f7f});
  for (std::uint16_t i = 0; i < 24; ++i) {
    gate[i] = {i};
    up[i] = {static_cast<std::uint16_t>(100 + i)};
  }
  interleave(gate.data(), up.data(), 24, sizeof(bf16), out.data());
  const std::uint16_t expected[48] = {0,  1,  2,  3,  4,  5,  6,  7,  100, 101, 102, 103, 104, 105, 106, 107,
                                      8,  9,  10, 11, 12, 13, 14, 15, 108, 109, 110, 111, 112, 113, 114, 115,
                                      16, 17, 18, 19, 20, 21, 22, 23, 116, 117, 118, 119, 120, 121, 122, 123};
  for (std::size_t i = 0; i < 48; ++i) EXPECT_EQ(out[i].bits, expected[i]) << i;
  for (std::int64_t i = 0; i < 24; ++i) {
    EXPECT_EQ(out[static_cast<std::size_t>(interleaved_gate(i))], gate[static_cast<std::size_t>(i)]);
    EXPECT_EQ(out[static_cast<std::size_t>(interleaved_up(i))], up[static_cast<std::size_t>(i)]);
  }
}

TEST(Interleave, RoundTripsOddShapes) {
  for (const std::int64_t rows : {8, 16, 48, 80, 176, 1856}) {
    for (const std::int64_t row_bytes :
         {1, 3, 5, 40, 80}) {  // a bias byte, scales of K = 80, codes, bf16 ...
      const Bytes gate = random_bytes(rows * row_bytes, 2), up = random_bytes(rows * row_bytes, 3);
      for (const std::uint8_t poison : {0x7f, 0xff, 0x00}) {
        Bytes out(gate.size() * 2, poison), gate_back(gate.size(), poison), up_back(up.size(), poison);
        interleave(gate.data(), up.data(), rows, row_bytes, out.data());
        deinterleave(out.data(), rows, row_bytes, gate_back.data(), up_back.data());
        EXPECT_EQ(gate_back, gate) << rows << " rows of " << row_bytes;
        EXPECT_EQ(up_back, up) << rows << " rows of " << row_bytes;
      }
    }
  }
}

TEST(Interleave, RefusesWhatHasNoGroups) {
  Bytes a(100), b(100), c(200);
  EXPECT_EQ(code_of([&] { interleave(a.data(), b.data(), 12, 4, c.data()); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { deinterleave(c.data(), -8, 4, a.data(), b.data()); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { interleave(a.data(), b.data(), 8, -1, c.data()); }), ErrorCode::kInvalidArgument);
  EXPECT_EQ(code_of([&] { interleave(a.data(), b.data(), 8, std::int64_t{1} << 60, c.data()); }),
            ErrorCode::kOutOfMemory);
  interleave(nullptr, nullptr, 0, 4, nullptr);
  deinterleave(nullptr, 8, 0, nullptr, nullptr);
}

}  // namespace
}  // namespace megamoe
