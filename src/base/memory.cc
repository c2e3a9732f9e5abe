#include "base/memory.h"

#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <string>
#include <tuple>

#include "base/cgroup.h"

namespace megamoe {
namespace {

constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

// The number after `key` in a file of "key number" lines, or -1.
std::int64_t number_after(const std::string& path, const std::string& key) {
  std::ifstream file(path);
  for (std::string word; file >> word;) {
    std::int64_t value = 0;
    if (word == key && file >> value) return value;
  }
  return -1;
}

std::int64_t number_in(const std::string& path) {
  std::ifstream file(path);
  std::int64_t value = 0;
  return file >> value ? value : -1;
}

// What cgroups' limits leave. Cached file pages count as used there, but give way.
std::int64_t cgroup_memory() {
  std::int64_t least = kUnlimited;
  for (const std::filesystem::path& folder : cgroup_folders("memory")) {
    for (const auto& [limit_file, usage_file, cached] :
         {std::tuple{"memory.max", "memory.current", "inactive_file"},
          std::tuple{"memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"}}) {
      const std::int64_t limit = number_in(folder / limit_file), used = number_in(folder / usage_file);
      if (limit < 0 || used < 0) continue;
      const std::int64_t gives_way = std::max<std::int64_t>(0, number_after(folder / "memory.stat", cached));
      least = std::min(least, std::max<std::int64_t>(0, limit - used + gives_way));
    }
  }
  return least;
}

// "32768K" in bytes, or 0.
std::int64_t cache_size(const std::filesystem::path& path) {
  std::ifstream file(path);
  std::int64_t size = 0;
  char unit = 0;
  if (!(file >> size)) return 0;
  file >> unit;
  return unit == 'K' ? size << 10 : unit == 'M' ? size << 20 : size;
}

}  // namespace

std::int64_t available_memory() {
  const std::int64_t kib = number_after("/proc/meminfo", "MemAvailable:");
  return std::min(kib < 0 ? kUnlimited : kib << 10, cgroup_memory());
}

std::int64_t last_level_cache() {
  namespace fs = std::filesystem;
  std::int64_t level = 0, bytes = 0;
  std::set<std::string> seen;  // the CPUs that share a cache of this level
  for (int cpu = 0; cpu < sysconf(_SC_NPROCESSORS_CONF); ++cpu) {
    for (int index = 0;; ++index) {
      const fs::path cache = fs::path("/sys/devices/system/cpu") / ("cpu" + std::to_string(cpu)) / "cache" /
                             ("index" + std::to_string(index));
      const std::int64_t own_level = number_in(cache / "level");
      if (own_level < 0) break;
      if (own_level < level) continue;
      if (own_level > level) level = own_level, bytes = 0, seen.clear();
      std::string sharers;
      std::getline(std::ifstream(cache / "shared_cpu_list") >> std::ws, sharers);
      if (seen.insert(sharers).second) bytes += cache_size(cache / "size");
    }
  }
  constexpr std::int64_t kUnknown = 32LL << 20;
  return bytes > 0 ? bytes : kUnknown;
}

}  // namespace megamoe
