#include "base/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/cgroup.h"
#include "base/check.h"

namespace megamoe {
namespace {

std::atomic<int> g_num_threads{0};  // 0: available_cores()

// The processors that the calling thread may use.
struct Affinity {
  cpu_set_t set{};
  bool known = sched_getaffinity(0, sizeof(set), &set) == 0;

  bool operator==(const Affinity& other) const {
    return known == other.known && (!known || CPU_EQUAL(&set, &other.set));
  }
};

// What parallel_for was called with, and how far it is.
struct Work {
  std::int64_t count, grain, pieces;
  const std::function<void(std::int64_t, std::int64_t)>* body;
  std::atomic<std::int64_t> next{0};  // the first piece that nobody has taken
  std::mutex mutex{};                 // of what follows
  std::exception_ptr error{};
  std::int64_t error_piece = pieces;  // one thread alone would have met the lowest first

  void run() {
    for (std::int64_t piece; (piece = next.fetch_add(1, std::memory_order_relaxed)) < pieces;) {
      try {
        (*body)(piece * grain, std::min(count, (piece + 1) * grain));
      } catch (...) {
        const std::lock_guard lock(mutex);
        if (piece < error_piece) error_piece = piece, error = std::current_exception();
      }
    }
  }
};

// On a thread of the pool, or where a parallel_for has the pool.
thread_local bool t_inside = false;

void relax() {
#ifdef __x86_64__
  __builtin_ia32_pause();
#endif
}

// Threads that help whoever calls. The caller works, too, and waits only for helpers that have begun: one
// that the system does not let run (others use its processor) delays nobody.
class Pool {
 public:
  // Never destroyed: its threads may wait until the process ends. After fork() the child has none of them,
  // and gets a pool of its own.
  static Pool& instance() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] {
      current() = new Pool;
      t_inside = false;
    });
    static_cast<void>(registered);
    return *current();
  }

  // False, and nothing is done, where another thread has the pool. Helpers may run where the caller may: it
  // is not always the same thread.
  bool run(Work& work, int helpers, const Affinity& caller) {
    const std::unique_lock lock(caller_, std::try_to_lock);
    if (!lock) return false;
    grow(helpers);
    follow(caller);
    work_ = &work;
    // Opens a new turn.
    const std::uint32_t turn = turn_.load(std::memory_order_relaxed) + 1;
    gate_.store(gate_of(turn) | static_cast<std::uint64_t>(helpers) << kRoomShift, std::memory_order_release);
    turn_.store(turn);  // sequentially consistent: whoever is about to sleep sees it or is woken
    turn_.notify_all();
    work.run();
    // No helper enters any more; those inside end their pieces.
    std::uint64_t gate = gate_.fetch_and(~kRoom, std::memory_order_acq_rel);
    while ((gate & kInside) != 0) {
      relax();
      gate = gate_.load(std::memory_order_acquire);
    }
    return true;
  }

 private:
  static std::atomic<Pool*>& current() {
    static std::atomic<Pool*> pool = new Pool;
    return pool;
  }

  // The gate: the turn, how many helpers may still enter, and how many are inside.
  static constexpr int kRoomShift = 16, kTurnShift = 32;
  static constexpr std::uint64_t kInside = 0xFFFF, kRoom = std::uint64_t{0xFFFF} << kRoomShift;
  static std::uint64_t gate_of(std::uint32_t turn) { return static_cast<std::uint64_t>(turn) << kTurnShift; }

  void grow(int helpers) {
    try {
      threads_.reserve(static_cast<std::size_t>(helpers));
      while (static_cast<int>(threads_.size()) < helpers) {
        std::thread thread(&Pool::help, this);
        threads_.push_back(thread.native_handle());
        thread.detach();
      }
    } catch (const std::exception&) {  // the system gives no more: fewer help
    }
  }

  void follow(const Affinity& caller) {
    if (!caller.known || (followed_ == threads_.size() && caller == affinity_)) return;
    for (const pthread_t thread : threads_) pthread_setaffinity_np(thread, sizeof(caller.set), &caller.set);
    affinity_ = caller, followed_ = threads_.size();
  }

  void help() {
    t_inside = true;
    std::uint32_t seen = 0;
    for (;;) {
      seen = next_turn(seen);
      std::uint64_t gate = gate_.load(std::memory_order_acquire);
      while ((gate >> kTurnShift) == seen && (gate & kRoom) != 0) {
        const std::uint64_t entered = gate - (std::uint64_t{1} << kRoomShift) + 1;
        if (!gate_.compare_exchange_weak(gate, entered, std::memory_order_acq_rel)) continue;
        work_.load(std::memory_order_acquire)->run();
        gate_.fetch_sub(1, std::memory_order_acq_rel);
        break;
      }
    }
  }

  // Waits for a turn other than `seen`: awake for as long as lies between two steps of a layer, then asleep.
  std::uint32_t next_turn(std::uint32_t seen) {
    constexpr int kSpins = 2000;
    for (int i = 0; i < kSpins; ++i) {
      if (const std::uint32_t turn = turn_.load(std::memory_order_acquire); turn != seen) return turn;
      relax();
    }
    turn_.wait(seen, std::memory_order_acquire);
    return turn_.load(std::memory_order_acquire);
  }

  std::mutex caller_;
  std::vector<pthread_t> threads_;  // never joined, never ended
  std::size_t followed_ = 0;        // of them, how many have this affinity
  Affinity affinity_;
  std::atomic<Work*> work_ = nullptr;
  std::atomic<std::uint64_t> gate_ = 0;
  std::atomic<std::uint32_t> turn_ = 0;
};

int cores_of(const Affinity& caller) {
  static const std::optional<double> quota = cpu_quota(cgroup_folders("cpu"));
  const int mask =
      caller.known ? CPU_COUNT(&caller.set) : static_cast<int>(std::thread::hardware_concurrency());
  return std::max(1, std::min(mask, static_cast<int>(quota.value_or(mask) + 0.5)));
}

int threads_of(const Affinity& caller) {
  const int wanted = g_num_threads, cores = cores_of(caller);
  return wanted == 0 ? cores : std::min(wanted, cores);
}

}  // namespace

int available_cores() { return cores_of(Affinity{}); }

void set_num_threads(int count) {
  if (count < 0) {
    fail(ErrorCode::kInvalidArgument, "the number of threads must be 0 (automatic) or more, got {}", count);
  }
  g_num_threads = count;
}

int num_threads() { return threads_of(Affinity{}); }

void parallel_for(std::int64_t count, std::int64_t grain,
                  const std::function<void(std::int64_t, std::int64_t)>& body) {
  if (count <= 0) return;
  grain = std::max<std::int64_t>(grain, 1);
  const std::int64_t pieces = (count + grain - 1) / grain;
  if (pieces == 1 || t_inside) return body(0, count);
  const Affinity caller;
  const int threads = static_cast<int>(std::min<std::int64_t>(threads_of(caller), pieces));
  if (threads == 1) return body(0, count);
  Work work{.count = count, .grain = grain, .pieces = pieces, .body = &body};
  t_inside = true;
  const bool done = Pool::instance().run(work, threads - 1, caller);
  t_inside = false;
  if (work.error) std::rethrow_exception(work.error);
  if (!done) body(0, count);
}

}  // namespace megamoe
