// gemm_nvfp4.cc: NVFP4 times NVFP4, the portable kernel. Codes become doubled 16-bit integers; a block's dot
// product is at most 16 * 12 * 12 = 2304, so it is summed in 16 bits.
#include <array>

#include "cpu/codecs.h"
#include "cpu/decode.h"
#include "cpu/slab_loop.h"
#include "cpu/vec.h"

namespace megamoe::cpu {
namespace {

constexpr std::int64_t kBlocks = kChunk / kNvfp4Block;

// The two doubled codes of a byte, each twice.
constexpr std::array<std::array<std::uint32_t, 2>, 256> kPairs = [] {
  std::array<std::array<std::uint32_t, 2>, 256> table{};
  for (unsigned byte = 0; byte < 256; ++byte) {
    for (unsigned half = 0; half < 2; ++half) {
      const int value = e2m1_doubled(static_cast<std::uint8_t>(byte >> (4 * half) & 15));
      table[byte][half] = (static_cast<std::uint32_t>(value) & 0xFFFFu) * 0x10001u;
    }
  }
  return table;
}();

// Lanes 2 * kLane and 2 * kLane + 1, which are equal, in all lanes.
template <int kLane>
V8s spread(V8s pairs) {
  constexpr int k = 2 * kLane;
  return __builtin_shufflevector(pairs, pairs, k, k + 1, k, k + 1, k, k + 1, k, k + 1);
}

struct Nvfp4Kernel {
  static constexpr std::int64_t kTile = 4;

  // w[k][row] are doubled codes; scales[block][row] have the 2^-2 that undoes both doublings.
  struct WeightChunk {
    alignas(64) std::int16_t w[kChunk * kPanel];
    alignas(64) float scales[kBlocks * kPanel];
  };
  // Each doubled code twice, so that one 32-bit shuffle spreads it.
  struct XChunk {
    alignas(64) std::uint32_t x[kTile][kChunk];
    float scales[kTile][kBlocks];
  };

  static void decode_weights(const Slab&, const PackedMatrix& matrix, std::int64_t panel, std::int64_t column,
                             std::int64_t count, WeightChunk& out) {
    const auto block = [&](std::int64_t b, const std::uint8_t* scales, const std::uint8_t* codes) {
      for (std::int64_t r = 0; r < kPanel; ++r) out.scales[b * kPanel + r] = kE4M3Values[scales[r]] * 0.25f;
      std::int16_t* w = out.w + b * kNvfp4Block * kPanel;
      for (std::int64_t half = 0; half < 2; ++half) {
        for (const V16b column_of_rows : doubled_columns(codes + half * 64).columns) {
          const Wide wide = widen(column_of_rows);
          store(w, wide.lo);
          store(w + 8, wide.hi);
          w += kPanel;
        }
      }
    };
    for_each_packed_block(matrix.at(panel, column), count / kNvfp4Block, block);
  }

  static void decode_x(const ActivationRows& x, std::int64_t row, std::int64_t column, std::int64_t count,
                       std::int64_t i, XChunk& out) {
    const std::uint8_t* codes = x.codes + (row * x.cols + column) / 2;
    for (std::int64_t j = 0; j < count / 2; ++j) std::memcpy(out.x[i] + 2 * j, kPairs[codes[j]].data(), 8);
    const std::uint8_t* scales = x.block_scales + (row * x.cols + column) / kNvfp4Block;
    for (std::int64_t b = 0; b < count / kNvfp4Block; ++b) out.scales[i][b] = kE4M3Values[scales[b]];
  }

  template <int N>
  static void multiply_rows(const WeightChunk& w, const XChunk& x, std::int64_t count, float* sums) {
    for (std::int64_t b = 0; b < count / kNvfp4Block; ++b) {
      V8s dot[N][2] = {};
      for (std::int64_t k = b * kNvfp4Block; k < (b + 1) * kNvfp4Block; k += 4) {
        V8s pairs[N];
        for (int i = 0; i < N; ++i) pairs[i] = load<V8s>(x.x[i] + k);
        const auto step = [&]<int kLane>() {
          const V8s low = load<V8s>(w.w + (k + kLane) * kPanel),
                    high = load<V8s>(w.w + (k + kLane) * kPanel + 8);
          for (int i = 0; i < N; ++i) {
            const V8s value = spread<kLane>(pairs[i]);
            dot[i][0] += low * value;
            dot[i][1] += high * value;
          }
        };
        step.template operator()<0>();
        step.template operator()<1>();
        step.template operator()<2>();
        step.template operator()<3>();
      }
      for (int i = 0; i < N; ++i) {
        const V4f scale = splat(x.scales[i][b]);
        const float* w_scales = w.scales + b * kPanel;
        float* out = sums + i * kPanel;
        for (int half = 0; half < 2; ++half, out += 8, w_scales += 8) {
          const WideF wide = widen_to_float(dot[i][half]);
          store(out, load<V4f>(out) + wide.lo * (load<V4f>(w_scales) * scale));
          store(out + 4, load<V4f>(out + 4) + wide.hi * (load<V4f>(w_scales + 4) * scale));
        }
      }
    }
  }

  static void multiply(std::int64_t rows, const WeightChunk& w, const XChunk& x, std::int64_t count,
                       float* sums) {
    switch (rows) {
      case 1: multiply_rows<1>(w, x, count, sums); break;
      case 2: multiply_rows<2>(w, x, count, sums); break;
      case 3: multiply_rows<3>(w, x, count, sums); break;
      default: multiply_rows<4>(w, x, count, sums); break;
    }
  }
};

}  // namespace

void multiply_nvfp4(const Sums& sums) { multiply_slab<Nvfp4Kernel>(sums); }

}  // namespace megamoe::cpu
