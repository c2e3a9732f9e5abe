#include "cpu/rows_loops.h"

namespace megamoe::cpu {

constinit const Rows kPortableRows = kLoops;

}  // namespace megamoe::cpu
