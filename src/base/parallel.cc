#include "base/parallel.h"

#include <omp.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <fstream>
#include <string>

#include "base/check.h"

namespace megamoe {
namespace {

// The quota of cgroup v2 (or v1) in whole cores, or a large number where there is none.
int cgroup_cores() {
  constexpr int kNoLimit = 1 << 20;
  double quota = 0, period = 0;
  if (std::ifstream v2("/sys/fs/cgroup/cpu.max"); v2) {
    std::string first;
    if (!(v2 >> first >> period) || first == "max") return kNoLimit;
    try {
      quota = std::stod(first);
    } catch (const std::exception&) {
      return kNoLimit;
    }
  } else {
    std::ifstream q("/sys/fs/cgroup/cpu/cpu.cfs_quota_us"), p("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
    if (!(q >> quota) || !(p >> period)) return kNoLimit;
  }
  if (quota <= 0 || period <= 0) return kNoLimit;
  return std::max(1, static_cast<int>(quota / period + 0.5));
}

std::atomic<int> g_num_threads{0};  // 0: available_cores()

}  // namespace

int available_cores() {
  static const int cores = [] {
    cpu_set_t set;
    const int mask = sched_getaffinity(0, sizeof(set), &set) == 0 ? CPU_COUNT(&set) : omp_get_num_procs();
    return std::max(1, std::min(mask, cgroup_cores()));
  }();
  return cores;
}

void set_num_threads(int count) {
  if (count < 0) {
    fail(ErrorCode::kInvalidArgument, "the number of threads must be 0 (automatic) or more, got {}", count);
  }
  g_num_threads = count;
}

int num_threads() {
  const int wanted = g_num_threads;
  return wanted == 0 ? available_cores() : std::min(wanted, available_cores());
}

void parallel_for(std::int64_t count, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  const std::int64_t pieces = (count + grain - 1) / grain;
  const int threads = static_cast<int>(std::min<std::int64_t>(num_threads(), pieces));
  if (threads == 1 || omp_in_parallel()) {
    body(0, count);
    return;
  }
  std::exception_ptr first_error;
  std::int64_t first_piece = pieces;  // that failed: one thread alone would have met it first
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (std::int64_t piece = 0; piece < pieces; ++piece) {
    try {
      body(piece * grain, std::min(count, (piece + 1) * grain));
    } catch (...) {
#pragma omp critical(megamoe_parallel_error)
      if (piece < first_piece) {
        first_piece = piece;
        first_error = std::current_exception();
      }
    }
  }
  if (first_error) std::rethrow_exception(first_error);
}

}  // namespace megamoe
