// json.h: JSON from files that nobody vouches for.
#pragma once

#include <cstddef>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace megamoe {

// Parses `text`; refuses duplicate keys, nesting beyond `max_depth`, bytes after the value and invalid UTF-8.
// `name` is the file, for messages. Throws kInvalidFile.
nlohmann::json parse_json(std::string_view text, const std::string& name, int max_depth = 64);

// Text of a file as it may stand in a one-line message: control characters become '?', long text is cut.
std::string printable(std::string_view text, std::size_t max_bytes = 200);

// Receives the pieces of a JSON text one by one, for texts too large to hold as a tree. A callback refuses
// what it gets by throwing; a syntax error throws kInvalidFile.
class JsonEvents : public nlohmann::json_sax<nlohmann::json> {
 public:
  explicit JsonEvents(std::string name) : name_(std::move(name)) {}
  void parse(std::string_view text);
  const std::string& name() const { return name_; }

 private:
  bool parse_error(std::size_t position, const std::string& token,
                   const nlohmann::detail::exception& error) final;
  bool binary(binary_t& value) final;

  std::string name_;
};

}  // namespace megamoe
