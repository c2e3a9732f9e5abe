#include "cuda/sm90/pack.h"

#include <utility>

#include "cuda/gpu_test.h"
#include "cuda/sm90/packed_weights.h"

namespace megamoe::sm90 {
namespace {

using cuda::cuda_check;
using cuda::DeviceArray;
using cuda::Random;

std::vector<std::uint8_t> random_bytes(Random& random, std::int64_t count) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count));
  for (std::uint8_t& b : bytes) b = static_cast<std::uint8_t>(random.bits());
  return bytes;
}

constexpr std::pair<OperandType, WeightRole> kForms[] = {{OperandType::kBf16, WeightRole::kGateUp},
                                                         {OperandType::kBf16, WeightRole::kPlain},
                                                         {OperandType::kFp8, WeightRole::kGateUp},
                                                         {OperandType::kFp8, WeightRole::kPlain}};

class PackTest : public cuda::GpuTest {};

TEST_F(PackTest, EqualsTheHostAndUnpacks) {
  Random random(1);
  struct Shape {
    int experts;
    std::int64_t rows, cols;
  };
  for (const auto& [type, role] : kForms) {
    const int matrices = role == WeightRole::kGateUp ? 2 : 1;
    for (const Shape& s : {Shape{1, 16, 16}, {3, 48, 80}, {2, 128, 64}, {2, 176, 2880}, {5, 352, 144}}) {
      SCOPED_TRACE(::testing::Message()
                   << "operands " << static_cast<int>(type) << ", role " << static_cast<int>(role) << ", "
                   << s.experts << " of " << s.rows << " x " << s.cols);
      const std::int64_t bytes = packed_bytes(type, role, s.rows, s.cols);
      std::vector<std::vector<std::uint8_t>> codes, scales;
      std::vector<DeviceArray<std::uint8_t>> on_device;
      std::vector<RawWeights> host_raw, device_raw;
      for (int e = 0; e < s.experts; ++e) {
        RawWeights device{{nullptr, nullptr}, {nullptr, nullptr}, s.rows, s.cols};
        for (int m = 0; m < matrices; ++m) {
          codes.push_back(random_bytes(random, s.rows * s.cols / 2));
          scales.push_back(random_bytes(random, s.rows * s.cols / 16));
          for (std::uint8_t& scale : scales.back()) {  // 0, -0 and NaN among them
            scale = scale == 0x80 || scale % 32 == 3 ? std::uint8_t{0x80}
                                                     : static_cast<std::uint8_t>(scale & 0x7F);
          }
          on_device.emplace_back(codes.back());
          device.codes[m] = on_device.back().data();
          on_device.emplace_back(scales.back());
          device.scales[m] = on_device.back().data();
        }
        device_raw.push_back(device);
      }
      std::vector<std::uint8_t> want(static_cast<std::size_t>(s.experts * bytes));
      for (int e = 0; e < s.experts; ++e) {
        RawWeights raw{{nullptr, nullptr}, {nullptr, nullptr}, s.rows, s.cols};
        for (int m = 0; m < matrices; ++m) {
          raw.codes[m] = codes[static_cast<std::size_t>(e * matrices + m)].data();
          raw.scales[m] = scales[static_cast<std::size_t>(e * matrices + m)].data();
        }
        pack_weights(type, role, raw, want.data() + e * bytes);
      }
      const DeviceArray<RawWeights> table(device_raw);
      for (const int poison : {0x7F, 0xFF, 0x00}) {
        const cuda::Output<std::uint8_t> packed(s.experts * bytes, poison);
        cuda_check(pack_layer(type, role, table.data(), s.experts, s.rows, s.cols, packed.data(), nullptr),
                   "testing pack");
        EXPECT_TRUE(cuda::same_bytes(packed.download(), want));
      }
      // And back, but for the codes of blocks of scale 0, which BF16's form clears.
      const std::vector<std::uint8_t>& packed = want;
      for (int e = 0; e < s.experts; ++e) {
        std::vector<std::uint8_t> back_codes[2], back_scales[2];
        std::uint8_t *code_pointers[2] = {}, *scale_pointers[2] = {};
        for (int m = 0; m < matrices; ++m) {
          back_codes[m].resize(static_cast<std::size_t>(s.rows * s.cols / 2));
          back_scales[m].resize(static_cast<std::size_t>(s.rows * s.cols / 16));
          code_pointers[m] = back_codes[m].data();
          scale_pointers[m] = back_scales[m].data();
        }
        unpack_weights(type, role, packed.data() + e * bytes, s.rows, s.cols, code_pointers, scale_pointers);
        for (int m = 0; m < matrices; ++m) {
          std::vector<std::uint8_t> c = codes[static_cast<std::size_t>(e * matrices + m)],
                                    sc = scales[static_cast<std::size_t>(e * matrices + m)];
          for (std::size_t b = 0; b < sc.size(); ++b) {
            sc[b] &= 0x7F;
            if (sc[b] != 0 || type == OperandType::kFp8) continue;
            sc[b] = 0x38;
            std::fill_n(c.begin() + static_cast<std::int64_t>(b) * 8, 8, std::uint8_t{0});
          }
          EXPECT_TRUE(cuda::same_bytes(back_codes[m], c));
          EXPECT_TRUE(cuda::same_bytes(back_scales[m], sc));
        }
      }
    }
  }
}

// Fourteen experts fill a staging buffer; each buffer is used twice.
TEST_F(PackTest, WeightsComeThroughTheStagingBuffers) {
  constexpr std::int64_t kExperts = 44, kRows = 1024, kCols = 2048;
  Random random(2);
  std::vector<std::vector<std::uint8_t>> bytes;
  std::vector<WeightMatrix> matrices;
  std::vector<float> tensor_scales;
  for (std::int64_t i = 0; i < 2 * kExperts; ++i) {
    // Random bytes cost time: some, repeated at an odd distance.
    const std::vector<std::uint8_t> pool = random_bytes(random, 4099);
    std::vector<std::uint8_t> codes(kRows * kCols / 2), scales(kRows * kCols / 16);
    for (std::size_t j = 0; j < codes.size(); ++j) codes[j] = pool[j % pool.size()];
    for (std::size_t j = 0; j < scales.size(); ++j)
      scales[j] = static_cast<std::uint8_t>(0x20 + pool[j % 4093] % 0x40);
    bytes.push_back(std::move(codes));
    bytes.push_back(std::move(scales));
    tensor_scales.push_back(0.25f + static_cast<float>(i));
    WeightMatrix matrix{.format = WeightFormat::kNvfp4, .rows = kRows, .cols = kCols};
    matrix.codes = bytes[bytes.size() - 2].data();
    matrix.scales = bytes.back().data();
    matrix.tensor_scale = tensor_scales.back();
    matrices.push_back(matrix);
  }
  std::vector<const WeightMatrix*> pointers;
  for (const WeightMatrix& matrix : matrices) pointers.push_back(&matrix);
  const PackedWeights got = load_weights(OperandType::kBf16, WeightRole::kGateUp, pointers);
  EXPECT_EQ(got.scales.download(), tensor_scales);
  const std::int64_t size = packed_bytes(OperandType::kBf16, WeightRole::kGateUp, kRows, kCols);
  ASSERT_EQ(got.packed.bytes(), kExperts * size);
  const std::vector<std::uint8_t> packed = got.packed.download();
  for (const std::int64_t e : {0, 13, 14, 27, 28, 41, 42, 43}) {
    const WeightMatrix &gate = matrices[static_cast<std::size_t>(2 * e)],
                       &up = matrices[static_cast<std::size_t>(2 * e + 1)];
    std::vector<std::uint8_t> want(static_cast<std::size_t>(size));
    pack_weights(OperandType::kBf16, WeightRole::kGateUp,
                 {{gate.codes, up.codes}, {gate.scales, up.scales}, kRows, kCols}, want.data());
    const std::vector<std::uint8_t> own(packed.begin() + e * size, packed.begin() + (e + 1) * size);
    EXPECT_TRUE(cuda::same_bytes(own, want)) << "expert " << e;
  }
}

}  // namespace
}  // namespace megamoe::sm90
