// parallel.h: one way to use several cores.
#pragma once

#include <cstdint>
#include <functional>

namespace megamoe {

// The cores the calling thread may use: its affinity, as it is now, cut to the cgroup's CPU quota; at
// least 1.
int available_cores();

// Sets how many threads parallel_for uses from now on. 0 means available_cores(); more than that is
// cut to it; a negative number is an Error. The result of every operation is the same for any count.
void set_num_threads(int count);
int num_threads();

// Runs body(begin, end) over pieces of [0, count) on the threads, all where the caller's affinity lets it
// run; `grain` is the least worth a piece. Each index is visited once. Of the exceptions that bodies throw
// the one of the lowest piece is rethrown here.
void parallel_for(std::int64_t count, std::int64_t grain,
                  const std::function<void(std::int64_t begin, std::int64_t end)>& body);

}  // namespace megamoe
