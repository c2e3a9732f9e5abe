// error.h: the one exception type of the library.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace megamoe {

enum class ErrorCode {
  kInvalidArgument,  // a value, shape, id or flag the caller gave is wrong
  kNoFile,           // a file or directory that was named, or what it should hold, does not exist
  kNotFound,         // a tensor, layer or backend that was named does not exist
  kInvalidFile,      // a file's content breaks its format or contradicts itself
  kUnsupported,      // valid, but not something this build, backend or version can do
  kIo,               // the operating system refused to read or write
  kOutOfMemory,      // a size overflows 64 bits or the memory is not there
  kInternal,         // a bug of this library
};

// "invalid argument", "not found", ...: a few plain words for each code.
std::string_view to_string(ErrorCode code);

// Everything the library throws. `what()` is one sentence that says what was expected and what came.
class Error : public std::runtime_error {
 public:
  Error(ErrorCode code, const std::string& message) : std::runtime_error(message), code_(code) {}
  ErrorCode code() const { return code_; }

 private:
  ErrorCode code_;
};

}  // namespace megamoe
