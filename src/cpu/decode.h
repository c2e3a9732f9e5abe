// decode.h: E2M1 codes to integers, 32 at a time.
#pragma once

#include "cpu/vec.h"

namespace megamoe::cpu {

// The doubled values (0, 1, 2, 3, 4, 6, 8, 12 and their negatives) of 16 bytes' low and high codes.
struct DoubledCodes {
  V16b low, high;
};

// Code c of 0..7 doubled is c, and 1 more above 4, 1 more above 5, 3 more above 6. A comparison that holds
// gives -1.
inline V16b doubled_values(V16b codes) {
  const V16b c = codes & 7;
  const V16b negative = codes > 7, above6 = c > 6;
  const V16b value = c - (c > 4) - (c > 5) - (above6 + above6 + above6);
  return (value ^ negative) - negative;
}

inline DoubledCodes doubled_codes(V16u bytes) {
  return {doubled_values(reinterpret_cast<V16b>(bytes & 15)),
          doubled_values(reinterpret_cast<V16b>(bytes >> 4))};
}

}  // namespace megamoe::cpu
