// aligned_buffer.h: owned memory on cache-line boundaries.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <span>

#include "base/check.h"

namespace megamoe {

inline constexpr std::int64_t kCacheLine = 64;

// `count` elements of T at a 64-byte boundary. The content is whatever the memory held.
template <class T>
class AlignedBuffer {
 public:
  AlignedBuffer() = default;
  explicit AlignedBuffer(std::int64_t count) : count_(count) {
    const std::int64_t bytes = checked_mul(count, sizeof(T));
    if (bytes == 0) return;
    const std::int64_t rounded = checked_add(bytes, kCacheLine - 1) / kCacheLine * kCacheLine;
    data_.reset(static_cast<T*>(std::aligned_alloc(kCacheLine, static_cast<std::size_t>(rounded))));
    if (!data_) fail(ErrorCode::kOutOfMemory, "cannot allocate {} bytes", bytes);
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
