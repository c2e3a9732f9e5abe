// backends.h: the backends of this build, and the choice among them.
#pragma once

#include <functional>
#include <string_view>
#include <vector>

#include "backend/backend.h"

namespace megamoe {

// Best first; `ref` is last.
const std::vector<const Backend*>& all_backends();

// By name. "" and "auto" give the one that MEGAMOE_BACKEND names, or else the first that is supported and
// that `fits`, or if none fits the first that is supported. Throws kNotFound that lists the names, or
// kUnsupported that says what the backend needs.
const Backend& find_backend(std::string_view name, const std::function<bool(const Backend&)>& fits = {});

}  // namespace megamoe
