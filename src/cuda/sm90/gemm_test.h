// gemm_test.h: the two GEMMs on the GPU as their tests call them: a layer, rows and results in host memory.
#pragma once

#include <memory>
#include <ostream>
#include <vector>

#include "cuda/gpu_test.h"
#include "cuda/sm90/gemm.h"
#include "tests/exact.h"

namespace megamoe::sm90 {

// Skips where there is no Hopper GPU.
class HopperTest : public cuda::GpuTest {
 protected:
  void SetUp() override {
    cuda::GpuTest::SetUp();
    if (IsSkipped()) return;
    const cuda::DeviceInfo info = cuda::device_info(0);
    if (info.major != 9 || info.minor != 0) GTEST_SKIP() << "no Hopper GPU, but " << info.name;
  }
};

inline std::size_t size(std::int64_t n) { return static_cast<std::size_t>(n); }

// The rows that each expert has, and what they read.
struct RoutedRows {
  std::vector<std::int64_t> offsets;  // [experts + 1]
  std::vector<std::int32_t> gather;   // [rows], or empty: row r reads r
  std::int64_t rows() const { return offsets.back(); }
  int experts() const { return static_cast<int>(offsets.size()) - 1; }
};
// `rows` rows dealt out unevenly, where there are several experts at least one of them without any; they read
// any of `tokens` rows, or, where that is 0, their own.
RoutedRows ragged_rows(std::int64_t rows, int experts, std::int64_t tokens, cuda::Random& random);

inline std::vector<TileChoice> tiles_for(ActivationFormat format) { return all_tiles(operand_type(format)); }
// One of each kind of tile. BF16: that shares K, of four row tiles, of three, of two; FP8: of one row tile
// for each warpgroup, and of two.
inline std::vector<TileChoice> tile_kinds(OperandType type) {
  if (type == OperandType::kFp8) return {{narrow_tile(type), 4}, {wide_tile(type), 4}};
  return {{8, 1}, {narrow_tile(type), 4}, {wide_tile(type), 3}, {widest_tile(type), 2}};
}
inline std::vector<TileChoice> tile_kinds(ActivationFormat format) {
  return tile_kinds(operand_type(format));
}
inline std::ostream& operator<<(std::ostream& out, const TileChoice& tile) {
  if (tile == TileChoice{}) return out << "the tile chosen";
  return out << "tile of " << tile.tokens << " x " << tile.row_tiles;
}

struct GemmOptions {
  TileChoice tile = {};       // {}: the one for max_rows
  std::int64_t max_rows = 0;  // 0: the number of rows
  int poison = 0x7F;
  bool strided = false;  // BF16 tokens lie further apart than their width
  bool decoded = false;  // NVFP4 rows go in and come out decoded: GroupedInput::decoded, Gemm1::decode_out
};
struct HiddenResult {
  testing::Rows h;  // [rows, I]; kInterleavedBf16: [rows, 2I]
  std::uint64_t saturated = 0;
};

// A layer's weights on the GPU, packed.
class DeviceLayer {
 public:
  explicit DeviceLayer(const LayerWeights& weights);
  ~DeviceLayer();

  // Fail where anything is written outside the result's rows. `h_scales` [rows] for kNvfp4. The second reads
  // its own rows: routed.gather is for the first. FP8 rows are put into expert order, and into the kernels'
  // own, here.
  HiddenResult gemm1(const testing::Rows& x, const RoutedRows& routed, L1Output mode,
                     const std::vector<float>& h_scales, const GemmOptions& options = {}) const;
  std::vector<float> gemm2(const testing::Rows& h, const RoutedRows& routed,
                           const GemmOptions& options = {}) const;
  // For each h of one format a call, all in one workspace and none waited for before the next.
  std::vector<std::vector<float>> gemm2_in_a_row(const std::vector<testing::Rows>& h,
                                                 const RoutedRows& routed,
                                                 const GemmOptions& options = {}) const;

 private:
  struct Role;
  GroupedInput input(const Role& role, ActivationFormat format, const RoutedRows& routed,
                     const GemmOptions& options) const;

  LayerConfig config_;
  std::unique_ptr<Role> first_, second_;
};

// What the checks of tests/exact.h want to know of a call of gemm1 or gemm2.
inline testing::GemmCall first_call(const LayerWeights& layer, const testing::Rows& x,
                                    const RoutedRows& routed) {
  return {layer, x.view(), routed.offsets.data(), routed.gather.empty() ? nullptr : routed.gather.data()};
}
inline testing::GemmCall second_call(const LayerWeights& layer, const testing::Rows& h,
                                     const RoutedRows& routed) {
  return {layer, h.view(), routed.offsets.data()};
}

// Bit for bit.
void expect_same(const HiddenResult& got, const HiddenResult& want);
// What NVFP4 rows stand for but for their tensor scales, in h.values.
HiddenResult decoded(const HiddenResult& coded);
// h [rows, I] in BF16 quantised to FP8 by a second implementation.
HiddenResult as_fp8(const testing::Rows& h);
// Where sums are exact every bit is given.
void expect_equal(const testing::Verdict& verdict);

inline constexpr std::int64_t kEverything = std::int64_t{1} << 40;  // outputs to be checked
inline constexpr ActivationFormat kFormats[] = {ActivationFormat::kBf16, ActivationFormat::kFp8,
                                                ActivationFormat::kNvfp4};
// With limits that cut many of the numbers of the random layers.
inline constexpr ActivationConfig kActivations[] = {{.kind = Activation::kSwiGlu},
                                                    {.kind = Activation::kSwiGluClamped, .limit = 1.5f},
                                                    {.kind = Activation::kGptOss, .limit = 2.0f},
                                                    {.kind = Activation::kRelu2}};
// compact, nvfp4 (of FP8 tokens fp8) and, where there is a gate, interleaved.
std::vector<L1Output> modes_of(const LayerConfig& config, ActivationFormat format);

}  // namespace megamoe::sm90
