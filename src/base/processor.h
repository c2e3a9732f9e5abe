// processor.h: what instructions this machine's processor has, for code that is compiled for them. That the
// system saves the wide registers is part of the answer.
#pragma once

namespace megamoe {

bool has_avx2();         // and FMA and F16C
bool has_avx_vnni();     // and has_avx2
bool has_avx512();       // F, BW, VL, VNNI, and has_avx2
bool has_avx512_bf16();  // and has_avx512

}  // namespace megamoe
