// rows_avx2.cc: rows.h, compiled for AVX2.
#include "cpu/rows_loops.h"

namespace megamoe::cpu {

constinit const Rows kAvx2Rows = kLoops;

}  // namespace megamoe::cpu
