#include "base/processor.h"

#ifdef __x86_64__
#include <cpuid.h>
#endif

namespace megamoe {

#ifdef __x86_64__
namespace {

// Some features by their bits, as not every compiler knows their names.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & 1u << 29) != 0;
}
bool has_bit_of_leaf_7_1(int bit) {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid_count(7, 1, &a, &b, &c, &d) != 0 && (a & 1u << bit) != 0;
}

}  // namespace

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
  return has;
}
bool has_avx_vnni() { return has_avx2() && has_bit_of_leaf_7_1(4); }
bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni");
}
bool has_avx512_vbmi() { return has_avx512() && __builtin_cpu_supports("avx512vbmi"); }
bool has_avx512_bf16() { return has_avx512_vbmi() && has_bit_of_leaf_7_1(5); }
bool has_fast_bf16_dot() { return has_avx512_bf16() && __builtin_cpu_is("amd"); }
#else
bool has_avx2() { return false; }
bool has_avx_vnni() { return false; }
bool has_avx512() { return false; }
bool has_avx512_vbmi() { return false; }
bool has_avx512_bf16() { return false; }
bool has_fast_bf16_dot() { return false; }
#endif

}  // namespace megamoe
