// json.h: JSON from files that nobody vouches for.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>

namespace megamoe {

// Parses `text`; refuses duplicate keys, nesting beyond `max_depth`, bytes after the value and invalid UTF-8.
// `name` is the file, for messages. Throws kInvalidFile.
nlohmann::json parse_json(std::string_view text, const std::string& name, int max_depth = 64);

}  // namespace megamoe
