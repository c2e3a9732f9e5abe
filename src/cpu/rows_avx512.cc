// rows_avx512.cc: rows.h, compiled for AVX-512.
#include "cpu/rows_loops.h"

namespace megamoe::cpu {

constinit const Rows kAvx512Rows = kLoops;

}  // namespace megamoe::cpu
