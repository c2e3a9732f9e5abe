// aligned_buffer.h: owned memory on cache-line boundaries, where it is large in huge pages.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/check.h"

namespace megamoe {

inline constexpr std::int64_t kCacheLine = 64;
inline constexpr std::int64_t kHugePage = 2 << 20;

// `count` elements of T at a 64-byte boundary, readable to the end of its last line. The content is whatever
// the memory held. From two huge pages on the system is asked for those, where they are filled: there are
// fewer pages to make and to look up.
template <class T>
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::int64_t count) : count_(count) {
    const std::int64_t bytes = checked_mul(count, sizeof(T));
    if (bytes == 0) return;
    const bool huge = bytes >= 2 * kHugePage;
    const std::int64_t lines = checked_add(bytes, kCacheLine - 1) / kCacheLine * kCacheLine;
    void* data = nullptr;
    if (posix_memalign(&data, huge ? kHugePage : kCacheLine, static_cast<std::size_t>(lines)) != 0) {
      fail(ErrorCode::kOutOfMemory, "cannot allocate {} bytes", bytes);
    }
    data_.reset(static_cast<T*>(data));
    // A wish: without, all works as well.
    if (huge) madvise(data, static_cast<std::size_t>(bytes / kHugePage * kHugePage), MADV_HUGEPAGE);
  }

  T* data() const { return data_.get(); }
  std::int64_t size() const { return count_; }
  T& operator[](std::int64_t i) const { return data_.get()[i]; }
  T* begin() const { return data(); }
  T* end() const { return data() + count_; }
  operator std::span<T>() const { return {data(), static_cast<std::size_t>(count_)}; }

 private:
  struct Free {
    void operator()(void* p) const { std::free(p); }
  };
  std::unique_ptr<T, Free> data_;
  std::int64_t count_ = 0;
};

}  // namespace megamoe
