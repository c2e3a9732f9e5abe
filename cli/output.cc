#include "cli/output.h"

#include <fmt/format.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/check.h"

namespace megamoe::cli {
namespace {

// Columns that UTF-8 text takes, one for each code point.
std::size_t width_of(std::string_view text) {
  return static_cast<std::size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; }));
}

std::string clock_text(double seconds) {
  const auto total = static_cast<std::int64_t>(std::llround(seconds));
  const std::int64_t h = total / 3600, m = total / 60 % 60, s = total % 60;
  return h > 0 ? fmt::format("{}:{:02}:{:02}", h, m, s) : fmt::format("{}:{:02}", m, s);
}

}  // namespace

Table::Table(std::vector<std::string> headings) : headings_(std::move(headings)) {
  for (std::string& heading : headings_) {
    right_.push_back(heading.starts_with('>'));
    if (right_.back()) heading.erase(0, 1);
  }
}

void Table::add(std::vector<std::string> cells) {
  MEGAMOE_CHECK(cells.size() == headings_.size());
  for (std::string& cell : cells) cell = one_line(cell);
  rows_.push_back(std::move(cells));
}

std::string Table::text(int indent) const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < headings_.size(); ++c) {
    std::size_t width = width_of(headings_[c]);
    for (const auto& row : rows_) width = std::max(width, width_of(row[c]));
    widths.push_back(width);
  }
  std::string out;
  const auto line = [&](const std::vector<std::string>& cells) {
    std::string text(static_cast<std::size_t>(indent), ' ');
    for (std::size_t c = 0; c < cells.size(); ++c) {
      const std::string padding(widths[c] - width_of(cells[c]), ' ');
      text += c > 0 ? "  " : "";
      text += right_[c] ? padding + cells[c] : cells[c] + padding;
    }
    text.erase(text.find_last_not_of(' ') + 1);
    out += text + "\n";
  };
  line(headings_);
  for (const auto& row : rows_) line(row);
  return out;
}

std::string human_bytes(std::int64_t bytes) {
  constexpr std::array kUnits = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  if (bytes < 1024) return fmt::format("{} B", bytes);
  double value = static_cast<double>(bytes) / 1024;
  std::size_t unit = 0;
  // 1023.95 would print as "1024.0": move on a little before 1024
  while (value >= 999.95 && unit + 1 < kUnits.size()) value /= 1024, ++unit;
  return fmt::format("{:.{}f} {}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0, kUnits[unit]);
}

std::string human_seconds(double seconds) {
  if (seconds < 999.5e-6) return fmt::format("{:.1f} us", seconds * 1e6);
  if (seconds < 0.9995) return fmt::format("{:.2f} ms", seconds * 1e3);
  if (seconds < 99.95) return fmt::format("{:.1f} s", seconds);
  return clock_text(seconds);
}

std::string human_count(std::int64_t count) {
  std::string text = fmt::format("{}", count);
  const std::ptrdiff_t first = count < 0 ? 1 : 0;
  for (auto at = static_cast<std::ptrdiff_t>(text.size()) - 3; at > first; at -= 3) {
    text.insert(static_cast<std::size_t>(at), 1, ',');
  }
  return text;
}

std::string one_line(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const auto byte = static_cast<unsigned char>(c);
    if (c == '\n') {
      out += "\\n";
    } else if (byte < 0x20 || byte == 0x7F) {
      out += fmt::format("\\x{:02x}", byte);
    } else {
      out += c;
    }
  }
  return out;
}

std::string escape_markup(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '<': out += "&lt;"; break;
      case '>': out += "&gt;"; break;
      case '&': out += "&amp;"; break;
      case '"': out += "&quot;"; break;
      default: out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

void print(std::string_view text) {
  errno = 0;
  const bool written =
      std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0;
  if (!written && errno != EPIPE) {
    fail(ErrorCode::kIo, "cannot write to standard output: {}", std::strerror(errno));
  }
}

void print_error(const std::string& text) { std::fputs(text.c_str(), stderr); }

void print_json(const nlohmann::json& value) {
  print(value.dump(2, ' ', false, nlohmann::json::error_handler_t::replace) + "\n");
}

std::string progress_line(std::string_view what, const Progress& progress, double seconds, int width) {
  const double total = static_cast<double>(std::max<std::int64_t>(progress.total_bytes, 1));
  const double share = std::clamp(static_cast<double>(progress.done_bytes) / total, 0.0, 1.0);
  const double rate = seconds > 0 ? static_cast<double>(progress.done_bytes) / seconds : 0;
  const int filled = static_cast<int>(share * 20);
  std::string text = fmt::format("{} {:3.0f}% [{:<20}] {} of {}", what, std::floor(share * 100),
                                 std::string(static_cast<std::size_t>(filled), '#'),
                                 human_bytes(progress.done_bytes), human_bytes(progress.total_bytes));
  if (rate > 0) {
    const double left = static_cast<double>(progress.total_bytes - progress.done_bytes) / rate;
    text += fmt::format("  {}/s  {} left", human_bytes(static_cast<std::int64_t>(rate)),
                        clock_text(std::max(left, 0.0)));
  }
  if (!progress.item.empty()) text += fmt::format("  {}", one_line(progress.item));
  if (text.size() > static_cast<std::size_t>(width)) text.resize(static_cast<std::size_t>(width));
  return text;
}

struct ProgressBar::State {
  using Clock = std::chrono::steady_clock;
  std::string what;
  bool terminal;
  Clock::time_point start = Clock::now();
  Clock::time_point last = {};
  std::int64_t first_bytes = -1;  // what an earlier run had done; not part of this run's rate

  void report(Progress progress) {
    const auto now = Clock::now();
    if (first_bytes < 0) first_bytes = progress.done_bytes;
    if (now - last < std::chrono::milliseconds(terminal ? 100 : 2000)) return;
    last = now;
    int width = 1000;
    if (winsize size{}; terminal) {
      width = ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 1 ? size.ws_col - 1 : 79;
    }
    progress.done_bytes -= first_bytes;
    progress.total_bytes -= first_bytes;
    const std::string text =
        progress_line(what, progress, std::chrono::duration<double>(now - start).count(), width);
    print_error(terminal ? "\r\x1b[K" + text : text + "\n");
  }
};

ProgressBar::ProgressBar(std::string_view what, bool forced) {
  const bool terminal = isatty(STDERR_FILENO) == 1;
  if (terminal || forced) state_ = std::make_unique<State>(State{std::string(what), terminal});
}

ProgressBar::~ProgressBar() {
  if (state_ && state_->terminal) print_error("\r\x1b[K");
}

ProgressFn ProgressBar::fn() {
  if (!state_) return {};
  return [state = state_.get()](const Progress& progress) { state->report(progress); };
}

}  // namespace megamoe::cli
