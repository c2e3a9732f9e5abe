#include "checkpoint/json.h"

#include <gtest/gtest.h>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

using testing::expect_error;

void expect_refused(std::string_view text, const std::string& part) {
  expect_error(ErrorCode::kInvalidFile, {"a.json", part}, [&] { parse_json(text, "a.json"); });
}

TEST(ParseJson, KeepsEveryKindOfValue) {
  const std::string text =
      R"( {"a": [1, -2, 2.5, "x", true, false, null, {}, []], "b": {"c": {"a": "\u00e9"}}} )";
  EXPECT_EQ(parse_json(text, "a.json"), nlohmann::json::parse(text));
  EXPECT_EQ(parse_json("7", "a.json"), nlohmann::json(7));
}

TEST(ParseJson, KeepsLargeIntegers) {
  EXPECT_EQ(parse_json("18446744073709551615", "a.json").get<std::uint64_t>(), 18446744073709551615u);
  EXPECT_EQ(parse_json("-9223372036854775808", "a.json").get<std::int64_t>(), INT64_MIN);
}

TEST(ParseJson, RefusesDuplicateKeysAtEveryLevel) {
  expect_refused(R"({"a": 1, "a": 1})", "\"a\" occurs twice");
  expect_refused(R"({"x": [{"b": 1, "\u0062": 2}]})", "\"b\" occurs twice");
  EXPECT_NO_THROW(parse_json(R"({"a": {"a": 1}, "b": {"a": 1}})", "a.json"));
}

TEST(ParseJson, RefusesDeepNestingAtOnce) {
  EXPECT_NO_THROW(parse_json(std::string(64, '[') + std::string(64, ']'), "a.json"));
  expect_refused(std::string(65, '[') + std::string(65, ']'), "deeper than 64");
  expect_refused(std::string(5'000'000, '['), "deeper than 64");
  std::string objects;
  for (int i = 0; i < 100'000; ++i) objects += "{\"a\":";
  expect_refused(objects, "deeper than 64");
}

TEST(ParseJson, RefusesBytesBehindTheValue) {
  expect_refused("{} x", "not valid JSON");
  expect_refused("{}{}", "not valid JSON");
  expect_refused(std::string_view("{}\0", 3), "zero byte at position 2");
  expect_refused(std::string_view("{}\0{}", 5), "zero byte");
}

TEST(ParseJson, RefusesWhatIsNotJson) {
  for (const char* text : {"", " ", "{", "[1,]", "{\"a\"}", "{a:1}", "'a'", "NaN", "Infinity", "1e999", "01",
                           "// x\n1", "\"\n\"", "\"\\ud800\"", "nul", "\xEF\xBB\xBF{}"}) {
    SCOPED_TRACE(text);
    expect_refused(text, "not valid JSON");
  }
}

TEST(ParseJson, RefusesInvalidUtf8) {
  for (const char* text : {"\"\xFF\"", "\"\xC3\"", "\"\xC0\x80\"", "\"\xED\xA0\x80\"", "\"\xF4\x90\x80\x80\"",
                           "{\"\xE9\": 1}", "\xFF"}) {
    expect_refused(text, "not valid JSON");
  }
}

TEST(ParseJson, KeepsTheMessageShort) {
  const std::string text = "[\"" + std::string(1'000'000, 'x');
  try {
    parse_json(text, "a.json");
    FAIL();
  } catch (const Error& error) {
    EXPECT_LT(std::string_view(error.what()).size(), 400u);
  }
}

TEST(Printable, StaysOnOneLineAndCutsBetweenCharacters) {
  EXPECT_EQ(printable("a\nb\x7F\tc"), "a?b??c");
  EXPECT_EQ(printable("abcdef", 3), "abc...");
  EXPECT_EQ(printable("ab\u00e9", 3), "ab...");
  EXPECT_EQ(printable("abc", 3), "abc");
}

}  // namespace
}  // namespace megamoe
