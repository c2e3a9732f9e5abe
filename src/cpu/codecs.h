// codecs.h: conversions of many numbers at once; the same bits as the scalar code in src/numerics.
#pragma once

#include <array>
#include <cstdint>

#include "megamoe/types.h"
#include "numerics/e2m1.h"
#include "numerics/e4m3.h"
#include "numerics/fp8_tile.h"
#include "numerics/nvfp4.h"

namespace megamoe::cpu {

// Every E4M3 code's value.
inline constexpr std::array<float, 256> kE4M3Values = [] {
  std::array<float, 256> table{};
  for (int code = 0; code < 256; ++code) {
    table[static_cast<std::size_t>(code)] = decode_e4m3(static_cast<std::uint8_t>(code));
  }
  return table;
}();

void bf16_to_float(const bf16* in, std::int64_t count, float* out);
void e4m3_to_float(const std::uint8_t* in, std::int64_t count, float* out);

// Largest finite magnitude.
float finite_amax(const bf16* in, std::int64_t count);

// `blocks` NVFP4 blocks under tensor scale g: reads x [16 * blocks], writes codes [8 * blocks] and scales
// [blocks]; returns how many saturated.
std::int64_t quantize_row(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                          std::uint8_t* scales);
// One FP8 tile of 1 to 128 values: writes the codes, returns d.
float quantize_fp8_tile(const bf16* x, std::int64_t count, std::uint8_t* codes);

}  // namespace megamoe::cpu
