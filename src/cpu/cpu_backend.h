// cpu_backend.h: the backend for every CPU: threaded, portable vectors of 16 bytes.
#pragma once

#include "backend/backend.h"

namespace megamoe {

const Backend& cpu_backend();

}  // namespace megamoe
