// f32_avx2.cc: the kernel for BF16 and FP8 activations for AVX2: FP32 products, fused with their addition.
#include "cpu/f32_kernel.h"
#include "cpu/ymm.h"

namespace megamoe::cpu {
namespace {

struct F32Avx2 : Ymm {
  static constexpr int kFew = 4, kPanels = 1, kTile = 6, kSteps = 8;

  // Times what step_of_codes and Ymm::e4m3 leave out: there a doubled code comes times 2^24.
  template <bool kFold>
  static Floats prepare_scales(const std::uint8_t* p) {
    return multiply(e4m3(p), broadcast(kFold ? 0x1p-20f : 0x1p-17f));
  }
  template <bool kFold>
  static Ints step_of_codes(const std::uint8_t* codes, int step, Floats scales) {
    const Ints doubled = step < 4 ? load_low(kDoubled, codes) : load_high(kDoubled, codes);
    // A lane's byte of this column, to the top.
    const Ints top = _mm256_add_epi32(_mm256_set_epi32(0x0C808080, 0x08808080, 0x04808080, 0x00808080,
                                                       0x0C808080, 0x08808080, 0x04808080, 0x00808080),
                                      _mm256_set1_epi32((step % 4) << 24));
    const Floats value = multiply(to_float(_mm256_shuffle_epi8(doubled, top)), scales);
    return _mm256_castps_si256(kFold ? round_to_e4m3<Ymm>(value) : value);
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
  // The compiler would leave some of many sums in the register of x, and move them back in the end.
  static Floats accumulate_here(Floats acc, Ints w, Ints x) {
    asm("vfmadd231ps %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
    return acc;
  }
};

}  // namespace

void multiply_f32_avx2(const F32Slab& slab) { multiply<F32Avx2>(slab); }
std::int64_t only_products_f32_avx2(std::int64_t rounds) { return only_products<F32Avx2>(rounds); }

}  // namespace megamoe::cpu
