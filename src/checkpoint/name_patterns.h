// name_patterns.h: lists of module names, globs and regular expressions, as quantisation configs have them.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <unordered_set>
#include <vector>

namespace megamoe {

// A regular expression that runs in time pattern x text, whatever the pattern: literals, `.`, classes,
// escapes, groups, alternatives, repetition and anchors. It matches like Python's re.match: from the start
// of the text, not necessarily to its end.
class SafeRegex {
 public:
  // Null where the pattern is malformed, too large or uses anything else (look-ahead, back references).
  static std::shared_ptr<const SafeRegex> compile(std::string_view pattern);
  bool matches(std::string_view text) const;
  ~SafeRegex();

 private:
  struct Program;
  SafeRegex() = default;
  std::unique_ptr<Program> program_;
};

// Whether `text` as a whole fits `glob`, in which `*` stands for any characters, dots included.
bool glob_matches(std::string_view glob, std::string_view text);

class NamePatterns {
 public:
  enum class Match { kNo, kYes, kUnknown };  // kUnknown: a pattern that SafeRegex cannot judge

  // "re:..." is a regular expression, anything with `*` a glob, the rest a name.
  void add(std::string_view pattern);
  bool empty() const { return exact_.empty() && globs_.empty() && regexes_.empty() && !opaque_; }
  // Names and globs also match what lies below them ("a.b" matches "a.b.c"), and a leading "model." or
  // "language_model." on either side does not count.
  Match match(std::string_view module) const;
  // Makes match() answer kUnknown where it would say kNo.
  void set_opaque() { opaque_ = true; }

 private:
  std::unordered_set<std::string> exact_;
  std::vector<std::string> globs_;
  std::vector<std::shared_ptr<const SafeRegex>> regexes_;
  bool opaque_ = false;
};

}  // namespace megamoe
