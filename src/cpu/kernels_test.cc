// The choice of a kernel, and every kernel on the codes and scales that a layer rarely meets.
#include "cpu/kernels.h"

#include <gtest/gtest.h>

#include <cmath>
#include <random>
#include <vector>

#include "base/check.h"
#include "base/processor.h"
#include "cpu/cpu_backend.h"
#include "cpu/decode.h"
#include "cpu/test_kernel.h"
#include "numerics/bf16.h"

namespace megamoe::cpu {
namespace {

// The message of the Error of this code that choosing `name` throws.
std::string refusal(const char* name, ErrorCode code) {
  const ForcedKernel forced(name);
  try {
    chosen_kernel();
  } catch (const Error& error) {
    EXPECT_EQ(error.code(), code) << error.what();
    return error.what();
  }
  ADD_FAILURE() << name << " was accepted";
  return "";
}

TEST(CpuKernels, TheOneThatIsNamedIsChosenAndDescribed) {
  for (const Kernel& kernel : all_kernels()) {
    SCOPED_TRACE(kernel.name);
    if (!kernel.supported) {
      EXPECT_NE(refusal(kernel.name.data(), ErrorCode::kUnsupported).find(kernel.needs), std::string::npos);
      continue;
    }
    const ForcedKernel forced(kernel.name);
    EXPECT_EQ(&chosen_kernel(), &kernel);
    EXPECT_NE(cpu_backend().description().find(fmt::format("the {} kernel", kernel.name)), std::string::npos)
        << cpu_backend().description();
  }
}

TEST(CpuKernels, WithoutANameTheBestIsChosen) {
  const ForcedKernel none("");
  for (const Kernel& kernel : all_kernels()) {
    if (!kernel.supported) continue;
    EXPECT_EQ(&chosen_kernel(), &kernel);
    break;
  }
  EXPECT_TRUE(all_kernels().back().supported);
}

TEST(CpuKernels, PairsOfBf16AreChosenWhereTheyAreFast) {
  const ForcedKernel none("");
  EXPECT_EQ(chosen_kernel().name == "avx512-bf16", has_fast_bf16_dot());
}

TEST(CpuKernels, AnUnknownNameListsTheKnown) {
  const std::string message = refusal("sse9", ErrorCode::kNotFound);
  EXPECT_NE(message.find("'sse9'"), std::string::npos) << message;
  for (const Kernel& kernel : all_kernels()) {
    EXPECT_NE(message.find(kernel.name), std::string::npos) << message;
  }
}

// A matrix [rows, cols] of NVFP4 (for activations, that many rows) with memory of its own.
struct Codes {
  std::vector<std::uint8_t> codes, scales;
  Codes(std::mt19937& random, std::int64_t rows, std::int64_t cols)
      : codes(static_cast<std::size_t>(rows * cols / 2)), scales(static_cast<std::size_t>(rows * cols / 16)) {
    for (auto& v : codes) v = static_cast<std::uint8_t>(random());
    for (auto& v : scales) v = static_cast<std::uint8_t>(random() % 0x7F);
  }
};

TEST(CpuKernels, PackedColumnsAreThoseOfTheMatrix) {
  for (const std::int64_t cols : {16, 48, 64, 80, 208}) {
    std::mt19937 random(static_cast<unsigned>(cols));
    const std::int64_t rows = 48, blocks = cols / kNvfp4Block;
    const Codes w(random, rows, cols);
    WeightMatrix matrix{.format = WeightFormat::kNvfp4, .rows = rows, .cols = cols};
    matrix.codes = w.codes.data();
    matrix.scales = w.scales.data();
    const PackedMatrix packed(matrix, nullptr);
    for (std::int64_t p = 0; p < rows / kPanel; ++p) {
      std::int64_t seen = 0;
      for_each_packed_block(packed.at(p, 0), blocks,
                            [&](std::int64_t b, const std::uint8_t* scales, const std::uint8_t* codes) {
                              EXPECT_EQ(b, seen++);
                              for (std::int64_t r = 0; r < kPanel; ++r) {
                                const std::int64_t row = p * kPanel + r;
                                ASSERT_EQ(scales[r], w.scales[static_cast<std::size_t>(row * blocks + b)]);
                                for (std::int64_t k = 0; k < kNvfp4Block; ++k) {
                                  const DoubledColumns half = doubled_columns(codes + k / 8 * 64);
                                  ASSERT_EQ(
                                      half.columns[k % 8][r],
                                      e2m1_doubled(nibble(w.codes.data(), row * cols + b * kNvfp4Block + k)))
                                      << "row " << row << ", block " << b << ", column " << k;
                                }
                              }
                            });
      EXPECT_EQ(seen, blocks);
    }
  }
}

// What gemm.h defines, one term after the other.
float sum_by_definition(const Codes& w, std::int64_t row, const Codes& x, std::int64_t x_row,
                        std::int64_t cols) {
  float acc = 0.0f;
  for (std::int64_t b = 0; b < cols / kNvfp4Block; ++b) {
    int dot = 0;
    for (std::int64_t k = b * kNvfp4Block; k < (b + 1) * kNvfp4Block; ++k) {
      dot += e2m1_doubled(nibble(w.codes.data(), row * cols + k)) *
             e2m1_doubled(nibble(x.codes.data(), x_row * cols + k));
    }
    const auto at = [&](std::int64_t r) { return static_cast<std::size_t>(r * (cols / kNvfp4Block) + b); };
    acc +=
        static_cast<float>(dot) * 0.25f * (decode_e4m3(w.scales[at(row)]) * decode_e4m3(x.scales[at(x_row)]));
  }
  return acc;
}

// Every number of rows that a tile can have and more than one tile; columns that end within a group; so many
// of both that x is expanded in pieces, whatever the remainder of rows; every E4M3 scale, negative and NaN,
// too; the largest products under the largest scales.
TEST(CpuKernels, HaveTheBitsOfTheDefinition) {
  std::mt19937 random(7);
  struct Shape {
    std::int64_t rows, cols;
  };
  std::vector<Shape> shapes = {{128, 1024 + 80}, {100, 2048}, {101, 2048 + 16},
                               {126, 2048 + 48}, {127, 2048}, {1, 4096}};
  for (std::int64_t rows = 1; rows <= 35; ++rows) shapes.push_back({rows, 16 * (1 + rows % 9)});
  for (const Shape& shape : shapes) {
    const std::int64_t outputs = 3 * kPanel;
    Codes w(random, outputs, shape.cols), x(random, shape.rows, shape.cols);
    // The first panel of w is left out below.
    const auto force = [](std::vector<std::uint8_t>& scales, std::int64_t from, std::size_t step) {
      unsigned code = 0;
      for (auto i = static_cast<std::size_t>(from); i < scales.size(); i += step)
        scales[i] = static_cast<std::uint8_t>(code++);
    };
    force(w.scales, kPanel * (shape.cols / kNvfp4Block), 7);
    force(x.scales, 0, 31);
    if (shape.rows % 7 == 3) {
      for (std::vector<std::uint8_t>* codes : {&w.codes, &x.codes}) {
        for (std::uint8_t& pair : *codes) pair |= 0x77;
      }
      constexpr std::uint8_t kLargest[] = {0x67, 0x68, 0x7E, 0xE7, 0xE8, 0xFE};
      for (std::size_t i = 0; i < x.scales.size(); ++i) x.scales[i] = kLargest[i % std::size(kLargest)];
    }
    WeightMatrix matrix{.format = WeightFormat::kNvfp4, .rows = outputs, .cols = shape.cols};
    matrix.codes = w.codes.data();
    matrix.scales = w.scales.data();
    const PackedMatrix packed(matrix, nullptr);
    const ActivationRows rows{.format = ActivationFormat::kNvfp4,
                              .rows = shape.rows,
                              .cols = shape.cols,
                              .codes = x.codes.data(),
                              .block_scales = x.scales.data()};
    const Slab slab{.matrices = {&packed, nullptr},
                    .num_matrices = 1,
                    .first_panel = 1,
                    .panels = 2,
                    .x = &rows,
                    .first_row = 0,
                    .rows = shape.rows};
    std::vector<float> all_wanted;
    for (std::int64_t p = 0; p < 2; ++p) {
      for (std::int64_t i = 0; i < shape.rows; ++i) {
        for (std::int64_t r = 0; r < kPanel; ++r)
          all_wanted.push_back(sum_by_definition(w, (1 + p) * kPanel + r, x, i, shape.cols));
      }
    }
    for (const Kernel& kernel : all_kernels()) {
      if (!kernel.supported) continue;
      SCOPED_TRACE(fmt::format("{}, {} rows, {} columns", kernel.name, shape.rows, shape.cols));
      auto next_wanted = all_wanted.begin();
      std::vector<float> values(static_cast<std::size_t>(2 * shape.rows * kPanel), -1.0f);
      const Sums sums{slab, values.data()};
      kernel.multiply_nvfp4(sums);
      for (std::int64_t p = 0; p < 2; ++p) {
        for (std::int64_t i = 0; i < shape.rows; ++i) {
          for (std::int64_t r = 0; r < kPanel; ++r) {
            const float actual = sums.at(0, p, i)[r], wanted = *next_wanted++;
            ASSERT_TRUE(bits_of_float(actual) == bits_of_float(wanted) ||
                        (std::isnan(actual) && std::isnan(wanted)))
                << "panel " << p << ", row " << i << ", lane " << r << ": " << actual << " instead of "
                << wanted;
          }
        }
      }
    }
  }
}

// Of BF16 activations gemm.h promises less: an order that depends on nothing but the number of columns. So a
// row alone and a matrix alone have the bits that they have among others, whatever the others' format.
TEST(CpuKernels, Bf16SumsDoNotDependOnWhatElseASlabHas) {
  for (std::int64_t rows = 1; rows <= 35; rows += rows < 17 ? 1 : 6) {
    std::mt19937 random(static_cast<unsigned>(rows));
    const std::int64_t outputs = 3 * kPanel, cols = rows % 3 == 0 ? 1024 * 8 + 48 : 16 * (7 + rows);
    Codes w(random, outputs, cols);
    for (std::size_t i = 5; i < w.scales.size(); i += 91) w.scales[i] |= 0x80;
    w.scales.back() = kE4M3NaN;
    std::vector<bf16> values(static_cast<std::size_t>(outputs * cols)),
        x(static_cast<std::size_t>(rows * cols));
    std::normal_distribution<float> normal;
    for (std::vector<bf16>* all : {&values, &x}) {
      for (bf16& v : *all) v = to_bf16(normal(random));
    }
    // Blocks of x that may be taken for integers, and not quite: zeros, the largest, one bit too many,
    // numbers without a last bit in common, small and large ones, and faults.
    const std::uint16_t blocks[][2] = {{0x0000, 0x8000}, {0x3FFE, 0xBFFE}, {0x3FFF, 0xBFFF},
                                       {0x3FFE, 0x3C01}, {0x3FFE, 0xBB81}, {0x0001, 0x8080},
                                       {0x7B00, 0x7A81}, {0x7F80, 0x3F80}, {0x7FC0, 0x3F80}};
    for (std::size_t b = 0; b < std::size(blocks); ++b) {
      bf16* block =
          x.data() + static_cast<std::int64_t>(b) % rows * cols + static_cast<std::int64_t>(b) / 2 * 16;
      for (int i = 0; i < 16; ++i) block[i].bits = blocks[b][(i + i / 4) % 2];
    }
    WeightMatrix nvfp4{.format = WeightFormat::kNvfp4, .rows = outputs, .cols = cols};
    nvfp4.codes = w.codes.data();
    nvfp4.scales = w.scales.data();
    WeightMatrix b16{.format = WeightFormat::kBf16, .rows = outputs, .cols = cols};
    b16.b16 = values.data();
    const PackedMatrix packed[2] = {{nvfp4, nullptr}, {b16, nullptr}};
    const ActivationRows view{.rows = rows, .cols = cols, .row_stride = cols, .values = x.data()};
    for (const Kernel& kernel : all_kernels()) {
      if (!kernel.supported) continue;
      SCOPED_TRACE(fmt::format("{}, {} rows, {} columns", kernel.name, rows, cols));
      const auto multiply = [&](const Slab& slab) {
        std::vector<float> sums(
            static_cast<std::size_t>(slab.num_matrices * slab.panels * slab.rows * kPanel), -1.0f);
        kernel.multiply_f32({slab, sums.data()});
        return sums;
      };
      Slab all{.num_matrices = 2, .first_panel = 1, .panels = 2, .x = &view, .rows = rows};
      for (const int first : {0, 1}) {
        all.matrices[0] = &packed[first], all.matrices[1] = &packed[1 - first];
        std::vector<float> sums = multiply(all);
        for (std::int64_t i = 0; i < rows; ++i) {
          for (int m = 0; m < 2; ++m) {
            Slab alone{.matrices = {all.matrices[m], nullptr},
                       .num_matrices = 1,
                       .first_panel = 1,
                       .panels = 2,
                       .x = &view,
                       .first_row = i,
                       .rows = 1};
            const std::vector<float> wanted = multiply(alone);
            for (std::int64_t p = 0; p < 2; ++p) {
              const float* actual = Sums{all, sums.data()}.at(m, p, i);
              for (std::int64_t r = 0; r < kPanel; ++r) {
                const float expected = wanted[static_cast<std::size_t>(p * kPanel + r)];
                ASSERT_TRUE(bits_of_float(actual[r]) == bits_of_float(expected) ||
                            (std::isnan(actual[r]) && std::isnan(expected)))
                    << "matrix " << m << ", panel " << p << ", row " << i << ", lane " << r;
              }
            }
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace megamoe::cpu
