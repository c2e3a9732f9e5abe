// name_patterns.cc: matching of module names.
#include "checkpoint/name_patterns.h"

namespace megamoe {
namespace {

constexpr std::string_view kRegexMark = "re:";

// Without leading "model." and "language_model.": the wrappers differ between a model and its config.
std::string_view without_wrappers(std::string_view name) {
  for (bool again = true; again;) {
    again = false;
    for (std::string_view wrapper : {"model.", "language_model."}) {
      if (name.starts_with(wrapper) && name.size() > wrapper.size() && name[wrapper.size()] != '*') {
        name.remove_prefix(wrapper.size());
        again = true;
      }
    }
  }
  return name;
}

}  // namespace

bool glob_matches(std::string_view glob, std::string_view text) {
  // On a mismatch the last `*` takes one character more; earlier ones never need to.
  std::size_t g = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (g < glob.size() && glob[g] == '*') {
      star = g++;
      resume = t;
    } else if (g < glob.size() && glob[g] == text[t]) {
      ++g;
      ++t;
    } else if (star != std::string_view::npos) {
      g = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (g < glob.size() && glob[g] == '*') ++g;
  return g == glob.size();
}

void NamePatterns::add(std::string_view pattern) {
  if (pattern.starts_with(kRegexMark)) {
    auto regex = SafeRegex::compile(pattern.substr(kRegexMark.size()));
    if (regex) {
      regexes_.push_back(std::move(regex));
    } else {
      opaque_ = true;
    }
  } else if (pattern.find('*') != std::string_view::npos) {
    const std::string& glob = globs_.emplace_back(without_wrappers(pattern));
    if (!glob.ends_with('*')) globs_.push_back(glob + ".*");
  } else if (!pattern.empty()) {
    exact_.emplace(without_wrappers(pattern));
  }
}

NamePatterns::Match NamePatterns::match(std::string_view module) const {
  const std::string_view name = without_wrappers(module);
  // The name itself, then what it lies in.
  for (std::string_view part = name; !exact_.empty();) {
    if (exact_.contains(std::string(part))) return Match::kYes;
    const std::size_t dot = part.rfind('.');
    if (dot == std::string_view::npos) break;
    part = part.substr(0, dot);
  }
  for (const std::string& glob : globs_) {
    if (glob_matches(glob, name) || glob_matches(glob, module)) return Match::kYes;
  }
  for (const auto& regex : regexes_) {
    if (regex->matches(module)) return Match::kYes;
  }
  return opaque_ ? Match::kUnknown : Match::kNo;
}

}  // namespace megamoe
