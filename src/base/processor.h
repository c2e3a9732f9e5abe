// processor.h: what instructions this machine's processor has, for code that is compiled for them. That the
// system saves the wide registers is part of the answer.
#pragma once

namespace megamoe {

bool has_avx2();         // and FMA and F16C
bool has_avx_vnni();     // and has_avx2
bool has_avx512();       // F, BW, VL, VNNI, and has_avx2
bool has_avx512_vbmi();  // and has_avx512
bool has_avx512_bf16();  // and has_avx512_vbmi
// Whether BF16's dot product does more in a cycle than FP32's fused multiply-add: twice as much on AMD's
// processors, half as much on Intel's (measured on Zen 5 and on Emerald Rapids), which have AMX for that.
bool has_fast_bf16_dot();

}  // namespace megamoe
