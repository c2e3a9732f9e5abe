// memory.h: how much memory is left, and how large the caches are.
#pragma once

#include <cstdint>

namespace megamoe {

// Bytes this process can take before the system or its cgroup runs out; the largest number where neither
// says.
std::int64_t available_memory();

// Bytes of the machine's last-level caches together (32 MiB where the system does not say): data that was
// read that much ago may still be in one.
std::int64_t last_level_cache();

}  // namespace megamoe
