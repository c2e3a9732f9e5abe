// cgroup.h: the control groups that bound this process.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <vector>

namespace megamoe {

// The folders whose files limit a controller ("cpu", "memory"): of the group that the process is in, of the
// one around that, and so on; of version 2 and of version 1. Some may not be there. `root` is where the
// groups are mounted, `membership` what the kernel says of a process.
std::vector<std::filesystem::path> cgroup_folders(
    const std::string& controller, const std::filesystem::path& root = "/sys/fs/cgroup",
    const std::filesystem::path& membership = "/proc/self/cgroup");

// The least quota of CPU time in those folders, in processors; nothing where there is none.
std::optional<double> cpu_quota(const std::vector<std::filesystem::path>& folders);

}  // namespace megamoe
