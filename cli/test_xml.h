// test_xml.h: whether an image is XML that any viewer takes.
#pragma once

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace megamoe::testing {

// Elements in the order in which they begin, and the text outside of tags.
struct Xml {
  struct Element {
    std::string name;
    std::map<std::string, std::string> attributes;
  };
  std::vector<Element> elements;
  std::string text;

  std::int64_t count(std::string_view name) const {
    return std::count_if(elements.begin(), elements.end(), [&](const Element& e) { return e.name == name; });
  }
};

// Throws std::runtime_error where tags do not nest, attributes are not quoted or occur twice, or a character
// is not escaped. Knows no comments, declarations or CDATA.
inline Xml parse_xml(std::string_view in) {
  Xml out;
  std::vector<std::string> open;
  std::size_t at = 0;
  const auto check = [&](bool good, const std::string& what) {
    if (!good) throw std::runtime_error(what + " at character " + std::to_string(at));
  };
  const auto skip_space = [&] {
    while (at < in.size() && std::isspace(static_cast<unsigned char>(in[at])) != 0) ++at;
  };
  const auto name = [&] {
    const std::size_t begin = at;
    while (at < in.size() && (std::isalnum(static_cast<unsigned char>(in[at])) != 0 || in[at] == '-')) ++at;
    check(at > begin, "no name");
    return std::string(in.substr(begin, at - begin));
  };
  // One character or entity of text or of an attribute's value.
  const auto character = [&] {
    const auto c = static_cast<unsigned char>(in[at]);
    check(c != '<' && (c >= 0x20 || c == '\n'), "a character that must be escaped");
    if (c != '&') return ++at, static_cast<char>(c);
    for (const auto& [entity, value] :
         std::map<std::string_view, char>{{"&lt;", '<'}, {"&gt;", '>'}, {"&amp;", '&'}, {"&quot;", '"'}}) {
      if (in.substr(at).starts_with(entity)) return at += entity.size(), value;
    }
    check(false, "an unknown entity");
    return '\0';
  };
  while (at < in.size()) {
    if (in[at] != '<') {
      out.text += character();
      check(!open.empty() || out.text.back() == '\n', "text outside of the root");
      continue;
    }
    ++at;
    if (at < in.size() && in[at] == '/') {
      ++at;
      check(!open.empty() && name() == open.back(), "a tag that closes another one");
      open.pop_back();
      check(at < in.size() && in[at] == '>', "an unfinished tag");
      ++at;
      continue;
    }
    check(!open.empty() || out.elements.empty(), "a second root");
    Xml::Element element{name(), {}};
    for (skip_space(); at < in.size() && in[at] != '>' && in[at] != '/'; skip_space()) {
      const std::string attribute = name();
      check(in.substr(at).starts_with("=\""), "a value without quotes");
      at += 2;
      std::string value;
      while (at < in.size() && in[at] != '"') value += character();
      check(at < in.size(), "an unfinished value");
      ++at;
      check(element.attributes.emplace(attribute, value).second, "a second " + attribute);
    }
    const bool empty = at < in.size() && in[at] == '/';
    if (empty) ++at;
    check(at < in.size() && in[at] == '>', "an unfinished tag");
    ++at;
    if (!empty) open.push_back(element.name);
    out.elements.push_back(std::move(element));
  }
  check(open.empty() && !out.elements.empty(), "an unclosed element");
  return out;
}

}  // namespace megamoe::testing
