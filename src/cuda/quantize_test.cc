#include "cuda/quantize.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "base/parallel.h"
#include "cuda/gpu_test.h"
#include "layer/activation.h"
#include "megamoe/quantize.h"
#include "numerics/bf16.h"
#include "numerics/fp16.h"
#include "numerics/interleave.h"
#include "numerics/nvfp4.h"
#include "numerics/oracle.h"
#include "ref/operations.h"

namespace megamoe::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// ---- The encoder alone

class EncoderTest : public GpuTest {
 protected:
  static float value_of(float x) { return x; }
  static float value_of(bf16 x) { return to_float(x); }
  static float value_of(fp16 x) { return to_float(x); }
  static constexpr ElementType type_of(float) { return ElementType::kF32; }
  static constexpr ElementType type_of(bf16) { return ElementType::kBf16; }
  static constexpr ElementType type_of(fp16) { return ElementType::kFp16; }

  // Codes of x [n] under the divisors d [n / 16].
  template <class T>
  static std::vector<std::uint8_t> codes_of(const std::vector<T>& x, const std::vector<float>& d) {
    const DeviceArray<T> d_x(x);
    const DeviceArray<float> d_d(d);
    const Output<std::uint8_t> codes(d_x.count());
    cuda_check(encode_codes_for_test(type_of(T{}), d_x.data(), d_d.data(), d_x.count(), codes.data()),
               "testing the encoder");
    return codes.download();
  }
  // The quotient is rounded to FP32 once, then the nearest code is searched for.
  template <class T>
  static void expect_codes(const std::vector<T>& x, const std::vector<float>& d) {
    std::vector<std::uint8_t> want(x.size());
    parallel_for(static_cast<std::int64_t>(x.size()), 1 << 14, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const double value = value_of(x[size(i)]), divisor = d[size(i / 16)];
        want[size(i)] =
            oracle::e2m1(value == 0 ? value : static_cast<double>(static_cast<float>(value / divisor)));
      }
    });
    EXPECT_TRUE(same_bytes(codes_of(x, d), want));
  }
  // Scale bytes of blocks of these largest magnitudes, and which were cut to 448.
  struct Scales {
    std::vector<std::uint8_t> codes, saturated;
  };
  static Scales scales_of(const std::vector<float>& amax, float g) {
    const DeviceArray<float> d_amax(amax);
    const Output<std::uint8_t> codes(d_amax.count()), saturated(d_amax.count());
    cuda_check(block_scales_for_test(d_amax.data(), g, d_amax.count(), codes.data(), saturated.data()),
               "testing the scales");
    return {codes.download(), saturated.download()};
  }
  static void expect_scales(const std::vector<float>& amax, float g) {
    Scales want;
    for (const float a : amax) {
      const float block[16] = {a};
      want.codes.push_back(oracle::nvfp4(block, g).scale);
      const double wanted = static_cast<float>(std::min(
          static_cast<double>(a) / static_cast<double>(static_cast<float>(6.0 * static_cast<double>(g))),
          0x1p127));
      want.saturated.push_back(a != 0 && wanted > 448.0 * (1.0 + 0x1p-20));
    }
    const Scales got = scales_of(amax, g);
    EXPECT_TRUE(same_bytes(got.codes, want.codes)) << "under " << g;
    EXPECT_TRUE(same_bytes(got.saturated, want.saturated)) << "under " << g;
  }
};

// 2^16 BF16 numbers under 127 scales and several tensor scales, both ends of the fast way among them. The
// block rule keeps from the encoder what is not finite and what is far beyond 448: here 0 instead.
TEST_F(EncoderTest, EveryBf16UnderEveryScale) {
  for (const float g : {1.0f, 0.0013732910f, 0x1.234568p-20f, 0x1.fffffep+99f, 0x1p-80f, 0x1.5p-8f}) {
    std::vector<float> x, d;
    std::vector<bf16> x_bf16;
    for (int scale = 0; scale < 127; ++scale) {
      for (std::uint32_t bits = 0; bits < 65536; ++bits) {
        const float value = to_float(bf16{static_cast<std::uint16_t>(bits)});
        const float divisor = decode_e4m3(static_cast<std::uint8_t>(std::max(scale, 1))) * g;
        const bool taken = is_finite(value) && magnitude(value) <= divisor * 0x1p+24f;
        x.push_back(taken ? value : 0.0f);
        x_bf16.push_back(bf16{static_cast<std::uint16_t>(taken ? bits : 0)});
        if (bits % 16 == 0) d.push_back(divisor);
      }
    }
    expect_codes(x, d);
    expect_codes(x_bf16, d);
  }
}

// FP32 numbers at and beside the midpoints of codes, where a reciprocal goes wrong.
TEST_F(EncoderTest, BesideEveryMidpoint) {
  constexpr float kMidpoints[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  Random random(1);
  for (int round = 0; round < 4; ++round) {
    std::vector<float> x, d;
    for (int block = 0; block < (1 << 19); ++block) {
      // Significands at random and next to powers of two.
      const std::uint32_t significand = block % 4 == 0 ? static_cast<std::uint32_t>(random.integer(-64, 64))
                                                       : static_cast<std::uint32_t>(random.bits() & 0x7FFFFF);
      const float divisor =
          float_of_bits(((40u + static_cast<std::uint32_t>(random.integer(0, 170))) << 23) + significand);
      d.push_back(divisor);
      for (int i = 0; i < 16; ++i) {
        const float near = kMidpoints[i % 7] * divisor;
        const float value =
            float_of_bits(bits_of_float(near) + static_cast<std::uint32_t>(random.integer(-2, 2)));
        x.push_back(i % 2 == 0 ? value : -value);
      }
    }
    expect_codes(x, d);
  }
}

// BF16 and FP16 numbers at and beside midpoints under divisors that put them there all but exactly: where the
// encoder decides whether a plain product will do.
TEST_F(EncoderTest, FewBitsBesideMidpoints) {
  constexpr float kMidpoints[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
  const auto expect = [&]<class T>(int spare_bits, const auto& round) {
    std::vector<T> x;
    std::vector<float> d;
    const std::uint32_t step = 1u << spare_bits, significands = 1u << (23 - spare_bits);
    for (std::uint32_t i = 0; i < significands; i += spare_bits == 16 ? 1 : 7) {
      for (const float odd : {1.0f, 3.0f, 5.0f, 7.0f}) {
        const float number = float_of_bits(0x3F800000u + i * step);
        for (int ulps = -20; ulps <= 20; ++ulps) {
          const float divisor = float_of_bits(bits_of_float(number / odd) + static_cast<std::uint32_t>(ulps));
          d.push_back(divisor);
          for (int j = 0; j < 16; ++j) {
            const float near = kMidpoints[j % 7] * divisor;
            const float value = float_of_bits((bits_of_float(near) + step / 2) / step * step +
                                              static_cast<std::uint32_t>(j / 7 - 1) * step);
            x.push_back(round(j % 2 == 0 ? value : -value));
          }
        }
      }
    }
    expect_codes(x, d);
  };
  expect.operator()<bf16>(16, [](float x) { return to_bf16(x); });
  expect.operator()<fp16>(13, [](float x) { return to_fp16(x); });
}

TEST_F(EncoderTest, ScalesOfEveryAmax) {
  std::vector<float> amax;
  for (std::uint32_t bits = 0; bits < 0x7F80; ++bits) amax.push_back(float_of_bits(bits << 16));
  for (const float g : {1.0f, 0.0013732910f, 1.0f / 6, 0x1p-140f, 0x1p+126f, 0x1.fffffep-30f}) {
    expect_scales(amax, g);
  }
  // Beside every boundary between two scales.
  amax.clear();
  for (int code = 0; code < 126; ++code) {
    const float low = decode_e4m3(static_cast<std::uint8_t>(code)),
                high = decode_e4m3(static_cast<std::uint8_t>(code + 1));
    for (const float point : {low, (low + high) / 2, high}) {
      for (int step = -3; step <= 3; ++step) {
        if (point > 0)
          amax.push_back(float_of_bits(bits_of_float(6 * point) + static_cast<std::uint32_t>(step)));
      }
    }
  }
  for (const float g : {1.0f, 0.0013732910f, 0x1.8p-3f}) expect_scales(amax, g);
}

// The four faults that software encoders of E4M3 and E2M1 have had, with the bytes written down.
using Bytes = std::vector<std::uint8_t>;

TEST_F(EncoderTest, SubnormalScales) {
  // Multiples of 2^-9; halfway between two; the least normal number, and what rounds up to it; next to
  // nothing.
  EXPECT_EQ(scales_of({6 * 0x1p-9f, 6 * 3 * 0x1p-9f, 6 * 7 * 0x1p-9f, 6 * 2.5f * 0x1p-9f, 6 * 3.5f * 0x1p-9f,
                       6 * 0x1p-6f, 6 * 7.5f * 0x1p-9f, 0x1p-20f},
                      1.0f)
                .codes,
            (Bytes{0x01, 0x03, 0x07, 0x02, 0x04, 0x08, 0x08, 0x01}));
  // 2^-9 under scales of 1, 2, 3, 4 (a tie), 5 times 2^-9.
  std::vector<float> d;
  for (int code = 1; code <= 5; ++code) d.push_back(std::ldexp(static_cast<float>(code), -9));
  const Bytes codes = codes_of(std::vector<float>(16 * 5, 0x1p-9f), d);
  for (std::size_t i = 0; i < codes.size(); ++i) EXPECT_EQ(codes[i], (Bytes{2, 1, 1, 0, 0})[i / 16]);
}
TEST_F(EncoderTest, TheLimitOf448) {
  // The next number would be 480, but its code is NaN; 464 lies halfway there, 432 halfway to 416.
  const Scales got = scales_of(
      {6 * 432.f, 6 * 440.f, 2688, 2688 * 1.0000005f, 2688 * 1.00001f, 2784, 2880, 3072, 1e30f}, 1.0f);
  EXPECT_EQ(got.codes, (Bytes{0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E, 0x7E}));
  EXPECT_EQ(got.saturated, (Bytes{0, 0, 0, 0, 1, 1, 1, 1, 1}));
  // Codes saturate at 6, and so do numbers that were cut with their scale.
  EXPECT_EQ(codes_of<float>({6, 6.5f, 7, 8, 1000, -7, -1000, 5.01f, 0, 0, 0, 0, 0, 0, 0, 0}, {1.0f}),
            (Bytes{7, 7, 7, 7, 7, 15, 15, 7, 0, 0, 0, 0, 0, 0, 0, 0}));
}
TEST_F(EncoderTest, TheCarryIntoTheExponent) {
  // 248 lies halfway between 240 and 256; 250 and 15.6 and 1.97 are nearer to the power of two.
  EXPECT_EQ(scales_of({6 * 247.f, 6 * 248.f, 6 * 250.f, 6 * 15.6f, 6 * 1.97f, 6 * 0x1.Fp-7f}, 1.0f).codes,
            (Bytes{0x77, 0x78, 0x78, 0x58, 0x40, 0x08}));
}
TEST_F(EncoderTest, Ties) {
  EXPECT_EQ(codes_of<float>({6, .25f, .75f, 1.25f, 1.75f, 2.5f, 3.5f, 5, -.25f, -.75f, -1.25f, -1.75f, -2.5f,
                             -3.5f, -5, 0},
                            {1.0f}),
            (Bytes{7, 0, 2, 2, 4, 4, 6, 6, 8, 10, 10, 12, 12, 14, 14, 0}));
  // 5.25 is nearer to 6; doubled and rounded to an integer first, it would become 4.
  EXPECT_EQ(codes_of<float>({5.25f, -5.25f, 2.75f, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, -0.0f}, {1.0f}),
            (Bytes{7, 15, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8}));
  EXPECT_EQ(scales_of({6 * 1.0625f, 6 * 1.1875f, 6 * 17.f, 6 * 19.f, 6 * 0x1.4p-8f}, 1.0f).codes,
            (Bytes{0x38, 0x3A, 0x58, 0x5A, 0x02}));
}

// ---- Rows

template <class T>
T element(float x);
template <>
float element<float>(float x) {
  return x;
}
template <>
bf16 element<bf16>(float x) {
  return to_bf16(x);
}
template <>
fp16 element<fp16>(float x) {
  return to_fp16(x);
}

template <class T>
constexpr ElementType type_of() {
  return std::is_same_v<T, float>  ? ElementType::kF32
         : std::is_same_v<T, bf16> ? ElementType::kBf16
                                   : ElementType::kFp16;
}

// Bell-shaped, with denormals, huge values, zeros, NaN and infinities here and there.
float any_value(Random& random, bool faults) {
  const std::int64_t kind = random.integer(0, 400);
  if (faults && kind == 0) return kNan;
  if (faults && kind == 1) return random.integer(0, 1) == 0 ? kInf : -kInf;
  if (kind < 6) return random.integer(0, 1) == 0 ? 0.0f : -0.0f;
  if (kind < 9) return float_of_bits(static_cast<std::uint32_t>(random.bits()) & 0x807FFFFFu);
  if (kind < 12) return random.bell() * 3000.0f;
  return random.bell();
}

struct Quantized {
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> tensor_scales;
  std::uint64_t saturated = 0;
};

class DeviceOut {
 public:
  // `given` fills the tensor scales where it is not empty.
  DeviceOut(std::int64_t rows, std::int64_t cols, int poison, const std::vector<float>& given)
      : codes_(rows * cols / 2, poison),
        scales_(rows * cols / 16, poison),
        tensor_scales_(rows, poison),
        saturated_(std::vector<unsigned long long>{100}) {
    if (!given.empty()) {
      cuda_check(cudaMemcpy(tensor_scales_.data(), given.data(), given.size() * 4, cudaMemcpyHostToDevice),
                 "testing");
    }
  }
  Nvfp4Out out() const { return {codes_.data(), scales_.data(), tensor_scales_.data(), saturated_.data()}; }
  Quantized download() const {
    return {codes_.download(), scales_.download(), tensor_scales_.download(), saturated_.download()[0] - 100};
  }

 private:
  Output<std::uint8_t> codes_, scales_;
  Output<float> tensor_scales_;
  DeviceArray<unsigned long long> saturated_;
};

void expect_same(const Quantized& got, const Quantized& want) {
  EXPECT_TRUE(same_bytes(got.codes, want.codes));
  EXPECT_TRUE(same_bytes(got.scales, want.scales));
  EXPECT_TRUE(same_bytes(got.tensor_scales, want.tensor_scales));
  EXPECT_EQ(got.saturated, want.saturated);
}

// By the library's quantiser: its per-row mode, or row by row under given tensor scales.
template <class T>
Quantized quantize_on_cpu(const std::vector<T>& x, std::int64_t rows, std::int64_t cols, std::int64_t stride,
                          const std::vector<float>& given) {
  if (given.empty()) {
    QuantizeOptions options;
    options.mode = QuantizeOptions::TensorScale::kRow;
    const Nvfp4Tensor t = quantize(MatrixView<const T>(x.data(), rows, cols, stride), options);
    return {t.codes, t.scales, t.tensor_scales, static_cast<std::uint64_t>(t.saturated_blocks)};
  }
  Quantized q;
  q.tensor_scales = given;
  for (std::int64_t r = 0; r < rows; ++r) {
    QuantizeOptions options;
    options.mode = QuantizeOptions::TensorScale::kGiven;
    options.tensor_scale = given[size(r)];
    const Nvfp4Tensor t = quantize(MatrixView<const T>(x.data() + r * stride, 1, cols), options);
    q.codes.insert(q.codes.end(), t.codes.begin(), t.codes.end());
    q.scales.insert(q.scales.end(), t.scales.begin(), t.scales.end());
    q.saturated += static_cast<std::uint64_t>(t.saturated_blocks);
  }
  return q;
}

std::vector<float> some_scales(Random& random, std::int64_t rows) {
  std::vector<float> scales(size(rows));
  for (float& g : scales) {
    const std::int64_t kind = random.integer(0, 9);
    g = kind == 0 ? 0x1p-130f : kind == 1 ? 1e20f : kind == 2 ? 1e-5f : random.uniform(1e-4f, 2e-3f);
  }
  return scales;
}

class QuantizeTest : public GpuTest {};

template <class T>
void expect_quantize(std::int64_t rows, std::int64_t cols, std::int64_t more, bool dynamic, int poison,
                     std::uint64_t seed, std::int64_t first = 0) {
  SCOPED_TRACE(::testing::Message() << rows << " x " << cols << ", stride +" << more << ", dynamic "
                                    << dynamic << ", type " << static_cast<int>(type_of<T>()));
  Random random(seed);
  const std::int64_t stride = cols + more;
  std::vector<T> x(size(first + rows * stride));
  for (T& value : x) value = element<T>(any_value(random, true));
  if (rows > 2) std::fill_n(x.begin() + first + stride, cols, element<T>(-0.0f));  // a row without anything
  const std::vector<float> given = dynamic ? std::vector<float>() : some_scales(random, rows);
  const DeviceArray<T> d_x(x);
  const DeviceOut out(rows, cols, poison, given);
  cuda_check(quantize({type_of<T>(), d_x.data() + first, stride}, nullptr, rows, cols,
                      dynamic ? TensorScales::kDynamicRow : TensorScales::kGiven, out.out(), nullptr),
             "testing quantize");
  const std::vector<T> rows_only(x.begin() + first, x.end());
  expect_same(out.download(), quantize_on_cpu(rows_only, rows, cols, stride, given));
}

TEST_F(QuantizeTest, EqualsTheLibrary) {
  std::uint64_t seed = 1;
  for (const int poison : {0x7F, 0xFF, 0x00}) {
    for (const bool dynamic : {false, true}) {
      for (const std::int64_t cols : {16, 48, 80, 176, 512, 1024, 2880, 7168}) {
        expect_quantize<bf16>(9, cols, 0, dynamic, poison, ++seed);
        expect_quantize<fp16>(5, cols, 0, dynamic, poison, ++seed);
        expect_quantize<float>(5, cols, 0, dynamic, poison, ++seed);
      }
    }
  }
}

// Every block scale with an exponent, under tensor scales that put numbers of few bits on midpoints or next
// to them: those of rows by their own largest magnitude, and powers of two with a few neighbours. BF16 also
// at both ends of the fast way.
template <class T>
void expect_midpoints_of_rows(int spare_bits) {
  SCOPED_TRACE(spare_bits);
  const std::uint32_t step = 1u << spare_bits, significands = 1u << (23 - spare_bits);
  const std::int64_t blocks = 1 + 0x7F - 8, cols = blocks * 16;
  std::vector<float> amax, scales;
  for (std::uint32_t i = 0; i < significands; ++i) {
    amax.push_back(float_of_bits(0x3F800000u + i * step) * 0x1p+6f);
    scales.push_back(nvfp4_tensor_scale(amax.back()));
  }
  std::vector<float> given = scales;
  for (int ulps = -40; ulps <= 40; ++ulps) {
    for (const float g : {0x1p-6f, 0x1.8p-6f, 0x1.4p-6f, 0x1.cp-6f, 0x1p-6f / 3, 0x1p-6f / 7}) {
      given.push_back(float_of_bits(bits_of_float(g) + static_cast<std::uint32_t>(ulps)));
    }
  }
  if (spare_bits == 16) given.insert(given.end(), {0x1p-80f, 0x1.5p-80f, 0x1.fffffep+99f, 0x1p+100f});
  const auto rows_for = [&](const std::vector<float>& g) {
    std::vector<T> x;
    for (std::size_t row = 0; row < g.size(); ++row) {
      for (std::int64_t block = 0; block < blocks; ++block) {
        const float d =
            decode_e4m3(static_cast<std::uint8_t>(std::min<std::int64_t>(8 + block, 0x7E))) * g[row];
        x.push_back(element<T>(block == blocks - 1 && row < amax.size() ? amax[row] : 5.9f * d));
        for (int i = 1; i < 16; ++i) {
          constexpr float kMidpoints[] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
          const std::uint32_t near = (bits_of_float(kMidpoints[i % 7] * d) + step / 2) / step * step;
          const float value = float_of_bits(
              near + static_cast<std::uint32_t>(static_cast<int>(row + block + i) % 3 - 1) * step);
          x.push_back(element<T>(i % 2 == 0 ? value : -value));
        }
      }
    }
    return x;
  };
  for (const bool dynamic : {true, false}) {
    const std::vector<float>& g = dynamic ? scales : given;
    const std::vector<T> x = rows_for(g);
    const std::int64_t rows = static_cast<std::int64_t>(g.size());
    const DeviceArray<T> d_x(x);
    const DeviceOut out(rows, cols, 0x7F, dynamic ? std::vector<float>() : g);
    cuda_check(quantize({type_of<T>(), d_x.data(), cols}, nullptr, rows, cols,
                        dynamic ? TensorScales::kDynamicRow : TensorScales::kGiven, out.out(), nullptr),
               "testing quantize");
    const Quantized want = quantize_on_cpu(x, rows, cols, cols, dynamic ? std::vector<float>() : g);
    EXPECT_EQ(want.tensor_scales, g);
    expect_same(out.download(), want);
  }
}
TEST_F(QuantizeTest, BesideMidpointsUnderEveryScaleOfRows) {
  expect_midpoints_of_rows<bf16>(16);
  expect_midpoints_of_rows<fp16>(13);
}

TEST_F(QuantizeTest, RowsThatDoNotFitTheRegisters) {
  for (const bool dynamic : {false, true}) {
    expect_quantize<bf16>(3, 16400, 0, dynamic, 0x7F, 1);
    expect_quantize<float>(2, 40000, 0, dynamic, 0x7F, 2);
  }
}

TEST_F(QuantizeTest, StridedAndUnalignedRows) {
  for (const bool dynamic : {false, true}) {
    for (const std::int64_t more : {1, 2, 7, 8, 16}) {
      expect_quantize<bf16>(7, 176, more, dynamic, 0x7F, 3);
      expect_quantize<fp16>(7, 176, more, dynamic, 0x7F, 4);
      expect_quantize<float>(7, 176, more, dynamic, 0x7F, 5);
    }
    expect_quantize<bf16>(4, 64, 0, dynamic, 0x7F, 6, 3);
  }
}

TEST_F(QuantizeTest, NoRowsAndMoreThanAGridAxis) {
  expect_quantize<bf16>(0, 64, 0, false, 0x7F, 1);
  expect_quantize<bf16>(0, 64, 0, true, 0x7F, 1);
  expect_quantize<bf16>(65537, 16, 0, true, 0x7F, 2);
  expect_quantize<bf16>(70001, 48, 0, false, 0x7F, 3);
}

TEST_F(QuantizeTest, GathersRows) {
  Random random(4);
  const std::int64_t tokens = 9, rows = 31, cols = 144;
  std::vector<bf16> x(size(tokens * cols)), gathered;
  for (bf16& value : x) value = to_bf16(any_value(random, true));
  std::vector<std::int32_t> map(size(rows));
  for (std::int32_t& m : map) {
    m = static_cast<std::int32_t>(random.integer(0, tokens - 1));
    gathered.insert(gathered.end(), x.begin() + m * cols, x.begin() + (m + 1) * cols);
  }
  const DeviceArray<bf16> d_x(x);
  const DeviceArray<std::int32_t> d_map(map);
  for (const bool dynamic : {false, true}) {
    const std::vector<float> given = dynamic ? std::vector<float>() : some_scales(random, rows);
    const DeviceOut out(rows, cols, 0xFF, given);
    cuda_check(quantize({ElementType::kBf16, d_x.data(), cols}, d_map.data(), rows, cols,
                        dynamic ? TensorScales::kDynamicRow : TensorScales::kGiven, out.out(), nullptr),
               "testing quantize");
    expect_same(out.download(), quantize_on_cpu(gathered, rows, cols, cols, given));
  }
}

// The launch covers 31 rows; that there are fewer is only known on the GPU. What lies beyond is neither read
// (the map and the rows hold poison there) nor written.
TEST_F(QuantizeTest, OnlyTheRowsThatThereAre) {
  Random random(9);
  const std::int64_t most = 31, cols = 144;
  std::vector<bf16> x(size(most * 2 * cols));
  for (bf16& value : x) value = to_bf16(random.bell());
  const DeviceArray<bf16> d_x(x);
  for (const std::int64_t actual : {0, 1, 17, 31}) {
    SCOPED_TRACE(actual);
    std::vector<std::int32_t> map(size(most), 0x7F7F7F7F);
    for (std::int64_t r = 0; r < actual; ++r) map[size(r)] = static_cast<std::int32_t>(actual - 1 - r);
    const DeviceArray<std::int32_t> d_map(map);
    const DeviceArray<std::int64_t> d_actual(std::vector<std::int64_t>{actual});
    const RowCount counted(most, d_actual.data());
    const std::vector<float> given = some_scales(random, most);
    const ElementRows rows{ElementType::kBf16, d_x.data(), cols};
    const auto run = [&](const auto& quantise, const std::vector<float>& scales) {
      const DeviceOut some(most, cols, 0x7F, scales), want(most, cols, 0x7F, scales);
      cuda_check(quantise(counted, some.out()), "testing quantize");
      cuda_check(quantise(RowCount(actual), want.out()), "testing quantize");
      expect_same(some.download(), want.download());
    };
    run(
        [&](const RowCount& count, const Nvfp4Out& out) {
          return quantize(rows, d_map.data(), count, cols, TensorScales::kGiven, out, nullptr);
        },
        given);
    run(
        [&](const RowCount& count, const Nvfp4Out& out) {
          return quantize(rows, nullptr, count, cols, TensorScales::kDynamicRow, out, nullptr);
        },
        {});
    run(
        [&](const RowCount& count, const Nvfp4Out& out) {
          return deinterleave_quantize(d_x.data(), 2 * cols, count, cols, TensorScales::kDynamicRow, out,
                                       nullptr);
        },
        {});
    const Output<float> some(most), want(most), some_up(most), want_up(most);
    cuda_check(row_amax(rows, counted, cols, some.data(), nullptr), "testing row_amax");
    cuda_check(row_amax(rows, actual, cols, want.data(), nullptr), "testing row_amax");
    cuda_check(deinterleave_row_amax(d_x.data(), 2 * cols, counted, cols, some_up.data(), nullptr),
               "testing row_amax");
    cuda_check(deinterleave_row_amax(d_x.data(), 2 * cols, actual, cols, want_up.data(), nullptr),
               "testing row_amax");
    EXPECT_TRUE(same_bytes(some.download(), want.download()));
    EXPECT_TRUE(same_bytes(some_up.download(), want_up.download()));
  }
}

// Rows that are pairs, each under its expert's scale; those of no expert and of weight 0 are not written, and
// their blocks not counted. All rows are counted as done.
TEST_F(QuantizeTest, RowsOfPairs) {
  Random random(11);
  const std::int64_t tokens = 9, cols = 144;
  const int top_k = 3, experts = 5;
  std::vector<bf16> x(size(tokens * cols));
  for (bf16& value : x) value = to_bf16(any_value(random, true));
  std::vector<std::int32_t> ids(size(tokens * top_k));
  for (std::int32_t& id : ids) id = static_cast<std::int32_t>(random.integer(-1, experts));
  std::vector<float> weights(ids.size(), 1.0f);
  weights[4] = 0.0f, ids[4] = 2;
  const std::vector<float> scales = some_scales(random, experts);
  const DeviceArray<bf16> d_x(x);
  const DeviceArray<std::int32_t> d_ids(ids);
  const DeviceArray<float> d_weights(weights), d_scales(scales);
  const DeviceArray<std::uint32_t> done(std::vector<std::uint32_t>{100});
  const std::int64_t rows = tokens * top_k;
  const DeviceOut result(rows, cols, 0xFF, {});
  Nvfp4Out out = result.out();
  out.pairs = {d_ids.data(), d_weights.data(), top_k, experts, d_scales.data()};
  out.rows_done = done.data();
  const ElementRows view{ElementType::kBf16, d_x.data(), cols};
  cuda_check(quantize(view, nullptr, rows, cols, TensorScales::kOfExpert, out, nullptr), "testing quantize");
  const auto got = result.download();
  EXPECT_EQ(done.download()[0], 100u + static_cast<std::uint32_t>(rows));
  EXPECT_TRUE(same_bytes(got.tensor_scales, DeviceOut(rows, cols, 0xFF, {}).download().tensor_scales));
  // Decoded, and nobody keeps the tensor scales.
  const Output<bf16> values(rows * cols, 0xFF);
  Nvfp4Out decoded = out;
  decoded.tensor_scales = nullptr, decoded.values = values.data();
  cuda_check(quantize(view, nullptr, rows, cols, TensorScales::kOfExpert, decoded, nullptr),
             "testing quantize");
  const std::vector<bf16> got_values = values.download();
  auto want = got;
  want.saturated = 0;
  for (std::int64_t r = 0; r < rows; ++r) {
    const bool there = ids[size(r)] >= 0 && ids[size(r)] < experts && weights[size(r)] != 0.0f;
    const auto codes = want.codes.begin() + r * cols / 2, block_scales = want.scales.begin() + r * cols / 16;
    std::fill_n(codes, cols / 2, 0xFF);
    std::fill_n(block_scales, cols / 16, 0xFF);
    if (!there) {
      for (std::int64_t i = 0; i < cols; ++i) ASSERT_EQ(got_values[size(r * cols + i)].bits, 0xFFFF);
      continue;
    }
    const std::vector<bf16> row(x.begin() + r / top_k * cols, x.begin() + (r / top_k + 1) * cols);
    const auto one = quantize_on_cpu(row, 1, cols, cols, {scales[size(ids[size(r)])]});
    std::copy(one.codes.begin(), one.codes.end(), codes);
    std::copy(one.scales.begin(), one.scales.end(), block_scales);
    want.saturated += one.saturated;
    for (std::int64_t i = 0; i < cols; ++i) {
      const int code = one.codes[size(i / 2)] >> (i % 2 * 4) & 15;
      const float value =
          decode_e2m1(static_cast<std::uint8_t>(code)) * decode_e4m3(one.scales[size(i / 16)]);
      const bf16 decoded_value = got_values[size(r * cols + i)];
      ASSERT_TRUE(to_float(decoded_value) == value ||
                  (std::isnan(value) && std::isnan(to_float(decoded_value))))
          << "row " << r << ", column " << i;
    }
  }
  expect_same(got, want);
  out.pairs = {};
  EXPECT_EQ(quantize(view, nullptr, rows, cols, TensorScales::kOfExpert, out, nullptr),
            cudaErrorInvalidValue);
}

TEST_F(QuantizeTest, AConstantScaleIsUsedAndWritten) {
  Random random(10);
  const std::int64_t rows = 5, cols = 176;
  std::vector<bf16> x(size(rows * cols));
  for (bf16& value : x) value = to_bf16(any_value(random, true));
  const DeviceArray<bf16> d_x(x);
  const DeviceOut result(rows, cols, 0xFF, {});
  Nvfp4Out out = result.out();
  out.constant = 0.0007f;
  const ElementRows view{ElementType::kBf16, d_x.data(), cols};
  cuda_check(quantize(view, nullptr, rows, cols, TensorScales::kConstant, out, nullptr), "testing quantize");
  expect_same(result.download(),
              quantize_on_cpu(x, rows, cols, cols, std::vector<float>(size(rows), 0.0007f)));
  for (const float bad : {0.0f, -1.0f, kNan}) {
    out.constant = bad;
    EXPECT_EQ(quantize(view, nullptr, rows, cols, TensorScales::kConstant, out, nullptr),
              cudaErrorInvalidValue);
  }
}

TEST_F(QuantizeTest, WrittenBytes) {
  // Tensor scale 1. Ties: 6 .25 .75 ... ; a block for the reciprocal; a block for the rounded scale.
  const std::vector<float> x = {2688,        0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                6,           .25f,
                                .75f,        1.25f,
                                1.75f,       2.5f,
                                3.5f,        5,
                                -.25f,       -.75f,
                                -1.25f,      -1.75f,
                                -2.5f,       -3.5f,
                                -5,          0,
                                0.08203125f, 0.02392577938735485f,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                6.18f,       0.2524f,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                kNan,        1,
                                2,           3,
                                4,           5,
                                6,           7,
                                8,           9,
                                10,          11,
                                12,          13,
                                14,          15,
                                -0.0f,       0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0,
                                0,           0};
  const DeviceArray<float> d_x(x);
  const DeviceOut out(1, 96, 0x7F, {});
  cuda_check(quantize({ElementType::kF32, d_x.data(), 96}, nullptr, 1, 96, TensorScales::kDynamicRow,
                      out.out(), nullptr),
             "testing quantize");
  const Quantized q = out.download();
  EXPECT_EQ(q.tensor_scales[0], 1.0f);
  EXPECT_EQ(q.scales, (std::vector<std::uint8_t>{0x7E, 0x38, 0x07, 0x38, 0x7F, 0x38}));
  EXPECT_EQ(std::vector(q.codes.begin() + 8, q.codes.begin() + 16),
            (std::vector<std::uint8_t>{0x07, 0x22, 0x44, 0x66, 0xA8, 0xCA, 0xEC, 0x0E}));
  EXPECT_EQ(q.codes[16], 0x37);
  EXPECT_EQ(q.codes[24], 0x17);
  EXPECT_EQ(std::vector(q.codes.begin() + 32, q.codes.begin() + 40), std::vector<std::uint8_t>(8, 0));
  EXPECT_EQ(q.codes[40], 0x08);
}

TEST_F(QuantizeTest, RefusesWhatItCannotRead) {
  EXPECT_EQ(quantize({}, nullptr, 1, 24, TensorScales::kGiven, {}, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(quantize({}, nullptr, 1, 32, TensorScales::kGiven, {reinterpret_cast<std::uint8_t*>(4)}, nullptr),
            cudaErrorInvalidValue);
}

// ---- Other sources

TEST_F(QuantizeTest, DeinterleavedIsAsCompact) {
  Random random(5);
  for (const std::int64_t cols : {16, 48, 176, 1024, 2048, 17008}) {
    for (const std::int64_t more : {0, 8, 3}) {
      const std::int64_t rows = 6, stride = 2 * cols + more;
      std::vector<bf16> wide(size(rows * stride), to_bf16(kNan)), compact(size(rows * cols));
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < cols; ++i) {
          compact[size(r * cols + i)] = wide[size(r * stride + interleaved_up(i))] =
              to_bf16(any_value(random, true));
        }
      }
      const DeviceArray<bf16> d_wide(wide), d_compact(compact);
      const Output<float> amax(rows), want_amax(rows);
      cuda_check(deinterleave_row_amax(d_wide.data(), stride, rows, cols, amax.data(), nullptr),
                 "testing deinterleave_row_amax");
      cuda_check(
          row_amax({ElementType::kBf16, d_compact.data(), cols}, rows, cols, want_amax.data(), nullptr),
          "testing row_amax");
      EXPECT_TRUE(same_bytes(amax.download(), want_amax.download()));
      for (const bool dynamic : {false, true}) {
        const std::vector<float> given = dynamic ? std::vector<float>() : some_scales(random, rows);
        const DeviceOut out(rows, cols, 0x7F, given);
        cuda_check(deinterleave_quantize(d_wide.data(), stride, rows, cols,
                                         dynamic ? TensorScales::kDynamicRow : TensorScales::kGiven,
                                         out.out(), nullptr),
                   "testing deinterleave_quantize");
        expect_same(out.download(), quantize_on_cpu(compact, rows, cols, cols, given));
      }
    }
  }
}

TEST_F(QuantizeTest, ActivatesThenQuantizes) {
  Random random(6);
  for (const ActivationConfig& activation :
       {ActivationConfig{Activation::kSwiGlu}, ActivationConfig{Activation::kSwiGluClamped, 1.5f},
        ActivationConfig{Activation::kGptOss, 1.25f, 1.702f}, ActivationConfig{Activation::kRelu2}}) {
    for (const std::int64_t more : {0, 5}) {
      const std::int64_t rows = 40, cols = 2048, stride = cols + more;
      std::vector<bf16> gate(size(rows * stride)), up(size(rows * stride)), h(size(rows * cols));
      for (bf16& x : gate) x = to_bf16(any_value(random, true) * 4.0f);
      for (bf16& x : up) x = to_bf16(any_value(random, true) * 2.0f);
      for (std::int64_t r = 0; r < rows; ++r) {
        for (std::int64_t i = 0; i < cols; ++i) {
          const std::size_t at = size(r * stride + i);
          h[size(r * cols + i)] = to_bf16(activate(activation, to_float(gate[at]), to_float(up[at])).h);
        }
      }
      const DeviceArray<bf16> d_gate(gate), d_up(up);
      for (const bool dynamic : {false, true}) {
        const std::vector<float> given = dynamic ? std::vector<float>() : some_scales(random, rows);
        const DeviceOut out(rows, cols, 0x7F, given);
        cuda_check(
            swiglu_quantize(activation, d_gate.data(), stride, d_up.data(), stride, rows, cols,
                            dynamic ? TensorScales::kDynamicRow : TensorScales::kGiven, out.out(), nullptr),
            "testing swiglu_quantize");
        SCOPED_TRACE(to_string(activation.kind));
        expect_same(out.download(), quantize_on_cpu(h, rows, cols, cols, given));
      }
    }
  }
}

// Decoded rows are what codes and scales stand for, each copy at its row; nothing else is written.
TEST_F(QuantizeTest, DecodesWhatItMade) {
  Random random(9);
  const std::int64_t rows = 23;
  for (const std::int64_t cols : {16, 272, 4096, 20000}) {
    for (const int copies : {0, 1, 3}) {  // 0: no map
      for (const bool dynamic : {false, true}) {
        SCOPED_TRACE(::testing::Message()
                     << cols << " columns, " << copies << " copies, dynamic " << dynamic);
        const int poison = dynamic ? 0x7F : 0xFF;
        std::vector<bf16> x(size(rows * cols));
        for (bf16& value : x) value = to_bf16(any_value(random, true));
        const std::vector<float> given = dynamic ? std::vector<float>() : some_scales(random, rows);
        const Quantized coded = quantize_on_cpu(x, rows, cols, cols, given);
        // Rows in any order, some of them nobody's.
        const std::int64_t places = rows * std::max(copies, 1) + 5;
        std::vector<std::int32_t> order(size(places)), map(size(rows * copies), -1);
        std::iota(order.begin(), order.end(), 0);
        for (std::size_t i = order.size(); i > 1; --i)
          std::swap(order[i - 1], order[size(random.integer(0, static_cast<std::int64_t>(i) - 1))]);
        std::vector<bf16> want(size(places * cols));
        std::memset(static_cast<void*>(want.data()), poison, want.size() * sizeof(bf16));
        const auto copy_to = [&](std::int64_t row, std::int64_t place) {
          for (std::int64_t k = 0; k < cols; ++k) {
            const std::size_t at = size(row * cols + k);
            const auto code = static_cast<std::uint8_t>(coded.codes[at / 2] >> (at % 2 * 4) & 0xF);
            want[size(place * cols + k)] = to_bf16(decode_e2m1(code) * decode_e4m3(coded.scales[at / 16]));
          }
        };
        for (std::int64_t r = 0; r < rows; ++r) {
          if (copies == 0) copy_to(r, r);
          for (int c = 0; c < copies; ++c) {
            if (random.integer(0, 4) == 0) continue;
            map[size(r * copies + c)] = order[size(r * copies + c)];
            copy_to(r, order[size(r * copies + c)]);
          }
        }
        const DeviceArray<bf16> d_x(x);
        const DeviceArray<std::int32_t> d_map(map);
        const Output<bf16> values(places * cols, poison);
        const DeviceOut coded_out(rows, 0, poison, given);
        Nvfp4Out out = coded_out.out();
        out.codes = out.scales = nullptr;
        out.values = values.data();
        if (copies > 0) out.slot_to_row = d_map.data(), out.copies = copies;
        cuda_check(quantize({ElementType::kBf16, d_x.data(), cols}, nullptr, rows, cols,
                            dynamic ? TensorScales::kDynamicRow : TensorScales::kGiven, out, nullptr),
                   "testing quantize");
        EXPECT_TRUE(same_numbers(values.download(), want));
        const Quantized rest = coded_out.download();
        EXPECT_TRUE(same_bytes(rest.tensor_scales, coded.tensor_scales));
        EXPECT_EQ(rest.saturated, coded.saturated);
      }
    }
  }
}

TEST_F(QuantizeTest, Dequantizes) {
  // Every code under every scale, twice: under one tensor scale, and under one for each row.
  const std::int64_t rows = 256, cols = 32;
  Nvfp4Tensor t;
  t.rows = rows;
  t.cols = cols;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (int i = 0; i < 16; ++i)
      t.codes.push_back(static_cast<std::uint8_t>(i % 8 * 2 + (i % 8 * 2 + 1) * 16));
    t.scales.insert(t.scales.end(), 2, static_cast<std::uint8_t>(r));
  }
  Random random(7);
  const DeviceArray<std::uint8_t> codes(t.codes), scales(t.scales);
  for (const bool one : {true, false}) {
    t.tensor_scales.resize(one ? 1 : size(rows));
    for (float& g : t.tensor_scales) g = random.uniform(1e-4f, 1e-3f);
    const DeviceArray<float> g(t.tensor_scales);
    const std::vector<float> want = dequantize(t);
    std::vector<bf16> want16;
    for (const float x : want) want16.push_back(to_bf16(x));
    const Output<float> f32(rows * cols);
    const Output<bf16> b16(rows * cols);
    const Nvfp4In in{codes.data(), scales.data(), g.data(), one};
    cuda_check(dequantize(in, rows, cols, ElementType::kF32, f32.data(), nullptr), "testing dequantize");
    cuda_check(dequantize(in, rows, cols, ElementType::kBf16, b16.data(), nullptr), "testing dequantize");
    EXPECT_TRUE(same_numbers(f32.download(), want));
    EXPECT_TRUE(same_numbers(b16.download(), want16));
  }
}

// Rows in another order, each under the tensor scale of the row it is read from; as many as the GPU knows of.
// The map holds poison beyond them, and the result must keep it.
TEST_F(QuantizeTest, DequantizesRowsByAMap) {
  Random random(8);
  const std::int64_t tokens = 11, most = 37;
  for (const std::int64_t cols : {16, 48, 80, 272, 2064}) {
    Nvfp4Tensor t;
    t.rows = tokens, t.cols = cols;
    for (std::int64_t i = 0; i < tokens * cols / 2; ++i)
      t.codes.push_back(static_cast<std::uint8_t>(random.integer(0, 255)));
    for (std::int64_t i = 0; i < tokens * cols / 16; ++i)
      t.scales.push_back(static_cast<std::uint8_t>(random.integer(0, 255)));
    for (std::int64_t r = 0; r < tokens; ++r) t.tensor_scales.push_back(random.uniform(1e-4f, 1e-3f));
    const std::vector<float> values = dequantize(t);
    const DeviceArray<std::uint8_t> codes(t.codes), scales(t.scales);
    const DeviceArray<float> tensor_scales(t.tensor_scales);
    for (const std::int64_t actual : {0, 1, 29, 37}) {
      for (const int poison : {0x7F, 0xFF, 0x00}) {
        SCOPED_TRACE(::testing::Message() << actual << " rows of " << cols << ", poison " << poison);
        std::vector<std::int32_t> map(size(most), 0x7F7F7F7F);
        std::vector<float> want(size(most * cols));
        std::memset(want.data(), poison, want.size() * sizeof(float));
        std::vector<bf16> want16(want.size());
        std::memset(static_cast<void*>(want16.data()), poison, want16.size() * sizeof(bf16));
        for (std::int64_t r = 0; r < actual; ++r) {
          map[size(r)] = static_cast<std::int32_t>(random.integer(0, tokens - 1));
          for (std::int64_t k = 0; k < cols; ++k) {
            want[size(r * cols + k)] = values[size(map[size(r)] * cols + k)];
            want16[size(r * cols + k)] = to_bf16(want[size(r * cols + k)]);
          }
        }
        const DeviceArray<std::int32_t> d_map(map);
        const DeviceArray<std::int64_t> d_actual(std::vector<std::int64_t>{actual});
        const RowCount rows(most, d_actual.data());
        const Nvfp4In in{codes.data(), scales.data(), tensor_scales.data(), false, d_map.data()};
        const Output<float> f32(most * cols, poison);
        const Output<bf16> b16(most * cols, poison);
        cuda_check(dequantize(in, rows, cols, ElementType::kF32, f32.data(), nullptr), "testing dequantize");
        cuda_check(dequantize(in, rows, cols, ElementType::kBf16, b16.data(), nullptr), "testing dequantize");
        EXPECT_TRUE(same_numbers(f32.download(), want));
        EXPECT_TRUE(same_numbers(b16.download(), want16));
      }
    }
  }
}

// Without tensor scales BF16 holds every code under every scale exactly; NaN and the signs of zeros too.
TEST_F(QuantizeTest, DequantizesExactlyWithoutTensorScales) {
  const std::int64_t rows = 256, cols = 16;
  std::vector<std::uint8_t> codes, scales;
  std::vector<std::int32_t> map;
  std::vector<bf16> want;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t i = 0; i < cols; i += 2) codes.push_back(static_cast<std::uint8_t>(i + (i + 1) * 16));
    scales.push_back(static_cast<std::uint8_t>(r));
    map.push_back(static_cast<std::int32_t>(rows - 1 - r));
  }
  for (const std::int32_t r : map) {
    for (int code = 0; code < 16; ++code) {
      const double exact = static_cast<double>(decode_e2m1(static_cast<std::uint8_t>(code))) *
                           static_cast<double>(decode_e4m3(static_cast<std::uint8_t>(r)));
      want.push_back(to_bf16(static_cast<float>(exact)));
      if (std::isnan(exact)) continue;
      ASSERT_EQ(static_cast<double>(to_float(want.back())), exact);
    }
  }
  const DeviceArray<std::uint8_t> d_codes(codes), d_scales(scales);
  const DeviceArray<std::int32_t> d_map(map);
  const Output<bf16> values(rows * cols);
  const Nvfp4In in{.codes = d_codes.data(), .scales = d_scales.data(), .row_map = d_map.data()};
  cuda_check(dequantize(in, rows, cols, ElementType::kBf16, values.data(), nullptr), "testing dequantize");
  EXPECT_TRUE(same_numbers(values.download(), want));
}

TEST_F(QuantizeTest, DequantizesWholeBlocksToWhatIsMade) {
  EXPECT_EQ(dequantize(Nvfp4In{}, 1, 24, ElementType::kBf16, nullptr, nullptr), cudaErrorInvalidValue);
  EXPECT_EQ(dequantize(Nvfp4In{}, 1, 32, ElementType::kFp16, nullptr, nullptr), cudaErrorInvalidValue);
}

template <class T>
void expect_amax(std::int64_t rows, std::int64_t cols, std::int64_t more) {
  SCOPED_TRACE(::testing::Message() << rows << " x " << cols);
  Random random(8);
  const std::int64_t stride = cols + more;
  std::vector<T> x(size(rows * stride));
  for (T& value : x) value = element<T>(any_value(random, true));
  std::vector<float> want(size(rows));
  float all = 0.0f;
  for (std::int64_t r = 0; r < rows; ++r) {
    for (std::int64_t c = 0; c < cols; ++c) {
      float value;
      if constexpr (std::is_same_v<T, float>) {
        value = x[size(r * stride + c)];
      } else {
        value = to_float(x[size(r * stride + c)]);
      }
      if (std::isfinite(value)) want[size(r)] = std::max(want[size(r)], std::abs(value));
    }
    all = std::max(all, want[size(r)]);
  }
  const DeviceArray<T> d_x(x);
  const Output<float> by_row(rows), of_all(1);
  cuda_check(row_amax({type_of<T>(), d_x.data(), stride}, rows, cols, by_row.data(), nullptr),
             "testing row_amax");
  cuda_check(tensor_amax({type_of<T>(), d_x.data(), stride}, rows, cols, of_all.data(), nullptr),
             "testing tensor_amax");
  EXPECT_TRUE(same_bytes(by_row.download(), want));
  EXPECT_EQ(of_all.download()[0], all);
}

TEST_F(QuantizeTest, LargestFiniteMagnitudes) {
  expect_amax<bf16>(33, 176, 0);
  expect_amax<bf16>(3, 16400, 3);
  expect_amax<fp16>(33, 2880, 8);
  expect_amax<float>(9, 48, 1);
  expect_amax<bf16>(70000, 16, 0);
  expect_amax<bf16>(0, 16, 0);
}

TEST_F(QuantizeTest, OneTensorScaleForEachGroup) {
  Random random(11);
  const std::vector<std::int64_t> offsets = {0, 3, 3, 4, 1500, 1507, 1507};  // the fifth group is all zero
  const std::int64_t rows = offsets.back(), room = rows + 5;
  std::vector<float> amax(size(room), kNan), want(size(rows));  // beyond the groups lies anything
  for (std::int64_t r = 0; r < rows; ++r) amax[size(r)] = r >= 1500 ? 0.0f : std::abs(random.bell());
  for (std::size_t g = 0; g + 1 < offsets.size(); ++g) {
    float largest = 0.0f;
    for (std::int64_t r = offsets[g]; r < offsets[g + 1]; ++r) largest = std::max(largest, amax[size(r)]);
    for (std::int64_t r = offsets[g]; r < offsets[g + 1]; ++r) want[size(r)] = nvfp4_tensor_scale(largest);
  }
  const DeviceArray<float> d_amax(amax);
  const DeviceArray<std::int64_t> d_offsets(offsets);
  const Output<float> grouped(rows), whole(rows);
  cuda_check(group_tensor_scales(d_amax.data(), d_offsets.data(), static_cast<int>(offsets.size()) - 1, room,
                                 grouped.data(), nullptr),
             "testing group_tensor_scales");
  EXPECT_TRUE(same_bytes(grouped.download(), want));
  cuda_check(group_tensor_scales(d_amax.data(), nullptr, 1, rows, whole.data(), nullptr),
             "testing group_tensor_scales");
  const float all = *std::max_element(amax.begin(), amax.begin() + rows);
  EXPECT_TRUE(same_bytes(whole.download(), std::vector<float>(size(rows), nvfp4_tensor_scale(all))));
}

}  // namespace
}  // namespace megamoe::cuda
