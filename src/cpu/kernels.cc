#include "cpu/kernels.h"

#include <algorithm>
#include <cstdlib>
#include <string>

#include "base/aligned_buffer.h"
#include "base/check.h"
#include "base/processor.h"
#include "cpu/codecs.h"
#include "cpu/f32_slab.h"
#include "cpu/nvfp4_slab.h"
#include "numerics/quantize_x86.h"

namespace megamoe::cpu {
namespace {

#ifdef __x86_64__
// Calls body(panel's number, matrix, the panel's memory) for every panel of a slab.
template <class Body>
void for_each_panel(const Slab& slab, const Body& body) {
  for (int m = 0; m < slab.num_matrices; ++m) {
    for (std::int64_t p = 0; p < slab.panels; ++p) {
      body(m * slab.panels + p, *slab.matrices[m], slab.matrices[m]->at(slab.first_panel + p, 0));
    }
  }
}

// These run a kernel of some instruction set.
template <void (*kMultiply)(const Nvfp4Slab&)>
void multiply_nvfp4_x86(const Sums& sums) {
  static_assert(kExpandedBlocks >= 4 * kMaxRows);
  thread_local AlignedBuffer<std::uint8_t> scratch(kExpandedBlocks * kExpandedBlockBytes);
  const Slab& slab = sums.slab;
  const ActivationRows& x = *slab.x;
  const std::int64_t blocks = x.cols / kNvfp4Block;
  const std::uint8_t* panels[kMaxPanels];
  const std::uint8_t* codes[kMaxRows];
  const std::uint8_t* scales[kMaxRows];
  for_each_panel(
      slab, [&](std::int64_t p, const PackedMatrix&, const std::uint8_t* packed) { panels[p] = packed; });
  for (std::int64_t i = 0; i < slab.rows; ++i) {
    codes[i] = x.codes + slab.x_row(i) * (x.cols / 2);
    scales[i] = x.block_scales + slab.x_row(i) * blocks;
  }
  kMultiply({.blocks = blocks,
             .panels = panels,
             .num_panels = slab.num_matrices * slab.panels,
             .x_codes = codes,
             .x_scales = scales,
             .rows = slab.rows,
             .e4m3 = kE4M3Values.data(),
             .scratch = scratch.data(),
             .sums = sums.values});
}

template <void (*kMultiply)(const F32Slab&), bool kHasF32>
void multiply_f32_x86(const Sums& sums) {
  thread_local AlignedBuffer<std::int32_t> scratch(kExpandedWords + kExpandedFactors);
  const Slab& slab = sums.slab;
  const ActivationRows& x = *slab.x;
  const bool fp8 = x.format == ActivationFormat::kFp8;
  F32Panel panels[kMaxPanels];
  bool f32 = false;
  for_each_panel(slab, [&](std::int64_t p, const PackedMatrix& matrix, const std::uint8_t* packed) {
    panels[p].packed = packed;
    switch (matrix.format()) {
      case WeightFormat::kF32:
        panels[p].format = PanelFormat::kF32;
        f32 = true;
        break;
      case WeightFormat::kBf16: panels[p].format = PanelFormat::kBf16; break;
      case WeightFormat::kNvfp4: panels[p].format = fp8 ? PanelFormat::kFolded : PanelFormat::kNvfp4; break;
    }
  });
  const std::uint8_t* rows[kMaxRows];
  const float* factors[kMaxRows];
  for (std::int64_t i = 0; i < slab.rows; ++i) {
    const std::int64_t row = slab.x_row(i);
    if (fp8) {
      rows[i] = x.codes + row * x.cols;
      factors[i] = x.scales + row * ((x.cols + kFp8Tile - 1) / kFp8Tile);
    } else {
      rows[i] = reinterpret_cast<const std::uint8_t*>(x.values + row * x.row_stride);
    }
  }
  (f32 && !kHasF32 ? multiply_f32_avx512 : kMultiply)({.blocks = x.cols / kNvfp4Block,
                                                       .panels = panels,
                                                       .num_panels = slab.num_matrices * slab.panels,
                                                       .x = rows,
                                                       .x_factors = fp8 ? factors : nullptr,
                                                       .rows = slab.rows,
                                                       .scratch = scratch.data(),
                                                       .sums = sums.values});
}

using QuantizeRow = BlockCounts(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                                std::uint8_t* scales);
template <QuantizeRow kQuantizeRow>
std::int64_t quantize_row_x86(const bf16* x, float g, std::int64_t blocks, std::uint8_t* codes,
                              std::uint8_t* scales) {
  return kQuantizeRow(x, g, blocks, codes, scales).saturated;
}
#endif

// The names of those kernels for which keep(kernel) holds.
template <class Keep>
std::string names_of(const Keep& keep) {
  std::string names;
  for (const Kernel& kernel : all_kernels()) {
    if (keep(kernel)) names += fmt::format("{}{}", names.empty() ? "" : ", ", kernel.name);
  }
  return names;
}

}  // namespace

const std::vector<Kernel>& all_kernels() {
  static const std::vector<Kernel> kernels = [] {
    std::vector<Kernel> all = {
#ifdef __x86_64__
        {"avx512-bf16", "AVX-512 with VNNI, VBMI and BF16", has_avx512_bf16(),
         multiply_nvfp4_x86<multiply_avx512_bf16>, multiply_f32_x86<multiply_f32_avx512_bf16, false>,
         quantize_row_x86<quantize_row_avx512>, &kAvx512Rows, only_products_avx512,
         only_products_f32_avx512_bf16, kMaxPanels},
        {"avx512-vbmi", "AVX-512 with VNNI and VBMI", has_avx512_vbmi(),
         multiply_nvfp4_x86<multiply_avx512_vbmi>, multiply_f32_x86<multiply_f32_avx512, true>,
         quantize_row_x86<quantize_row_avx512>, &kAvx512Rows, only_products_avx512, only_products_f32_avx512,
         kMaxPanels},
        {"avx512", "AVX-512 with VNNI", has_avx512(), multiply_nvfp4_x86<multiply_avx512>,
         multiply_f32_x86<multiply_f32_avx512, true>, quantize_row_x86<quantize_row_avx512>, &kAvx512Rows,
         only_products_avx512, only_products_f32_avx512, kMaxPanels},
        {"avx-vnni", "AVX2 with AVX-VNNI", has_avx_vnni(), multiply_nvfp4_x86<multiply_avx_vnni>,
         multiply_f32_x86<multiply_f32_avx2, true>, quantize_row_x86<quantize_row_avx2>, &kAvx2Rows,
         only_products_avx_vnni, only_products_f32_avx2, kMaxPanels},
        {"avx2", "AVX2 with FMA and F16C", has_avx2(), multiply_nvfp4_x86<multiply_avx2>,
         multiply_f32_x86<multiply_f32_avx2, true>, quantize_row_x86<quantize_row_avx2>, &kAvx2Rows,
         only_products_avx2, only_products_f32_avx2, kMaxPanels},
#endif
        {"portable", "any CPU", true, multiply_nvfp4, multiply_f32, quantize_row, &kPortableRows, nullptr,
         nullptr, kUsualPanels}};
#ifdef __x86_64__
    if (!has_fast_bf16_dot()) std::rotate(all.begin(), all.begin() + 1, all.begin() + 3);
#endif
    return all;
  }();
  return kernels;
}

const Kernel& chosen_kernel() {
  const char* forced = std::getenv("MEGAMOE_CPU_KERNEL");
  const std::string_view wanted = forced != nullptr ? forced : "";
  for (const Kernel& kernel : all_kernels()) {
    if (wanted.empty() ? !kernel.supported : kernel.name != wanted) continue;
    if (kernel.supported) return kernel;
    fail(ErrorCode::kUnsupported,
         "MEGAMOE_CPU_KERNEL: kernel '{}' needs {}, which this machine does not have", wanted, kernel.needs);
  }
  fail(ErrorCode::kNotFound, "MEGAMOE_CPU_KERNEL: expected one of {}, got '{}'",
       names_of([](const Kernel&) { return true; }), wanted);
}

std::string_view description() {
  static const std::vector<std::string> lines = [] {
    const std::string names = names_of([](const Kernel& kernel) { return kernel.supported; });
    std::vector<std::string> all;
    for (const Kernel& kernel : all_kernels()) {
      all.push_back(fmt::format("threads and the {} kernel (here: {})", kernel.name, names));
    }
    return all;
  }();
  return lines[static_cast<std::size_t>(&chosen_kernel() - all_kernels().data())];
}

}  // namespace megamoe::cpu
