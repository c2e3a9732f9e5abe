// f32_avx512.cc: the kernel for BF16 and FP8 activations for AVX-512: FP32 products, fused with their
// addition.
#include "cpu/f32_kernel.h"
#include "cpu/zmm.h"

namespace megamoe::cpu {
namespace {

// The codes' values.
alignas(64) constexpr float kValues[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                           -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct F32Avx512 : Zmm {
  static constexpr int kFew = 3, kPanels = 2, kTile = 12, kSteps = 8;
  static constexpr bool kHasNvfp4 = true;

  template <bool kFold>
  static Floats prepare_scales(const std::uint8_t* p) {
    return multiply(e4m3(p), broadcast(kFold ? 0x1p5f : 0x1p8f));
  }
  // A lane's byte has two columns that are 4 apart; the lookup takes 4 bits.
  template <bool kFold>
  static Ints step_of_codes(const std::uint8_t* codes, int step, Floats scales) {
    const Ints shifted =
        _mm512_srli_epi32(_mm512_loadu_si512(codes), static_cast<unsigned>(step % 4 * 8 + step / 4 * 4));
    const Floats value = multiply(_mm512_permutexvar_ps(shifted, load(kValues)), scales);
    return _mm512_castps_si512(kFold ? round_to_e4m3<Zmm>(value) : value);
  }

  static Ints step_of_bf16(const std::uint8_t* p, int step) {
    return _mm512_slli_epi32(words(p + step * kRowsOfPanel * 2), 16);
  }

  static void words_of_bf16(const std::uint8_t* p, std::int32_t* out) {
    store_ints(out, _mm512_slli_epi32(words(p), 16));
  }
  static void words_of_e4m3(const std::uint8_t* p, std::int32_t* out) {
    store_ints(out, _mm512_castps_si512(multiply(e4m3(p), broadcast(0x1p8f))));
  }

  static Floats accumulate(Floats acc, Ints w, Ints x) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(w), _mm512_castsi512_ps(x), acc);
  }
};

}  // namespace

void multiply_f32_avx512(const F32Slab& slab) { multiply<F32Avx512>(slab); }
std::int64_t only_products_f32_avx512(std::int64_t rounds) { return only_products<F32Avx512>(rounds); }

}  // namespace megamoe::cpu
