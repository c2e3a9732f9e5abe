// hopper_backend.h: the backend "hopper".
//
// NOTE: through this interface operands are host memory: each operation copies them to the GPU and its result
// back. It is what the conformance suite and whoever listens to a pass's stages use; a pass that stays on the
// GPU is hopper_pass.h.
#pragma once

#include "backend/backend.h"

namespace megamoe {

const Backend& hopper_backend();

}  // namespace megamoe
