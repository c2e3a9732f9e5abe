// json_fields.h: typed access to the fields of JSON objects that nobody vouches for.
#pragma once

#include <cmath>
#include <cstdint>
#include <initializer_list>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/check.h"

namespace megamoe {

// A view of one object, or of several of which the first that has a field answers. A null field counts as
// absent; a field of the wrong kind is an Error that names file and field.
class JsonFields {
 public:
  JsonFields(std::string file, std::initializer_list<const nlohmann::json*> objects)
      : file_(std::move(file)), objects_(objects) {}

  const nlohmann::json* find(const char* key) const {
    for (const nlohmann::json* object : objects_) {
      if (object == nullptr || !object->is_object()) continue;
      const auto it = object->find(key);
      if (it != object->end() && !it->is_null()) return &*it;
    }
    return nullptr;
  }

  std::optional<std::int64_t> integer(std::initializer_list<const char*> keys, std::int64_t least,
                                      std::int64_t most = std::numeric_limits<std::int32_t>::max()) const {
    for (const char* key : keys) {
      const nlohmann::json* value = find(key);
      if (value == nullptr) continue;
      if (!value->is_number_integer()) wrong(key, "a whole number", *value);
      const bool fits =
          !value->is_number_unsigned() ||
          value->get<std::uint64_t>() <= static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max());
      const std::int64_t number =
          fits ? value->get<std::int64_t>() : std::numeric_limits<std::int64_t>::max();
      if (number < least || number > most) {
        fail(ErrorCode::kInvalidFile, "{}: \"{}\" must be from {} to {}, got {}", file_, key, least, most,
             shown(*value));
      }
      return number;
    }
    return std::nullopt;
  }

  std::optional<float> number(const char* key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_number()) wrong(key, "a number", *value);
    const auto number = value->get<double>();
    if (!(std::abs(number) <= static_cast<double>(std::numeric_limits<float>::max()))) {
      wrong(key, "a finite FP32 number", *value);
    }
    return static_cast<float>(number);
  }

  std::optional<bool> boolean(const char* key) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return std::nullopt;
    if (!value->is_boolean()) wrong(key, "true or false", *value);
    return value->get<bool>();
  }

  std::optional<std::string> text(std::initializer_list<const char*> keys) const {
    for (const char* key : keys) {
      const nlohmann::json* value = find(key);
      if (value == nullptr) continue;
      if (!value->is_string()) wrong(key, "a text", *value);
      return value->get<std::string>();
    }
    return std::nullopt;
  }

  const nlohmann::json* object(const char* key) const {
    const nlohmann::json* value = find(key);
    if (value != nullptr && !value->is_object()) wrong(key, "an object", *value);
    return value;
  }

  // Calls body(text) for each text of a list.
  template <class Body>
  void for_each_text(const char* key, Body body) const {
    const nlohmann::json* value = find(key);
    if (value == nullptr) return;
    if (!value->is_array()) wrong(key, "a list of texts", *value);
    for (const nlohmann::json& item : *value) {
      if (!item.is_string()) wrong(key, "a list of texts", *value);
      body(item.get_ref<const std::string&>());
    }
  }

  const std::string& file() const { return file_; }

  [[noreturn]] void wrong(const char* key, const char* expected, const nlohmann::json& value) const {
    fail(ErrorCode::kInvalidFile, "{}: \"{}\" must be {}, got {}", file_, key, expected, shown(value));
  }

 private:
  // At most 60 bytes of the value; a cut or broken character is replaced.
  static std::string shown(const nlohmann::json& value) {
    if (value.is_structured()) return value.is_array() ? "a list" : "an object";
    std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
    if (text.size() > 60) text = text.substr(0, 57) + "...";
    return text;
  }

  std::string file_;
  std::vector<const nlohmann::json*> objects_;
};

}  // namespace megamoe
