#include "checkpoint/safetensors.h"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

using testing::expect_error;
using testing::raw_safetensors;
using testing::safetensors_bytes;
using testing::TempDir;
using testing::tensor;

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors_header(std::as_bytes(std::span(file)), std::ssize(file), "m.safetensors");
}
void expect_refused(const std::string& file, const std::string& part) {
  expect_error(ErrorCode::kInvalidFile, {"m.safetensors", part}, [&] { parse(file); });
}
void expect_header_refused(const std::string& header, const std::string& part, std::size_t data_bytes = 0) {
  SCOPED_TRACE(header.substr(0, 200));
  expect_refused(raw_safetensors(header, std::string(data_bytes, 'x')), part);
}
// A header of one tensor "t".
std::string entry(const std::string& dtype, const std::string& shape, const std::string& offsets) {
  return R"({"t":{"dtype":")" + dtype + R"(","shape":)" + shape + R"(,"data_offsets":)" + offsets + "}}";
}
std::string with_length(std::uint64_t length, const std::string& rest) {
  std::string file(8, '\0');
  for (std::size_t i = 0; i < 8; ++i) file[i] = static_cast<char>(length >> (8 * i));
  return file + rest;
}

TEST(SafetensorsHeader, TensorsComeInFileOrderWithTheirPlaces) {
  const std::string header =
      R"({"b":{"dtype":"F32","shape":[],"data_offsets":[6,10]},"__metadata__":{"format":"pt"},)"
      R"("a":{"shape":[2,3],"data_offsets":[0,6],"dtype":"F8_E4M3"}})";
  const SafetensorsHeader parsed = parse(raw_safetensors(header, "0123456789"));
  ASSERT_EQ(parsed.tensors.size(), 2u);
  const std::int64_t start = 8 + std::ssize(header);
  const TensorInfo& a = parsed.tensors[0];
  EXPECT_EQ(a.name, "a");
  EXPECT_EQ(a.dtype, DType::kE4M3);
  EXPECT_EQ(a.shape, (std::vector<std::int64_t>{2, 3}));
  EXPECT_EQ(a.begin, start);
  EXPECT_EQ(a.end, start + 6);
  EXPECT_EQ(a.elements(), 6);
  EXPECT_EQ(describe(a), "F8_E4M3 [2, 3]");
  const TensorInfo& b = parsed.tensors[1];
  EXPECT_EQ(b.begin, start + 6);
  EXPECT_EQ(b.bytes(), 4);
  EXPECT_EQ(b.elements(), 1);
  EXPECT_TRUE(b.shape.empty());
  EXPECT_EQ(parsed.metadata, (std::map<std::string, std::string>{{"format", "pt"}}));
}

TEST(SafetensorsHeader, ReadsEveryDType) {
  for (int i = 0; i <= static_cast<int>(DType::kC64); ++i) {
    const auto dtype = static_cast<DType>(i);
    const std::size_t bytes = static_cast<std::size_t>(bits_of(dtype));  // 8 elements
    const std::string file = safetensors_bytes({{"t", dtype, {2, 4}, std::string(bytes, 'x')}});
    SCOPED_TRACE(std::string(to_string(dtype)));
    EXPECT_EQ(parse(file).tensors.at(0).dtype, dtype);
  }
}

TEST(SafetensorsHeader, RefusesBadLengthFields) {
  const std::string header = "{}";
  for (std::size_t n = 0; n < 8; ++n) expect_refused(std::string(n, '\0'), "at least 8 bytes");
  expect_refused(with_length(0, ""), "not valid JSON");
  expect_refused(with_length(0, header), "not valid JSON");
  expect_refused(with_length(1, header), "not valid JSON");
  expect_refused(with_length(7, header), "claims 7 bytes, but only 2 follow");
  expect_refused(with_length(3, header), "claims 3 bytes");
  for (const std::uint64_t huge : {std::uint64_t{1} << 63, ~std::uint64_t{0}, std::uint64_t{1} << 40}) {
    expect_refused(with_length(huge, header), "more than the limit");
  }
  expect_refused(with_length(std::uint64_t{kMaxHeaderBytes}, header), "only 2 follow");
  EXPECT_TRUE(parse(with_length(2, header)).tensors.empty());
}

TEST(SafetensorsHeader, RefusesAFileThatIsTooShortOrTooLong) {
  const std::string file = safetensors_bytes({tensor<std::uint8_t>("t", DType::kU8, {4}, {1, 2, 3, 4})});
  EXPECT_NO_THROW(parse(file));
  expect_refused(file.substr(0, file.size() - 1), "\"t\"");
  expect_refused(file + "x", "expected 4 bytes of data behind the header, got 5");
  for (std::size_t n = 0; n < file.size(); ++n) EXPECT_THROW(parse(file.substr(0, n)), Error) << n;
}

TEST(SafetensorsHeader, HeaderSizesAroundARoundLimitAreAllFine) {
  for (std::size_t size = 99'993; size <= 100'001; ++size) {
    std::string header = entry("U8", "[1]", "[0,1]");
    header.append(size - header.size(), ' ');
    EXPECT_EQ(parse(raw_safetensors(header, "x")).tensors.size(), 1u);
    // The same size without padding, in a long name.
    const std::string name(size - entry("U8", "[1]", "[0,1]").size() + 1, 'n');
    std::string named = entry("U8", "[1]", "[0,1]");
    named.replace(2, 1, name);
    ASSERT_EQ(named.size(), size);
    EXPECT_EQ(parse(raw_safetensors(named, "x")).tensors.at(0).name, name);
  }
}

TEST(SafetensorsHeader, SpacesMayStandBeforeAndBehind) {
  EXPECT_EQ(parse(raw_safetensors("  \n" + entry("U8", "[1]", "[0,1]") + "   ", "x")).tensors.size(), 1u);
  expect_refused(raw_safetensors(entry("U8", "[1]", "[0,1]") + std::string(3, '\0'), "x"), "zero byte");
}

TEST(SafetensorsHeader, RefusesBadOffsets) {
  expect_header_refused(entry("U8", "[2]", "[2,0]"), "run backwards", 2);
  expect_header_refused(entry("U8", "[2]", "[-2,0]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[-0,2]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[0,2.0]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[0,2e0]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[0,\"2\"]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[0,9223372036854775808]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[0,99999999999999999999999]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[0]"), "two whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[0,2,2]"), "two whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "[]"), "two whole numbers", 2);
  expect_header_refused(entry("U8", "[2]", "null"), "data_offsets to be an array", 2);
  expect_header_refused(entry("U8", "[2]", "[[0],2]"), "whole numbers", 2);
  expect_header_refused(entry("U8", "[9223372036854775807]", "[0,9223372036854775807]"), "64 bits", 2);
  expect_header_refused(entry("U8", "[1152921504606846975]", "[0,1152921504606846975]"), "only 2 bytes", 2);
  expect_header_refused(entry("U8", "[2]", "[9223372036854775805,9223372036854775807]"), "gap", 2);
}

TEST(SafetensorsHeader, RefusesGapsAndOverlaps) {
  const auto two = [](const std::string& first, const std::string& second) {
    return R"({"a":{"dtype":"U8","shape":[4],"data_offsets":)" + first +
           R"(},"b":{"dtype":"U8","shape":[4],"data_offsets":)" + second + "}}";
  };
  EXPECT_EQ(parse(raw_safetensors(two("[0,4]", "[4,8]"), "01234567")).tensors[0].name, "a");
  EXPECT_EQ(parse(raw_safetensors(two("[4,8]", "[0,4]"), "01234567")).tensors[0].name, "b");
  expect_header_refused(two("[0,4]", "[3,7]"), "within", 7);
  expect_header_refused(two("[0,4]", "[0,4]"), "within", 4);
  expect_header_refused(two("[0,4]", "[5,9]"), "gap", 9);
  expect_header_refused(two("[1,5]", "[5,9]"), "gap", 9);
}

TEST(SafetensorsHeader, RefusesBadShapes) {
  expect_header_refused(entry("U8", "[-1]", "[0,1]"), "shape to hold", 1);
  expect_header_refused(entry("U8", "[1.5]", "[0,1]"), "shape to hold", 1);
  expect_header_refused(entry("U8", "[18446744073709551615]", "[0,1]"), "shape to hold", 1);
  expect_header_refused(entry("U8", "[[1]]", "[0,1]"), "shape to hold", 1);
  expect_header_refused(entry("U8", "{}", "[0,1]"), "shape to be an array", 1);
  expect_header_refused(entry("U8", "1", "[0,1]"), "shape to be an array", 1);
  // 2^32 * 2^32 wraps around to 0, and 3 * 6148914691236517206 to 2.
  expect_header_refused(entry("U8", "[4294967296,4294967296]", "[0,0]"), "64 bits");
  expect_header_refused(entry("U8", "[3,6148914691236517206]", "[0,2]"), "64 bits", 2);
  expect_header_refused(entry("U8", "[4294967296,4294967296,0]", "[0,0]"), "64 bits");
  expect_header_refused(entry("F64", "[2305843009213693952]", "[0,0]"), "64 bits");
  expect_header_refused(entry("U8", "[3]", "[0,4]"), "expected 3 bytes of data", 4);
  expect_header_refused(entry("BF16", "[2]", "[0,2]"), "expected 4 bytes of data", 2);
}

TEST(SafetensorsHeader, PackedTypesMustFillWholeBytes) {
  EXPECT_NO_THROW(parse(raw_safetensors(entry("F4", "[3,2]", "[0,3]"), "012")));
  expect_header_refused(entry("F4", "[3]", "[0,2]"), "whole number of bytes", 2);
  expect_header_refused(entry("F4", "[3]", "[0,1]"), "whole number of bytes", 1);
  expect_header_refused(entry("F4", "[4]", "[0,4]"), "expected 2 bytes", 4);
  EXPECT_NO_THROW(parse(raw_safetensors(entry("F6_E2M3", "[4]", "[0,3]"), "012")));
  expect_header_refused(entry("F6_E3M2", "[3]", "[0,3]"), "whole number of bytes", 3);
  EXPECT_NO_THROW(parse(raw_safetensors(entry("F4", "[3,0]", "[0,0]"))));
}

TEST(SafetensorsHeader, RefusesBadEntries) {
  expect_header_refused(entry("F5", "[1]", "[0,1]"), "dtype \"F5\" is unknown", 1);
  expect_header_refused(entry("u8", "[1]", "[0,1]"), "unknown", 1);
  expect_header_refused(R"({"t":{"dtype":8,"shape":[1],"data_offsets":[0,1]}})", "dtype to be a string", 1);
  expect_header_refused(R"({"t":{"shape":[1],"data_offsets":[0,1]}})", "\"t\": expected a dtype", 1);
  expect_header_refused(R"({"t":{"dtype":"U8","data_offsets":[0,1]}})", "a shape", 1);
  expect_header_refused(R"({"t":{"dtype":"U8","shape":[1]}})", "data_offsets", 1);
  expect_header_refused(R"({"t":{"dtype":"U8","shape":[1],"data_offsets":[0,1],"x":{"y":1}}})",
                        "\"x\" is unknown", 1);
  expect_header_refused(R"({"t":{"dtype":"U8","dtype":"I8","shape":[1],"data_offsets":[0,1]}})",
                        "\"dtype\" occurs twice", 1);
  expect_header_refused(R"({"t":[]})", "object");
  expect_header_refused(R"({"t":null})", "object");
  expect_header_refused(R"({"t":{}})", "a dtype");
  expect_header_refused("[]", "object");
  expect_header_refused("3", "object");
  expect_header_refused("null", "object");
  expect_header_refused("\"x\"", "object");
  expect_header_refused("{}}", "not valid JSON");
  expect_header_refused("{\"\xFF\":1}", "not valid JSON");
}

TEST(SafetensorsHeader, RefusesDuplicateNames) {
  const std::string one = R"({"dtype":"U8","shape":[0],"data_offsets":[0,0]})";
  expect_header_refused(R"({"t":)" + one + R"(,"u":)" + one + R"(,"t":)" + one + "}", "\"t\" occurs twice");
  expect_header_refused(R"({"t":)" + one + R"(,"\u0074":)" + one + "}", "\"t\" occurs twice");
}

TEST(SafetensorsHeader, MetadataIsAnObjectOfStrings) {
  EXPECT_EQ(parse(raw_safetensors(R"({"__metadata__":{"a":"b","c":"d"}})")).metadata.size(), 2u);
  EXPECT_TRUE(parse(raw_safetensors(R"({"__metadata__":{}})")).tensors.empty());
  for (const char* value :
       {"1", "null", "[]", "\"a\"", R"({"a":1})", R"({"a":null})", R"({"a":{}})", R"({"a":["b"]})"}) {
    expect_header_refused(std::string(R"({"__metadata__":)") + value + "}", "object of strings");
  }
  expect_header_refused(R"({"__metadata__":{"a":"b","a":"b"}})", "\"a\" occurs twice");
  expect_header_refused(R"({"__metadata__":{},"__metadata__":{}})", "occurs twice");
  expect_refused(raw_safetensors(R"({"__metadata__":{}})", "x"), "expected 0 bytes of data");
}

TEST(SafetensorsHeader, EmptyTensorsMayShareAPlace) {
  const auto at = [](const std::string& offsets) {
    return R"({"dtype":"F32","shape":[3,0],"data_offsets":)" + offsets + "}";
  };
  const auto file = [&](const std::string& offsets) {
    return raw_safetensors(R"({"full":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"e":)" + at(offsets) +
                               R"(,"f":)" + at(offsets) + "}",
                           "xy");
  };
  EXPECT_EQ(parse(file("[0,0]")).tensors.size(), 3u);
  EXPECT_EQ(parse(file("[2,2]")).tensors.size(), 3u);
  expect_refused(file("[1,1]"), "within");
  expect_refused(file("[3,3]"), "gap");
}

TEST(SafetensorsHeader, DeepNestingIsRefused) {
  for (const char* open : {"{\"a\":[", "{\"a\":", "{\"a\":{\"shape\":["}) {
    std::string header;
    while (header.size() < 1'000'000) header += open;
    expect_refused(raw_safetensors(header), "\"a\"");
  }
}

TEST(SafetensorsHeader, ManyTensorsAreQuick) {
  std::string header = "{";
  constexpr int kTensors = 100'000;
  for (int i = 0; i < kTensors; ++i) {
    header += fmt::format(R"({}"layers.{}.weight":{{"dtype":"U8","shape":[1],"data_offsets":[{},{}]}})",
                          i == 0 ? "" : ",", i, i, i + 1);
  }
  header += "}";
  const std::string file = raw_safetensors(header, std::string(kTensors, 'x'));
  const auto start = std::chrono::steady_clock::now();
  EXPECT_EQ(parse(file).tensors.size(), static_cast<std::size_t>(kTensors));
  // About 0.1 s where nothing else runs; a quadratic step would take minutes.
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
}

TEST(SafetensorsHeader, MessagesStayOnOneLine) {
  expect_header_refused(R"({"a\nb":{"dtype":"U8","shape":[1],"data_offsets":[0,2]}})", "a?b", 2);
}

TEST(SafetensorsFile, GivesEachTensorsBytes) {
  TempDir dir;
  testing::write_safetensors(dir / "m.safetensors", {tensor<float>("f", DType::kF32, {2}, {1.5f, -2.0f}),
                                                     tensor<std::uint8_t>("u", DType::kU8, {3}, {7, 8, 9})});
  const SafetensorsFile file = SafetensorsFile::open(dir / "m.safetensors");
  ASSERT_EQ(file.tensors().size(), 2u);
  float values[2];
  ASSERT_EQ(file.bytes(file.tensors()[0]).size(), sizeof(values));
  std::memcpy(values, file.bytes(file.tensors()[0]).data(), sizeof(values));
  EXPECT_EQ(values[0], 1.5f);
  EXPECT_EQ(values[1], -2.0f);
  EXPECT_EQ(file.bytes(file.tensors()[1])[2], std::byte{9});
}

TEST(SafetensorsFile, RefusesWhatIsNotAFile) {
  TempDir dir;
  testing::write_bytes(dir / "empty.safetensors", "");
  expect_error(ErrorCode::kInvalidFile, {"empty.safetensors", "at least 8 bytes"},
               [&] { SafetensorsFile::open(dir / "empty.safetensors"); });
  expect_error(ErrorCode::kInvalidArgument, {"directory"}, [&] { SafetensorsFile::open(dir.path()); });
  expect_error(ErrorCode::kNoFile, {"absent"}, [&] { SafetensorsFile::open(dir / "absent"); });
}

}  // namespace
}  // namespace megamoe
