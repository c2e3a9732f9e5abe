// golden_test.cc: our conversions against those of other software, as tools/make_golden.py recorded them.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "numerics/bf16.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/e8m0.h"
#include "numerics/fp16.h"
#include "numerics/oracle.h"

namespace megamoe {
namespace {

constexpr std::uint64_t kChunk = 1000000;

std::vector<std::istringstream> golden_lines(const std::string& kind) {
  std::ifstream file(MEGAMOE_SOURCE_DIR "/tests/golden/numerics.txt");
  std::vector<std::istringstream> lines;
  std::string line, word;
  while (std::getline(file, line)) {
    std::istringstream fields(line);
    if (fields >> word && word == kind) lines.push_back(std::move(fields));
  }
  return lines;
}

std::uint32_t encode(const std::string& format, float x) {
  if (format == "e2m1") return encode_e2m1(x);
  if (format == "e4m3") return encode_e4m3(x);
  if (format == "bf16") return to_bf16(x).bits;
  if (format == "fp16") return to_fp16(x).bits;
  ADD_FAILURE() << "unknown format " << format;
  return 0;
}

float decode(const std::string& format, std::uint32_t code) {
  const auto byte = static_cast<std::uint8_t>(code);
  if (format == "e2m1") return decode_e2m1(byte);
  if (format == "e4m3") return decode_e4m3(byte);
  if (format == "e8m0") return decode_e8m0(byte);
  ADD_FAILURE() << "unknown format " << format;
  return 0;
}

TEST(Golden, Decode) {
  int count = 0;
  for (std::istringstream& line : golden_lines("decode")) {
    std::string format;
    std::uint32_t code, bits;
    ASSERT_TRUE(line >> format >> std::hex >> code >> bits);
    EXPECT_EQ(oracle::bits_from_float(decode(format, code)), bits) << format << " " << code;
    ++count;
  }
  EXPECT_EQ(count, 16 + 254 + 255);
}

TEST(Golden, NearEveryRoundingBoundary) {
  int count = 0;
  for (std::istringstream& line : golden_lines("near")) {
    std::string format;
    std::uint32_t centre;
    ASSERT_TRUE(line >> format >> std::hex >> centre);
    for (std::uint32_t bits = centre - 4; bits != centre + 5; ++bits) {
      std::uint32_t code;
      ASSERT_TRUE(line >> code);
      EXPECT_EQ(encode(format, oracle::float_from_bits(bits)), code) << format << " " << std::hex << bits;
    }
    ++count;
  }
  EXPECT_EQ(count, 2 * (7 + 3) + 2 * (126 + 4));
}

// The FP32 pattern number `index` of a stream; tools/make_golden.py makes the same.
std::uint32_t stream_bits(bool focused, std::uint64_t index) {
  const std::uint64_t r = oracle::mix(index + (focused ? std::uint64_t{1} << 40 : 0));
  const auto bits = static_cast<std::uint32_t>(r >> 32);
  return focused ? (bits & 0x807FFFFFu) | static_cast<std::uint32_t>(100 + r % 48) << 23 : bits;
}

TEST(Golden, ChecksumsOfFourteenMillionPatterns) {
  std::map<std::pair<std::string, std::uint64_t>, std::map<std::string, std::uint64_t>> expected;
  for (std::istringstream& line : golden_lines("checksum")) {
    std::string format, stream;
    std::uint64_t chunk, sum;
    ASSERT_TRUE(line >> format >> stream >> std::dec >> chunk >> std::hex >> sum);
    expected[{stream, chunk}][format] = sum;
  }
  ASSERT_EQ(expected.size(), 14u);
  for (const auto& [key, formats] : expected) {
    ASSERT_EQ(formats.size(), 4u);
    const bool focused = key.first == "focused";
    std::uint64_t e2m1 = 0, e4m3 = 0, bf = 0, fp = 0;
    for (std::uint64_t i = 0; i < kChunk; ++i) {
      const float x = oracle::float_from_bits(stream_bits(focused, key.second * kChunk + i));
      const std::uint64_t place = i << 16;
      e2m1 += oracle::mix(place | encode_e2m1(x));
      e4m3 += oracle::mix(place | encode_e4m3(x));
      bf += oracle::mix(place | to_bf16(x).bits);
      fp += oracle::mix(place | to_fp16(x).bits);
    }
    EXPECT_EQ(e2m1, formats.at("e2m1")) << key.first << " " << key.second;
    EXPECT_EQ(e4m3, formats.at("e4m3")) << key.first << " " << key.second;
    EXPECT_EQ(bf, formats.at("bf16")) << key.first << " " << key.second;
    EXPECT_EQ(fp, formats.at("fp16")) << key.first << " " << key.second;
  }
}

}  // namespace
}  // namespace megamoe
