#include "numerics/mxfp4_to_nvfp4.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "base/check.h"
#include "base/parallel.h"
#include "numerics/mxfp4.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

constexpr int kTopExponent = 8;         // of the block scale that k_max becomes; 1.75 * 2^8 is E4M3's largest
constexpr int kReach = 17;              // from there down to 2^-9
constexpr std::int64_t kGrainRows = 8;  // rows of a weight matrix that are worth handing to a thread
constexpr int kBlockBytes = kMxfp4Block / 2;

bool all_zero(const std::uint8_t* codes) {
  return std::all_of(codes, codes + kBlockBytes, [](std::uint8_t pair) { return (pair & 0x77) == 0; });
}

void requantize_block(const std::uint8_t* in, int k, float tensor_scale, std::uint8_t* codes,
                      std::uint8_t* scales) {
  float values[kMxfp4Block];
  for (int i = 0; i < kMxfp4Block; ++i) values[i] = decode_e2m1(nibble(in, i)) * power_of_two(k);
  for (std::int64_t half = 0; half < 2; ++half) {
    scales[half] =
        nvfp4_quantize_block(values + half * kNvfp4Block, tensor_scale, codes + half * (kNvfp4Block / 2))
            .code;
  }
}

}  // namespace

std::optional<int> mxfp4_max_exponent(const Mxfp4View& in) {
  if (in.rows < 0 || in.cols < 0 || in.cols % kMxfp4Block != 0) {
    fail(ErrorCode::kInvalidArgument, "an MXFP4 matrix must have a multiple of {} columns, got [{}, {}]",
         kMxfp4Block, in.rows, in.cols);
  }
  const std::int64_t blocks = in.cols / kMxfp4Block;
  std::vector<int> row_max(static_cast<std::size_t>(in.rows), INT32_MIN);
  parallel_for(in.rows, kGrainRows, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t r = begin; r < end; ++r) {
      for (std::int64_t b = 0; b < blocks; ++b) {
        const std::uint8_t scale = in.scales[r * blocks + b];
        if (scale == kE8M0NaN) {
          fail(ErrorCode::kInvalidArgument, "row {}, block {} has the scale 0xFF, which is NaN", r, b);
        }
        int& k_max = row_max[static_cast<std::size_t>(r)];
        if (!all_zero(in.codes + (r * blocks + b) * kBlockBytes)) k_max = std::max(k_max, scale - kE8M0Bias);
      }
    }
  });
  const auto largest = std::max_element(row_max.begin(), row_max.end());
  if (largest == row_max.end() || *largest == INT32_MIN) return std::nullopt;
  return *largest;
}

Mxfp4Cast cast_mxfp4_to_nvfp4(const Mxfp4View& in, std::optional<int> k_max, std::uint8_t* codes,
                              std::uint8_t* scales) {
  const std::optional<int> own = mxfp4_max_exponent(in);
  if (own && (!k_max || *k_max < *own)) {
    fail(ErrorCode::kInvalidArgument, "the largest exponent of the MXFP4 blocks is {}, but {} was given",
         *own, k_max ? fmt::format("{}", *k_max) : "none");
  }
  if (k_max && (*k_max < -kE8M0Bias || *k_max > 254 - kE8M0Bias)) {
    fail(ErrorCode::kInvalidArgument, "an exponent of MXFP4 blocks lies between -127 and 127, got {}",
         *k_max);
  }
  Mxfp4Cast result;
  const int m = k_max ? *k_max - kTopExponent : 0;
  result.tensor_scale = power_of_two(m);

  const std::int64_t blocks = in.cols / kMxfp4Block;
  std::atomic<std::int64_t> inexact{0};
  parallel_for(in.rows, kGrainRows, [&](std::int64_t begin, std::int64_t end) {
    std::int64_t inexact_here = 0;
    for (std::int64_t block = begin * blocks; block < end * blocks; ++block) {
      const std::uint8_t* block_codes = in.codes + block * kBlockBytes;
      std::uint8_t* out_codes = codes + block * kBlockBytes;
      std::uint8_t* out_scales = scales + block * 2;
      const int k = in.scales[block] - kE8M0Bias;
      const bool zero = all_zero(block_codes);
      if (!zero && k + kReach < *k_max) {
        requantize_block(block_codes, k, result.tensor_scale, out_codes, out_scales);
        ++inexact_here;
        continue;
      }
      out_scales[0] = out_scales[1] = encode_e4m3(zero ? 1.0f : power_of_two(k - m));
      if (out_codes != block_codes) std::memcpy(out_codes, block_codes, kBlockBytes);
    }
    inexact += inexact_here;
  });
  result.inexact_blocks = inexact;
  return result;
}

}  // namespace megamoe
