#include "tests/exact.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <functional>
#include <stdexcept>

#include "tests/independent.h"

namespace megamoe::testing {
namespace {

using independent::bf16_value;
using independent::e2m1_value;
using independent::e4m3_value;
using independent::nearest_bf16;

constexpr double kPartialSumSigma = 8.0;

double truncations(std::int64_t k) { return static_cast<double>(k + k / 16 + 8); }

float f32(double x) { return static_cast<float>(x); }

// An interval, or not even that: NaN in both.
struct Range {
  double low, high;
};

// A row of x, as a GEMM reads it: without the tensor scale, or FP8's scales.
struct TokenRow {
  std::vector<double> values;  // [K]
  float tensor_scale = 1.0f;
  std::vector<float> group_scales;  // FP8: [ceil(K / 128)]
};

TokenRow decode_row(const ActivationRows& x, std::int64_t row) {
  TokenRow result;
  result.values.resize(static_cast<std::size_t>(x.cols));
  if (x.format == ActivationFormat::kNvfp4) result.tensor_scale = x.scales[row];
  if (x.format == ActivationFormat::kFp8) {
    const std::int64_t groups = (x.cols + 127) / 128;
    result.group_scales.assign(x.scales + row * groups, x.scales + (row + 1) * groups);
  }
  for (std::int64_t k = 0; k < x.cols; ++k) {
    double& value = result.values[static_cast<std::size_t>(k)];
    if (x.format == ActivationFormat::kBf16) {
      value = bf16_value(x.values[row * x.row_stride + k]);
    } else if (x.format == ActivationFormat::kFp8) {
      value = e4m3_value(x.codes[row * x.cols + k]);
    } else {
      const int pair = x.codes[(row * x.cols + k) / 2];
      value = e2m1_value(k % 2 == 0 ? pair % 16 : pair / 16) *
              e4m3_value(x.block_scales[(row * x.cols + k) / 16]);
    }
  }
  return result;
}

// One output before the activation: the number that the FP64 sum gives, and where an FP32 one may lie.
struct Output {
  float value;
  Range range;
  double magnitudes;  // sum of those of the products
};

// With FP8 operands.
Output linear_fp8(const TokenRow& x, const WeightMatrix& w, std::int64_t r, const float* bias) {
  static const std::vector<double> kFolded = [] {
    std::vector<double> values;
    for (int i = 0; i < 256 * 16; ++i) values.push_back(independent::folded(i % 16, i / 16));
    return values;
  }();
  double sum = 0, magnitudes = 0, error = 0, promoted = 0;
  const std::int64_t groups = static_cast<std::int64_t>(x.group_scales.size());
  float value = 0;
  for (std::int64_t g = 0; g < groups; ++g) {
    const double d = x.group_scales[static_cast<std::size_t>(g)];
    double dot = 0, size = 0, square = 0;
    for (std::int64_t k = g * 128; k < std::min(w.cols, g * 128 + 128); k += 2) {
      const double* folded = &kFolded[std::size_t{16} * w.scales[(r * w.cols + k) / 16]];
      const double* v = &x.values[static_cast<std::size_t>(k)];
      const std::uint8_t pair = w.codes[(r * w.cols + k) / 2];
      for (const double product : {v[0] * folded[pair % 16], v[1] * folded[pair / 16]}) {
        dot += product;
        size += std::abs(product);
        square += product * product;
      }
    }
    sum += d * dot;
    value = f32(static_cast<double>(value) + d * static_cast<double>(f32(dot)));
    magnitudes = std::max(magnitudes, size * (kExactLimit / kFp8ExactLimit));
    promoted += d * std::abs(dot);
    error += d * kFp8GroupError * std::min(size, kPartialSumSigma * std::sqrt(square));
  }
  const double factor = 8.0 * static_cast<double>(w.tensor_scale);
  const double added = bias == nullptr ? 0.0 : bias[r];
  // Each promotion rounds once, to half of the last bit of a partial sum.
  error += static_cast<double>(groups) * 0x1p-24 * (promoted + error);
  error = error * factor + 3 * 0x1p-24 * (std::abs(sum * factor) + std::abs(added));
  const double exact = sum * factor + added;
  value = f32(static_cast<double>(f32(8.0 * value)) * w.tensor_scale);
  if (bias != nullptr) value = f32(static_cast<double>(value) + added);
  return {value, {exact - error, exact + error}, magnitudes};
}

Output linear(const TokenRow& x, const WeightMatrix& w, std::int64_t r, const float* bias) {
  if (!x.group_scales.empty()) return linear_fp8(x, w, r, bias);
  static const std::array<double, 256> kEven = [] {
    std::array<double, 256> values;
    for (int pair = 0; pair < 256; ++pair) values[static_cast<std::size_t>(pair)] = e2m1_value(pair % 16);
    return values;
  }();
  static const std::array<double, 256> kOdd = [] {
    std::array<double, 256> values;
    for (int pair = 0; pair < 256; ++pair) values[static_cast<std::size_t>(pair)] = e2m1_value(pair / 16);
    return values;
  }();
  double sum = 0, magnitudes = 0, squares = 0;
  const std::uint8_t* codes = w.codes + r * (w.cols / 2);
  const std::uint8_t* scales = w.scales + r * (w.cols / 16);
  const double* v = x.values.data();
  for (std::int64_t block = 0; block < w.cols / 16; ++block, codes += 8, v += 16) {
    const double scale = e4m3_value(scales[block]);
    double dot = 0, size = 0, square = 0;
    for (std::size_t j = 0; j < 8; ++j) {
      const double even = v[2 * j] * kEven[codes[j]], odd = v[2 * j + 1] * kOdd[codes[j]];
      dot += even + odd;
      size += std::abs(even) + std::abs(odd);
      square += even * even + odd * odd;
    }
    sum += dot * scale;
    magnitudes += size * scale;
    squares += square * scale * scale;
  }
  const double largest = std::min(magnitudes, kPartialSumSigma * std::sqrt(squares));
  const double factor = static_cast<double>(x.tensor_scale) * static_cast<double>(w.tensor_scale);
  const double added = bias == nullptr ? 0.0 : bias[r];
  // Four roundings: sum, two scales, bias.
  const double error = truncations(w.cols) * 0x1p-23 * largest * factor +
                       4 * 0x1p-24 * (std::abs(sum * factor) + std::abs(added));
  const double exact = sum * factor + added;
  float value =
      f32(static_cast<double>(f32(static_cast<double>(f32(sum)) * x.tensor_scale)) * w.tensor_scale);
  if (bias != nullptr) value = f32(static_cast<double>(value) + added);
  return {value, {exact - error, exact + error}, magnitudes};
}

// ---- The activation

double real_silu(double x) { return x / (1.0 + std::exp(-x)); }
// Where it is least.
constexpr double kSiluValley = -1.2784645427610738;

Range silu_range(Range x) {
  const double a = real_silu(x.low), b = real_silu(x.high);
  Range range{std::min(a, b), std::max(a, b)};
  if (x.low < kSiluValley && x.high > kSiluValley) range.low = real_silu(kSiluValley);
  return range;
}

Range product(Range a, Range b) {
  const double ends[] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
  return {*std::min_element(ends, ends + 4), *std::max_element(ends, ends + 4)};
}

// By some FP32 roundings, each 2^-24 of the value, and by what is lost among subnormal numbers.
Range widen(Range x, double roundings, double subnormal) {
  const double by = roundings * 0x1p-24;
  return {x.low - by * std::abs(x.low) - subnormal, x.high + by * std::abs(x.high) + subnormal};
}

struct HRange {
  Range gate, h;  // what the gate columns hold, and h
};

HRange activate(const ActivationConfig& config, Range gate, Range up) {
  if (config.kind == Activation::kRelu2) {
    const Range r{std::max(up.low, 0.0), std::max(up.high, 0.0)};
    const Range h = widen(product(r, r), 2, 0x1p-149);
    return {{0, 0}, {r.low == 0 ? 0 : h.low, r.high == 0 ? 0 : h.high}};
  }
  if (config.kind != Activation::kSwiGlu) {
    const double limit = config.limit;
    gate = {std::min(gate.low, limit), std::min(gate.high, limit)};
    up = {std::clamp(up.low, -limit, limit), std::clamp(up.high, -limit, limit)};
  }
  // silu's own error is 3.5 units of 2^-23; below -87, where exp is subnormal, 2^-142.
  double roundings = 8;
  Range s;
  if (config.kind == Activation::kGptOss) {
    // gate * sigmoid(alpha gate); the rounding of alpha * gate counts that many times in exp.
    const double alpha = config.alpha;
    s = silu_range({alpha * gate.low, alpha * gate.high});
    s = {s.low / alpha, s.high / alpha};
    roundings += alpha * std::max(std::abs(gate.low), std::abs(gate.high)) + 4;
    up = widen({up.low + 1, up.high + 1}, 1, 0);
  } else {
    s = silu_range(gate);
  }
  s = widen(s, roundings, 0x1p-140);
  return {s, widen(product(s, up), 2, 0x1p-149)};
}

Range as_bf16(Range x) {
  return {bf16_value(nearest_bf16(f32(x.low))), bf16_value(nearest_bf16(f32(x.high)))};
}
bool within(double x, Range range) { return x >= range.low && x <= range.high; }

// One element of h: the value that the FP64 sums give, and where it may lie, as BF16.
struct Hidden {
  double gate, h;
  HRange range;
  double magnitudes;
};

Hidden hidden(const LayerConfig& config, const ExpertWeights& expert, const TokenRow& x, std::int64_t col) {
  const ActivationConfig& activation = config.activation;
  const Output up = linear(x, expert.up, col, expert.up_bias);
  const Output gate = activation.gated() ? linear(x, expert.gate, col, expert.gate_bias) : up;
  const HRange range = activate(activation, gate.range, up.range);
  const bool cut = activation.kind == Activation::kSwiGluClamped || activation.kind == Activation::kGptOss;
  const float g = cut && gate.value > activation.limit ? activation.limit : gate.value;
  const float gate_column =
      activation.kind == Activation::kGptOss
          ? f32(static_cast<double>(g) * independent::sigmoid(f32(static_cast<double>(activation.alpha) * g)))
          : independent::silu(g);
  return {bf16_value(nearest_bf16(gate_column)),
          bf16_value(nearest_bf16(independent::activation(activation, gate.value, up.value))),
          {as_bf16(range.gate), as_bf16(range.h)},
          std::max(gate.magnitudes, up.magnitudes)};
}

bool same_number(double a, double b) { return (std::isnan(a) && std::isnan(b)) || a == b; }

// ---- Which outputs

struct Unit {
  std::int64_t row, group;
};

// Units of `width` columns: all, or about samples / width of them and at least one of each row.
std::vector<Unit> choose_units(std::int64_t rows, std::int64_t cols, std::int64_t width,
                               std::int64_t samples) {
  const std::int64_t groups = cols / width;
  std::vector<Unit> units;
  if (rows == 0) return units;
  const std::int64_t passes = (std::max(samples / width, rows) + rows - 1) / rows;
  if (passes >= groups) {
    for (std::int64_t i = 0; i < rows * groups; ++i) units.push_back({i / groups, i % groups});
    return units;
  }
  Random random(static_cast<std::uint64_t>(rows * cols));
  // A row's groups are cut into as many pieces as it gets samples.
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t pass = 0; pass < passes; ++pass) {
      units.push_back({row, random.integer(pass * groups / passes, (pass + 1) * groups / passes - 1)});
    }
  }
  for (const std::int64_t row : {std::int64_t{0}, rows - 1}) {
    units.push_back({row, 0});
    units.push_back({row, groups - 1});
  }
  return units;
}

using UnitCheck = std::function<void(const ExpertWeights&, const TokenRow&, const Unit&, Verdict&)>;

Verdict check_units(const GemmCall& call, std::vector<Unit> units, const UnitCheck& check) {
  const std::int64_t experts = call.layer.config.num_experts;
  // Neighbours share their decoded row.
  std::sort(units.begin(), units.end(),
            [](const Unit& a, const Unit& b) { return a.row != b.row ? a.row < b.row : a.group < b.group; });
  Verdict total;
#pragma omp parallel
  {
    Verdict own;
    TokenRow row;
    std::int64_t decoded = -1;
#pragma omp for schedule(static)
    for (std::size_t i = 0; i < units.size(); ++i) {
      const Unit& unit = units[i];
      if (unit.row != decoded) {
        row = decode_row(call.x, call.gather != nullptr ? call.gather[unit.row] : unit.row);
        decoded = unit.row;
      }
      const auto expert =
          std::upper_bound(call.offsets, call.offsets + experts + 1, unit.row) - call.offsets - 1;
      check(call.layer.experts[static_cast<std::size_t>(expert)], row, unit, own);
    }
#pragma omp critical
    total.add(own);
  }
  return total;
}

std::string describe(const Unit& unit, std::int64_t col, double got, double want, Range range) {
  return (::testing::Message() << "row " << unit.row << ", column " << col << ": got " << got << ", want "
                               << want << " in [" << range.low << ", " << range.high << "]")
      .GetString();
}

// Notes one output. A fault must be the same fault; all else must lie in the range.
void note(const Unit& unit, std::int64_t col, double got, double want, Range range, Verdict& verdict) {
  ++verdict.checked;
  const bool fault = !std::isfinite(want);
  if (!fault && range.low != range.high) ++verdict.open;
  if (got == 0 && want == 0 && std::signbit(got) != std::signbit(want)) ++verdict.zero_signs;
  if (!same_number(got, want)) {
    ++verdict.different;
    if (verdict.first_different.empty()) verdict.first_different = describe(unit, col, got, want, range);
  }
  if (fault ? !same_number(got, want) : !within(got, range) || !within(want, range)) {
    ++verdict.beyond;
    if (verdict.first_beyond.empty()) verdict.first_beyond = describe(unit, col, got, want, range);
  }
}

// ---- A block of h in NVFP4

// The place of a code among all, in the order of their values; -0 stands below +0.
int place(int code) { return code < 8 ? code : 7 - code; }

void note_block(const Unit& unit, const std::vector<Hidden>& h, const ActivationRows& got, Verdict& verdict) {
  const float g = got.scales[unit.row];
  const std::int64_t block = unit.row * (got.cols / 16) + unit.group;
  const int scale = got.block_scales[block];
  bool finite = true;
  double amax = 0;
  Range amax_range{0, 0};
  for (const Hidden& x : h) {
    finite = finite && std::isfinite(x.h);
    amax = std::max(amax, std::abs(x.h));
    const Range& r = x.range.h;
    const double least = r.low <= 0 && r.high >= 0 ? 0.0 : std::min(std::abs(r.low), std::abs(r.high));
    amax_range.low = std::max(amax_range.low, least);
    amax_range.high = std::max({amax_range.high, std::abs(r.low), std::abs(r.high)});
  }
  const int want_scale = finite ? independent::nvfp4_scale(amax, g).code : 0x7F;
  bool allowed = scale == want_scale;
  int lowest = want_scale, highest = want_scale;
  if (finite) {
    // A block of zeros has the scale 1, one next to zero the least.
    lowest = amax_range.low > 0 ? independent::nvfp4_scale(amax_range.low, g).code
             : amax > 0         ? 1
                                : want_scale;
    highest = independent::nvfp4_scale(amax_range.high, g).code;
    allowed = allowed || (scale >= lowest && scale <= highest) || (amax_range.low == 0 && scale == 0x38);
  }
  ++verdict.scales;
  if (scale != want_scale) ++verdict.different_scales;
  for (std::int64_t j = 0; j < 16; ++j) {
    const Hidden& x = h[static_cast<std::size_t>(j)];
    const int pair = got.codes[block * 8 + j / 2], code = j % 2 == 0 ? pair % 16 : pair / 16;
    const int want = finite ? independent::nvfp4_code(x.h, want_scale, g) : 0;
    Range places{static_cast<double>(place(want)), static_cast<double>(place(want))};
    if (finite && allowed) {  // under the scale that was found
      places = {static_cast<double>(place(independent::nvfp4_code(x.range.h.low, scale, g))),
                static_cast<double>(place(independent::nvfp4_code(x.range.h.high, scale, g)))};
    }
    ++verdict.checked;
    if (places.low != places.high || lowest != highest) ++verdict.open;
    const auto text = [&] {
      return (::testing::Message() << "row " << unit.row << ", column " << unit.group * 16 + j
                                   << ": got code " << code << " under scale " << scale << ", want " << want
                                   << " under " << want_scale << " (" << lowest << " to " << highest
                                   << "), h " << x.h << " in [" << x.range.h.low << ", " << x.range.h.high
                                   << "], tensor scale " << g)
          .GetString();
    };
    const bool zeros = code % 8 == 0 && want % 8 == 0;
    if (zeros && code != want) ++verdict.zero_signs;
    const bool different = code != want && !zeros;
    if (different) ++verdict.different;
    if (different || scale != want_scale) {
      if (verdict.first_different.empty()) verdict.first_different = text();
    }
    if (!allowed || !within(place(code), places)) {
      ++verdict.beyond;
      if (verdict.first_beyond.empty()) verdict.first_beyond = text();
    }
  }
}

}  // namespace

void Verdict::add(const Verdict& other) {
  checked += other.checked;
  different += other.different;
  zero_signs += other.zero_signs;
  open += other.open;
  beyond += other.beyond;
  scales += other.scales;
  different_scales += other.different_scales;
  worst = std::max(worst, other.worst);
  largest_sum = std::max(largest_sum, other.largest_sum);
  if (first_beyond.empty()) first_beyond = other.first_beyond;
  if (first_different.empty()) first_different = other.first_different;
}

Verdict check_gemm1(const GemmCall& call, L1Output mode, const ActivationRows& h, std::int64_t samples) {
  const LayerConfig& config = call.layer.config;
  const std::int64_t rows = call.offsets[config.num_experts], width = mode == L1Output::kNvfp4 ? 16 : 1;
  if (mode == L1Output::kFp8) throw std::invalid_argument("check_gemm1 knows no fp8");
  return check_units(call, choose_units(rows, config.intermediate, width, samples),
                     [&](const ExpertWeights& expert, const TokenRow& x, const Unit& unit, Verdict& verdict) {
                       std::vector<Hidden> block;
                       for (std::int64_t j = 0; j < width; ++j) {
                         block.push_back(hidden(config, expert, x, unit.group * width + j));
                         verdict.largest_sum = std::max(verdict.largest_sum, block.back().magnitudes);
                       }
                       if (mode == L1Output::kNvfp4) return note_block(unit, block, h, verdict);
                       const Hidden& want = block[0];
                       const bf16* row = h.values + unit.row * h.row_stride;
                       const std::int64_t i = unit.group;
                       if (mode == L1Output::kCompactBf16) {
                         note(unit, i, bf16_value(row[i]), want.h, want.range.h, verdict);
                       } else {
                         const std::int64_t at = i / 8 * 16 + i % 8;
                         note(unit, at, bf16_value(row[at]), want.gate, want.range.gate, verdict);
                         note(unit, at + 8, bf16_value(row[at + 8]), want.h, want.range.h, verdict);
                       }
                     });
}

Verdict check_gemm2(const GemmCall& call, const float* y, std::int64_t samples) {
  const LayerConfig& config = call.layer.config;
  return check_units(call, choose_units(call.offsets[config.num_experts], config.hidden, 1, samples),
                     [&](const ExpertWeights& expert, const TokenRow& x, const Unit& unit, Verdict& verdict) {
                       const Output want = linear(x, expert.down, unit.group, expert.down_bias);
                       const float got = y[unit.row * config.hidden + unit.group];
                       verdict.largest_sum = std::max(verdict.largest_sum, want.magnitudes);
                       const double middle = (want.range.low + want.range.high) / 2;
                       const double error = (want.range.high - want.range.low) / 2;
                       if (error > 0) verdict.worst = std::max(verdict.worst, std::abs(got - middle) / error);
                       note(unit, unit.group, got, want.value, want.range, verdict);
                     });
}

// ---- Layers and rows

namespace {

std::vector<std::uint8_t> random_bytes(Random& random, std::int64_t count) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count));
  std::size_t i = 0;
  while (i < bytes.size()) {
    std::uint64_t word = random.bits();
    for (int b = 0; b < 8 && i < bytes.size(); ++b, word >>= 8) bytes[i++] = static_cast<std::uint8_t>(word);
  }
  return bytes;
}

// E4M3 bytes. kRandom: 2^-3 to 2^3, so that sums do not fit 24 bits; one in 64 anything up to 2^5, 0 and
// subnormals included.
std::vector<std::uint8_t> random_scales(Random& random, std::int64_t count, Operands operands, bool weights) {
  std::vector<std::uint8_t> bytes = random_bytes(random, count);
  for (std::uint8_t& b : bytes) {
    if (operands == Operands::kExact) {
      b = static_cast<std::uint8_t>(weights ? 0x38 + b % 8 : 0x30 + b % 3 * 8);  // 1 to 1.875; 0.5, 1, 2
    } else {
      b = static_cast<std::uint8_t>(b < 4 ? random.integer(0, 0x60) : 0x20 + b % 48);
    }
  }
  return bytes;
}

// The root mean square of a code times such a scale, about.
float typical(Operands operands) { return operands == Operands::kExact ? 4.2f : 8.0f; }

// kExact: a quarter of the codes 1 or -1, the others 0; scales are powers of two.
void fill_fp8(Rows& x, Operands operands, Random& random) {
  for (float& d : x.scales) {
    d = operands == Operands::kExact
            ? std::exp2(static_cast<float>(random.integer(-2, 1)))
            : random.uniform(0.3f, 1.5f) * (random.integer(0, 7) == 0 ? 0.06f : 0.01f);
  }
  for (std::uint8_t& code : x.codes) {
    const float value =
        operands == Operands::kExact ? static_cast<float>(random.integer(-4, 4)) / 4 : random.bell() * 100;
    code = static_cast<std::uint8_t>(
        independent::nearest_e4m3(operands == Operands::kExact ? std::trunc(value) : value));
  }
}

}  // namespace

std::unique_ptr<TestLayer> wide_layer(const LayerConfig& config, Operands operands, bool bias,
                                      std::uint64_t seed) {
  Random random(seed);
  auto layer = std::make_unique<TestLayer>(config);
  const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
    const float g = random.uniform(0.5f, 1.5f) / (typical(operands) * std::sqrt(static_cast<float>(cols)));
    std::vector<std::uint8_t> codes = random_bytes(random, rows * cols / 2),
                              scales = random_scales(random, rows * cols / 16, operands, true);
    return layer->nvfp4(rows, cols, g, std::move(codes), std::move(scales));
  };
  const auto floats = [&](std::int64_t count) -> const float* {
    if (!bias) return nullptr;
    std::vector<float> values(static_cast<std::size_t>(count));
    for (float& v : values) v = random.bell();
    return layer->floats(std::move(values));
  };
  for (ExpertWeights& expert : layer->weights.experts) {
    if (config.activation.gated()) {
      expert.gate = matrix(config.intermediate, config.hidden);
      expert.gate_bias = floats(config.intermediate);
    }
    expert.up = matrix(config.intermediate, config.hidden);
    expert.down = matrix(config.hidden, config.intermediate);
    expert.up_bias = floats(config.intermediate);
    expert.down_bias = floats(config.hidden);
  }
  validate(layer->weights);
  return layer;
}

Rows wide_rows(ActivationFormat format, std::int64_t rows, std::int64_t cols, Operands operands,
               std::uint64_t seed) {
  Random random(seed);
  Rows x(format, rows, cols, 0);
  if (format == ActivationFormat::kFp8) {
    fill_fp8(x, operands, random);
    return x;
  }
  const auto row_size = [&] { return random.integer(0, 7) == 0 ? 6.0f : 1.0f; };
  if (format == ActivationFormat::kNvfp4) {
    x.codes = random_bytes(random, rows * cols / 2);
    x.block_scales = random_scales(random, rows * cols / 16, operands, false);
    for (float& g : x.scales) g = random.uniform(0.3f, 1.5f) / typical(operands) * row_size();
  } else {
    for (std::int64_t r = 0; r < rows; ++r) {
      const float size = row_size();
      for (std::int64_t k = 0; k < cols; ++k) {
        const float v = operands == Operands::kExact ? static_cast<float>(random.integer(-6, 6)) * 0.5f
                                                     : random.bell() * size;
        x.values[static_cast<std::size_t>(r * cols + k)] = nearest_bf16(v);
      }
    }
  }
  return x;
}

std::vector<float> h_scales(std::int64_t rows, std::uint64_t seed) {
  Random random(seed);
  std::vector<float> scales(static_cast<std::size_t>(rows));
  for (float& g : scales) g = random.uniform(0.003f, 0.01f);
  return scales;
}

}  // namespace megamoe::testing
