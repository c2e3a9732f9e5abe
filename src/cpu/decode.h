// decode.h: E2M1 codes to integers, 16 rows at a time.
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

// Half a block of packed weights (packed_matrix.h) by columns: columns[c] are the doubled codes of 16 rows in
// column c.
struct DoubledColumns {
  V16b columns[8];
};
inline DoubledColumns doubled_columns(const std::uint8_t* packed) {
  const V16u rows[4] = {load<V16u>(packed), load<V16u>(packed + 16), load<V16u>(packed + 32),
                        load<V16u>(packed + 48)};  // 4 each
  const FourColumns bytes = columns_of_bytes(rows);
  DoubledColumns out;
  for (int i = 0; i < 4; ++i) {
    const DoubledCodes codes = doubled_codes(bytes.columns[i]);
    out.columns[i] = codes.low;
    out.columns[4 + i] = codes.high;
  }
  return out;
}

}  // namespace megamoe::cpu
