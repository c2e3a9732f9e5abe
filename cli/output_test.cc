#include "cli/output.h"

#include <gtest/gtest.h>

namespace megamoe::cli {
namespace {

TEST(Table, AlignsColumnsAndCutsTrailingSpaces) {
  Table table({"name", ">size", "note"});
  table.add({"a", "7", ""});
  table.add({"longer", "12345", "\xC3\xA4x"});  // two columns, three bytes
  EXPECT_EQ(table.text(1),
            " name     size  note\n"
            " a           7\n"
            " longer  12345  \xC3\xA4x\n");
}

TEST(Table, KeepsNamesFromFilesOnTheirLine) {
  Table table({"name"});
  table.add({"a\nb\x1b[31m"});
  EXPECT_EQ(table.text(), "name\na\\nb\\x1b[31m\n");
}

TEST(Human, Bytes) {
  EXPECT_EQ(human_bytes(0), "0 B");
  EXPECT_EQ(human_bytes(1023), "1023 B");
  EXPECT_EQ(human_bytes(1024), "1.00 KiB");
  EXPECT_EQ(human_bytes(10239), "10.0 KiB");
  EXPECT_EQ(human_bytes(1024 * 1000), "0.98 MiB");
  EXPECT_EQ(human_bytes(7372792), "7.03 MiB");
  EXPECT_EQ(human_bytes(INT64_MAX), "8.00 EiB");
}

TEST(Human, Seconds) {
  EXPECT_EQ(human_seconds(3.21e-6), "3.2 us");
  EXPECT_EQ(human_seconds(0.0415), "41.50 ms");
  EXPECT_EQ(human_seconds(12.04), "12.0 s");
  EXPECT_EQ(human_seconds(3723), "1:02:03");
  EXPECT_EQ(human_seconds(123), "2:03");
}

TEST(Human, Counts) {
  EXPECT_EQ(human_count(0), "0");
  EXPECT_EQ(human_count(999), "999");
  EXPECT_EQ(human_count(1000), "1,000");
  EXPECT_EQ(human_count(-123456), "-123,456");
  EXPECT_EQ(human_count(1234567), "1,234,567");
}

TEST(Markup, EscapesWhatXmlReads) {
  EXPECT_EQ(escape_markup("a<b> & \"c\"\n\x01'"), "a&lt;b&gt; &amp; &quot;c&quot;  '");
}

TEST(ProgressLine, SaysShareRateAndTimeLeft) {
  const Progress half{50 << 20, 100 << 20, "w"};
  EXPECT_EQ(progress_line("quantize", half, 10, 200),
            "quantize  50% [##########          ] 50.0 MiB of 100 MiB  5.00 MiB/s  0:10 left  w");
  EXPECT_EQ(progress_line("quantize", half, 10, 12), "quantize  50");
}

TEST(ProgressLine, HasNoRateBeforeAnythingIsDone) {
  EXPECT_EQ(progress_line("x", {0, 0, ""}, 0, 200), "x   0% [                    ] 0 B of 0 B");
}

}  // namespace
}  // namespace megamoe::cli
