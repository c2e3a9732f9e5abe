#include "checkpoint/json.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "base/check.h"

namespace megamoe {
namespace {

using nlohmann::json;

// Builds the tree without recursion; nlohmann's own builder lets the last of two equal keys win.
class TreeBuilder final : public JsonEvents {
 public:
  TreeBuilder(const std::string& name, int max_depth) : JsonEvents(name), max_depth_(max_depth) {}
  json take() { return std::move(root_); }

 private:
  bool null() override { return add(nullptr); }
  bool boolean(bool value) override { return add(value); }
  bool number_integer(number_integer_t value) override { return add(value); }
  bool number_unsigned(number_unsigned_t value) override { return add(value); }
  bool number_float(number_float_t value, const string_t&) override { return add(value); }
  bool string(string_t& value) override { return add(std::move(value)); }
  bool start_object(std::size_t) override { return open(json::value_t::object); }
  bool start_array(std::size_t) override { return open(json::value_t::array); }
  bool end_object() override { return close(); }
  bool end_array() override { return close(); }

  bool key(string_t& key) override {
    const auto [entry, is_new] = open_.back()->get_ref<json::object_t&>().emplace(key, nullptr);
    if (!is_new) fail(ErrorCode::kInvalidFile, "{}: the key \"{}\" occurs twice", name(), printable(key));
    slot_ = &entry->second;
    return true;
  }

  json* place(json value) {
    if (open_.empty()) {
      root_ = std::move(value);
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->push_back(std::move(value));
      return &open_.back()->back();
    }
    *slot_ = std::move(value);
    return slot_;
  }
  bool add(json value) {
    place(std::move(value));
    return true;
  }
  bool open(json::value_t type) {
    if (open_.size() >= static_cast<std::size_t>(max_depth_)) {
      fail(ErrorCode::kInvalidFile, "{}: the JSON nests deeper than {} levels", name(), max_depth_);
    }
    open_.push_back(place(json(type)));
    return true;
  }
  bool close() {
    open_.pop_back();
    return true;
  }

  int max_depth_;
  json root_;
  std::vector<json*> open_;  // the arrays and objects around the current place
  json* slot_ = nullptr;     // the value of the key just read
};

}  // namespace

json parse_json(std::string_view text, const std::string& name, int max_depth) {
  TreeBuilder builder(name, max_depth);
  builder.parse(text);
  return builder.take();
}

std::string printable(std::string_view text, std::size_t max_bytes) {
  std::string result(text.substr(0, max_bytes));
  // Do not end within a UTF-8 sequence: drop its tail, then its head.
  if (text.size() > max_bytes) {
    while (!result.empty() && (result.back() & 0xC0) == 0x80) result.pop_back();
    if (!result.empty() && (result.back() & 0x80) != 0) result.pop_back();
  }
  for (char& c : result) {
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) c = '?';
  }
  if (text.size() > max_bytes) result += "...";
  return result;
}

void JsonEvents::parse(std::string_view text) {
  // The parser takes a zero byte for the end of the text and skips a byte order mark.
  if (const std::size_t zero = text.find('\0'); zero != std::string_view::npos) {
    fail(ErrorCode::kInvalidFile, "{}: not valid JSON: a zero byte at position {}", name_, zero);
  }
  if (text.starts_with("\xEF\xBB\xBF")) {
    fail(ErrorCode::kInvalidFile, "{}: not valid JSON: it starts with a byte order mark", name_);
  }
  json::sax_parse(text.begin(), text.end(), static_cast<nlohmann::json_sax<json>*>(this));
}

bool JsonEvents::parse_error(std::size_t position, const std::string&,
                             const nlohmann::detail::exception& error) {
  // "[json.exception.parse_error.101] parse error at line 1, column 2: what is wrong; last read: '...'"
  std::string_view reason = error.what();
  reason.remove_prefix(std::min(reason.find("] ") + 2, reason.size()));
  if (const std::size_t colon = reason.find(": "); colon != std::string_view::npos) {
    reason.remove_prefix(colon + 2);
  }
  reason = reason.substr(0, reason.find("; last read"));
  std::string text = printable(reason);
  for (char& c : text) {
    if ((c & 0x80) != 0) c = '?';  // may quote the very bytes that are not UTF-8
  }
  fail(ErrorCode::kInvalidFile, "{}: not valid JSON at byte {}: {}", name_, position, text);
}

bool JsonEvents::binary(binary_t&) {
  fail(ErrorCode::kInternal, "{}: JSON text cannot hold a binary value", name_);
}

}  // namespace megamoe
