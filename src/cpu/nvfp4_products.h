// nvfp4_products.h: the products of an NVFP4 kernel alone, in registers: the rate that bounds it. Over a
// vector type as nvfp4_kernel.h wants it, of which dot() is used.
#pragma once

#include "cpu/x86.h"

namespace megamoe::cpu {
namespace {

// `rounds` rounds of the products alone, out of registers; returns the multiplications and additions.
template <class V>
std::int64_t only_products(std::int64_t rounds) {
  constexpr int kSums =
      V::kLanes == 8 ? 10 : 16;  // enough that none waits for itself, few enough for registers
  typename V::Ints sums[kSums], w[4], x = V::broadcast(0);
#pragma GCC unroll 32
  for (auto& v : sums) v = x;
#pragma GCC unroll 4
  for (auto& v : w) v = x, V::keep(v);
  for (std::int64_t r = 0; r < rounds; ++r) {
#pragma GCC unroll 32
    for (auto& sum : sums) {
      V::keep(x);
      sum = V::dot(w, {x, x, x, x}, sum);
    }
  }
#pragma GCC unroll 32
  for (auto& v : sums) V::keep(v);
  return rounds * kSums * V::kLanes * 16 * 2;
}

}  // namespace
}  // namespace megamoe::cpu
