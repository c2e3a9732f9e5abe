// kernels.h: the versions of the GEMMs, of the quantiser and of what stands around them, one for each
// instruction set, and the choice among them. All give the same bits where gemm.h defines them: with NVFP4
// activations, and in quantising.
#pragma once

#include <string_view>
#include <vector>

#include "cpu/gemm.h"
#include "cpu/rows.h"

namespace megamoe::cpu {

struct Kernel {
  std::string_view name;
  std::string_view needs;
  bool supported = false;                    // by this machine
  void (*multiply_nvfp4)(const Sums& sums);  // x in kNvfp4
  void (*multiply_f32)(const Sums& sums);    // x in kBf16 or kFp8
  std::int64_t (*quantize_row)(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                               std::uint8_t* scales);  // as in codecs.h
  const Rows* rows = nullptr;
  // Only the products of multiply_nvfp4, of multiply_f32 with NVFP4 weights, in registers: the rate that
  // bounds them. Return the multiplications and additions of some rounds. Null where the compiler chooses
  // instructions.
  std::int64_t (*only_products_nvfp4)(std::int64_t rounds) = nullptr;
  std::int64_t (*only_products_f32)(std::int64_t rounds) = nullptr;
  std::int64_t panels = 0;  // of a slab, of all its matrices, at best
};

// Those of this build, the best for this machine's processor first; the last runs everywhere.
const std::vector<Kernel>& all_kernels();

// The one that the environment variable MEGAMOE_CPU_KERNEL names, else the best that is supported. An unknown
// name and one that this machine does not support are an Error.
const Kernel& chosen_kernel();

// A line for `megamoe backends`: the chosen kernel and the others that this machine supports.
std::string_view description();

}  // namespace megamoe::cpu
