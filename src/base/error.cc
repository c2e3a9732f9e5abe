#include "megamoe/error.h"

namespace megamoe {

std::string_view to_string(ErrorCode code) {
  switch (code) {
    case ErrorCode::kInvalidArgument: return "invalid argument";
    case ErrorCode::kNoFile: return "no such file";
    case ErrorCode::kNotFound: return "not found";
    case ErrorCode::kInvalidFile: return "invalid file";
    case ErrorCode::kUnsupported: return "unsupported";
    case ErrorCode::kIo: return "input/output";
    case ErrorCode::kOutOfMemory: return "out of memory";
    case ErrorCode::kInternal: return "internal";
  }
  return "unknown";
}

}  // namespace megamoe
