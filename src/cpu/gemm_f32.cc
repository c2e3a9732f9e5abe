// gemm_f32.cc: BF16 and FP8 activations, in FP32 arithmetic. Weights become FP32 without their tensor scale:
// exact for BF16, FP32 and NVFP4 (e2m1 * e4m3); for FP8 activations folded, as numerics/fp8_tile.h says.
#include <algorithm>

#include "cpu/codecs.h"
#include "cpu/decode.h"
#include "cpu/slab_loop.h"
#include "cpu/vec.h"

namespace megamoe::cpu {
namespace {

static_assert(kChunk == kFp8Tile);

// The value of e4m3(x) for |x| <= 448, up to the sign of zero. In the normal range 20 bits are rounded away
// as an integer; below 2^-6 the sum with 1.5 * 2^14 rounds to steps of 2^-9.
inline V4f round_to_e4m3(V4f x) {
  const V4i bits = reinterpret_cast<V4i>(x);
  const V4i normal = (bits + 0x7FFFF + ((bits >> 20) & 1)) & ~0xFFFFF;
  const V4i small = reinterpret_cast<V4i>((x + 0x1.8p14f) - 0x1.8p14f);
  const V4i is_small = (bits & 0x7FFFFFFF) < static_cast<std::int32_t>(bits_of_float(0x1p-6f));
  return reinterpret_cast<V4f>((is_small & small) | (~is_small & normal));
}

template <bool kFold>
void store_values(V16b doubled, const V4f* scales, float* w) {
  const Wide wide = widen(doubled);
  const WideF first = widen_to_float(wide.lo), second = widen_to_float(wide.hi);
  const V4f values[4] = {first.lo * scales[0], first.hi * scales[1], second.lo * scales[2],
                         second.hi * scales[3]};
  for (std::int64_t i = 0; i < 4; ++i) store(w + 4 * i, kFold ? round_to_e4m3(values[i]) : values[i]);
}

template <bool kFold>
void decode_nvfp4(const std::uint8_t* packed, std::int64_t blocks, float* w) {
  for_each_packed_block(
      packed, blocks, [&](std::int64_t, const std::uint8_t* codes_of_scales, const std::uint8_t* codes) {
        alignas(16) float row_scales[kPanel];  // with the half that undoes doubling
        for (std::int64_t r = 0; r < kPanel; ++r) {
          row_scales[r] = kE4M3Values[codes_of_scales[r]] * (kFold ? 0.5f * kFp8FoldShift : 0.5f);
        }
        V4f scales[4];
        for (std::int64_t i = 0; i < 4; ++i) scales[i] = load<V4f>(row_scales + 4 * i);
        for (std::int64_t half = 0; half < 2; ++half) {
          for (const V16b column : doubled_columns(codes + half * 64).columns) {
            store_values<kFold>(column, scales, w);
            w += kPanel;
          }
        }
      });
}

template <bool kFold>
struct F32Kernel {
  static constexpr std::int64_t kTile = 2;

  struct WeightChunk {
    alignas(64) float w[kChunk * kPanel];  // w[k][row]
  };
  struct XChunk {
    alignas(64) float x[kTile][kChunk];
    float factors[kTile];  // what a row's sum over the chunk is multiplied by
  };

  static void decode_weights(const Slab&, const PackedMatrix& matrix, std::int64_t panel, std::int64_t column,
                             std::int64_t count, WeightChunk& out) {
    const std::uint8_t* packed = matrix.at(panel, column);
    const std::int64_t values = count * kPanel;
    switch (matrix.format()) {
      case WeightFormat::kF32: std::copy_n(reinterpret_cast<const float*>(packed), values, out.w); break;
      case WeightFormat::kBf16: bf16_to_float(reinterpret_cast<const bf16*>(packed), values, out.w); break;
      case WeightFormat::kNvfp4: decode_nvfp4<kFold>(packed, count / kNvfp4Block, out.w); break;
    }
  }

  static void decode_x(const ActivationRows& x, std::int64_t row, std::int64_t column, std::int64_t count,
                       std::int64_t i, XChunk& out) {
    if (kFold) {
      e4m3_to_float(x.codes + row * x.cols + column, count, out.x[i]);
      out.factors[i] = x.scales[row * ((x.cols + kFp8Tile - 1) / kFp8Tile) + column / kFp8Tile];
    } else {
      bf16_to_float(x.values + row * x.row_stride + column, count, out.x[i]);
      out.factors[i] = 1.0f;
    }
  }

  template <int N>
  static void multiply_rows(const float* w, const XChunk& x, std::int64_t count, float* sums) {
    V4f acc[N][4] = {};
    for (std::int64_t k = 0; k < count; ++k, w += kPanel) {
      for (int i = 0; i < N; ++i) {
        const V4f value = splat(x.x[i][k]);
        for (std::int64_t j = 0; j < 4; ++j) acc[i][j] += load<V4f>(w + 4 * j) * value;
      }
    }
    for (int i = 0; i < N; ++i) {
      const V4f factor = splat(x.factors[i]);
      for (int j = 0; j < 4; ++j, sums += 4) store(sums, load<V4f>(sums) + acc[i][j] * factor);
    }
  }

  static void multiply(std::int64_t rows, const WeightChunk& w, const XChunk& x, std::int64_t count,
                       float* sums) {
    (rows == 1 ? multiply_rows<1> : multiply_rows<2>)(w.w, x, count, sums);
  }
};

}  // namespace

void multiply_f32(const Sums& sums) {
  if (sums.slab.x->format == ActivationFormat::kFp8) {
    multiply_slab<F32Kernel<true>>(sums);
  } else {
    multiply_slab<F32Kernel<false>>(sums);
  }
}

}  // namespace megamoe::cpu
