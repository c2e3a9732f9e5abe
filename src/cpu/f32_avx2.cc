// f32_avx2.cc: the kernel for BF16 and FP8 activations for AVX2: FP32 products, fused with their addition.
// NVFP4 weights and BF16 activations have one of their own in bf16_avx2.cc.
#include "cpu/f32_kernel.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

struct F32Avx2 : Ymm {
  static constexpr int kFew = 4, kPanels = 1, kTile = 6, kSteps = 8;
  static constexpr bool kHasNvfp4 = false;

  // Times what step_of_codes and Ymm::e4m3 leave out: there a doubled code comes times 2^24.
  template <bool>
  static Floats prepare_scales(const std::uint8_t* p) {
    return multiply(e4m3(p), broadcast(0x1p-20f));
  }
  template <bool>
  static Ints step_of_codes(const std::uint8_t* codes, int step, Floats scales) {
    const Ints doubled = step < 4 ? load_low(kDoubled, codes) : load_high(kDoubled, codes);
    return as_ints(round_to_e4m3<Ymm>(multiply(to_float(byte_to_top(doubled, step % 4)), scales)));
  }

  static Ints step_of_bf16(const std::uint8_t* p, int step) {
    return _mm256_castps_si256(bf16(p + step * kRowsOfPanel * 2));
  }

  static void store_floats(std::int32_t* p, Floats v) { store_ints(p, _mm256_castps_si256(v)); }
  static void words_of_bf16(const std::uint8_t* p, std::int32_t* out) {
    store_floats(out, bf16(p));
    store_floats(out + 8, bf16(p + 16));
  }
  static void words_of_e4m3(const std::uint8_t* p, std::int32_t* out) {
    store_floats(out, multiply(e4m3(p), broadcast(0x1p8f)));
    store_floats(out + 8, multiply(e4m3(p + 8), broadcast(0x1p8f)));
  }

  static Floats accumulate(Floats acc, Ints w, Ints x) {
    return _mm256_fmadd_ps(_mm256_castsi256_ps(w), _mm256_castsi256_ps(x), acc);
  }
  static Floats accumulate_here(Floats acc, Ints w, Ints x) {
    add_product(acc, as_floats(w), as_floats(x));
    return acc;
  }
};

}  // namespace

void multiply_f32_avx2(const F32Slab& slab) {
  const auto own = [&](std::int64_t p) { return slab.panels[p].format == PanelFormat::kNvfp4; };
  for (std::int64_t p = 0, end; p < slab.num_panels; p = end) {
    for (end = p + 1; end < slab.num_panels && own(end) == own(p);) ++end;
    F32Slab part = slab;
    part.panels += p, part.num_panels = end - p, part.sums += p * slab.rows * kRowsOfPanel;
    (own(p) ? multiply_bf16_avx2 : multiply<F32Avx2>)(part);
  }
}
std::int64_t only_products_f32_avx2(std::int64_t rounds) { return only_products<F32Avx2>(rounds); }

}  // namespace megamoe::cpu
