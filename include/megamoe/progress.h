// progress.h: how long-running calls tell where they are; the library itself never prints.
#pragma once

#include <cstdint>
#include <functional>
#include <string_view>

namespace megamoe {

struct Progress {
  std::int64_t done_bytes;
  std::int64_t total_bytes;
  std::string_view item;  // what is being worked on: a tensor's or a file's name
};

// Called from the calling thread, often; keep it cheap. An empty function means no reports.
using ProgressFn = std::function<void(const Progress&)>;

}  // namespace megamoe
