#include "base/cgroup.h"

#include <fstream>
#include <sstream>

namespace megamoe {
namespace {

namespace fs = std::filesystem;

// Whether "cpu,cpuacct" names "cpu".
bool names(const std::string& controllers, const std::string& controller) {
  return ("," + controllers + ",").find("," + controller + ",") != std::string::npos;
}

// Quota and period in microseconds, of version 2 ("max" is no limit) or of version 1 (-1 is none).
std::optional<double> quota_in(const fs::path& folder) {
  double quota = 0, period = 0;
  if (std::ifstream both(folder / "cpu.max"); both) {
    if (!(both >> quota >> period)) return std::nullopt;
  } else {
    std::ifstream first(folder / "cpu.cfs_quota_us"), second(folder / "cpu.cfs_period_us");
    if (!(first >> quota) || !(second >> period)) return std::nullopt;
  }
  if (quota <= 0 || period <= 0) return std::nullopt;
  return quota / period;
}

}  // namespace

std::vector<fs::path> cgroup_folders(const std::string& controller, const fs::path& root,
                                     const fs::path& membership) {
  std::vector<fs::path> folders;
  std::ifstream file(membership);
  for (std::string line; std::getline(file, line);) {  // id:controllers:/path
    std::istringstream parts(line);
    std::string id, controllers, path;
    if (!std::getline(parts, id, ':') || !std::getline(parts, controllers, ':') || !std::getline(parts, path))
      continue;
    if (!controllers.empty() && !names(controllers, controller)) continue;
    const fs::path mount = controllers.empty() ? root : root / controller;
    for (fs::path own = fs::path(path).relative_path(); !own.empty(); own = own.parent_path()) {
      folders.push_back(mount / own);
    }
    folders.push_back(mount);
  }
  return folders;
}

std::optional<double> cpu_quota(const std::vector<fs::path>& folders) {
  std::optional<double> least;
  for (const fs::path& folder : folders) {
    const std::optional<double> quota = quota_in(folder);
    if (quota && (!least || *quota < *least)) least = quota;
  }
  return least;
}

}  // namespace megamoe
