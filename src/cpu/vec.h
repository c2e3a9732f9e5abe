// vec.h: 16-byte vectors by the compiler's own vector types: SSE2 on x86, NEON on Arm, plain code elsewhere.
#pragma once

#include <cstdint>
#include <cstring>

namespace megamoe::cpu {

using V4f = float __attribute__((vector_size(16)));
using V4i = std::int32_t __attribute__((vector_size(16)));
using V8s = std::int16_t __attribute__((vector_size(16)));
using V2q = std::uint64_t __attribute__((vector_size(16)));
using V16b = std::int8_t __attribute__((vector_size(16)));
using V16u = std::uint8_t __attribute__((vector_size(16)));

template <class V>
inline V load(const void* p) {
  V v;
  std::memcpy(&v, p, sizeof(V));
  return v;
}
template <class V>
inline void store(void* p, V v) {
  std::memcpy(p, &v, sizeof(V));
}

// 16 rows of 4 bytes, 4 rows in a vector, by columns.
struct FourColumns {
  V16u columns[4];
};
inline FourColumns columns_of_bytes(const V16u (&rows)[4]) {
  const auto evens = [](V16u a, V16u b) {
    return __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  };
  const auto odds = [](V16u a, V16u b) {
    return __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
  };
  const V16u even[2] = {evens(rows[0], rows[1]), evens(rows[2], rows[3])};
  const V16u odd[2] = {odds(rows[0], rows[1]), odds(rows[2], rows[3])};
  return {evens(even[0], even[1]), evens(odd[0], odd[1]), odds(even[0], even[1]), odds(odd[0], odd[1])};
}

inline V4f splat(float x) { return V4f{x, x, x, x}; }

// The 16 bytes as two vectors of 16-bit numbers, the 8 numbers as two vectors of FP32: sign-extended by
// interleaving with the sign.
struct Wide {
  V8s lo, hi;
};
inline Wide widen(V16b v) {
  const V16b sign = v < 0;
  return {reinterpret_cast<V8s>(
              __builtin_shufflevector(v, sign, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)),
          reinterpret_cast<V8s>(__builtin_shufflevector(v, sign, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29,
                                                        14, 30, 15, 31))};
}
struct WideF {
  V4f lo, hi;
};
inline WideF widen_to_float(V8s v) {
  const V8s sign = v >> 15;
  const V4i lo = reinterpret_cast<V4i>(__builtin_shufflevector(v, sign, 0, 8, 1, 9, 2, 10, 3, 11));
  const V4i hi = reinterpret_cast<V4i>(__builtin_shufflevector(v, sign, 4, 12, 5, 13, 6, 14, 7, 15));
  return {__builtin_convertvector(lo, V4f), __builtin_convertvector(hi, V4f)};
}

}  // namespace megamoe::cpu
