// ref_backend.h: the reference: scalar code that follows the definitions step by step. The others answer to
// it.
#pragma once

#include "backend/backend.h"

namespace megamoe {

const Backend& ref_backend();

}  // namespace megamoe
