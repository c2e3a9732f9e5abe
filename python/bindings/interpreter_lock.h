// interpreter_lock.h: letting go of the interpreter's lock and taking it again, also while that ends.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

namespace megamoe::python {

// An interpreter before 3.14 that ends makes a daemon thread that asks for its lock end, too, by
// pthread_exit(), which unwinds the stack; nanobind's functions let nothing through, and the process aborts.
// Here such a thread sleeps until the process is gone, as it does from 3.14 on.
template <class Function>
decltype(auto) never_unwound(const Function& function) {
  try {
    return function();
  } catch (const abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// While it lives, other threads may run Python.
class Unlocked {
 public:
  Unlocked() : state_(PyEval_SaveThread()) {}
  ~Unlocked() {
    never_unwound([&] { PyEval_RestoreThread(state_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* state_;
};

// While it lives, this thread may run Python, whatever it did before.
class Locked {
 public:
  Locked() : state_(never_unwound(PyGILState_Ensure)) {}
  ~Locked() { PyGILState_Release(state_); }
  Locked(const Locked&) = delete;
  Locked& operator=(const Locked&) = delete;

 private:
  PyGILState_STATE state_;
};

}  // namespace megamoe::python
