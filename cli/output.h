// output.h: how results look: aligned tables, sizes and times for people, JSON, a progress bar.
#pragma once

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "megamoe/progress.h"

namespace megamoe::cli {

// Columns as wide as their widest cell, two spaces apart; a heading that starts with '>' aligns right.
class Table {
 public:
  explicit Table(std::vector<std::string> headings);
  void add(std::vector<std::string> cells);  // as many as there are headings
  std::string text(int indent = 0) const;    // ends in a newline
  bool empty() const { return rows_.empty(); }

 private:
  std::vector<std::string> headings_;
  std::vector<bool> right_;
  std::vector<std::vector<std::string>> rows_;
};

std::string human_bytes(std::int64_t bytes);  // "912 B", "7.03 MiB"
std::string human_seconds(double seconds);    // "3.2 us", "41.5 ms", "12.0 s", "1:02:03"
std::string human_count(std::int64_t count);  // "1,234,567"

// `text` with control characters escaped: a name from a file stays on its line.
std::string one_line(std::string_view text);

// `text` as it stands in XML or HTML, between tags or quotes. Control characters, which XML cannot hold,
// become spaces.
std::string escape_markup(std::string_view text);

// Writes to stdout and flushes. A reader that went away is no error; any other failure is kIo.
void print(std::string_view text);
// On stderr; one that is closed or full changes nothing.
void print_error(const std::string& text);
// One object, indented, with a newline. Numbers that are not finite become null.
void print_json(const nlohmann::json& value);

// A bar on stderr: share, amount, rate, time left, item. Silent unless stderr is a terminal or `forced`;
// forced without a terminal it writes a line every two seconds. Leaves no trace on a terminal when it ends.
class ProgressBar {
 public:
  ProgressBar(std::string_view what, bool forced);
  ~ProgressBar();
  ProgressBar(const ProgressBar&) = delete;
  ProgressBar& operator=(const ProgressBar&) = delete;
  ProgressFn fn();  // valid as long as the bar; empty where it is silent

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// The text of the bar, `width` columns at most: apart from the clock so that it can be tested.
std::string progress_line(std::string_view what, const Progress& progress, double seconds, int width);

}  // namespace megamoe::cli
