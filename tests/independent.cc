#include "tests/independent.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace megamoe::independent {
namespace {

constexpr double kE2M1[16] = {0.0,  0.5,  1.0,  1.5,  2.0,  3.0,  4.0,  6.0,
                              -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0};

std::uint32_t float_bits(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, sizeof(b));
  return b;
}

// The index of the value in values[0..count), ascending, that is nearest to `a`; a tie goes to the even
// index.
template <class Value>
int nearest(double a, int count, const Value& value) {
  if (a >= value(count - 1)) return count - 1;  // far away all distances look alike
  int best = 0;
  for (int i = 1; i < count; ++i) {
    const double here = std::abs(value(i) - a), there = std::abs(value(best) - a);
    if (here < there || (here == there && i % 2 == 0)) best = i;
  }
  return best;
}

// Double has more than twice the bits of FP32: one operation in double, then rounding to float, is the FP32
// operation.
float f32(double x) { return static_cast<float>(x); }

float exp_recipe(float x) {
  if (x != x) return x;
  if (x > 88.73f) return std::numeric_limits<float>::infinity();
  if (x < -103.98f) return 0.0f;
  const float log2_e = f32(std::log2(std::exp(1.0)));
  const double ln2 = std::log(2.0);
  const double high = std::round(ln2 * 4096.0) / 4096.0;
  const float low = f32(ln2 - high);
  const double n = std::nearbyint(static_cast<double>(f32(static_cast<double>(x) * log2_e)));
  const float r = f32(static_cast<double>(f32(x - n * high)) - static_cast<double>(f32(n * low)));
  float p = f32(1.0 / 5040.0);
  for (const double divisor : {720.0, 120.0, 24.0, 6.0, 2.0, 1.0, 1.0}) {
    p = f32(static_cast<double>(f32(static_cast<double>(p) * r)) + static_cast<double>(f32(1.0 / divisor)));
  }
  return f32(std::ldexp(static_cast<double>(p), static_cast<int>(n)));
}

double decode_e4m3_byte(int code) {
  const int exponent = code / 8 % 16, mantissa = code % 8;
  double value = exponent == 0 ? mantissa / 512.0 : (8 + mantissa) * std::exp2(exponent - 10);
  if (exponent == 15 && mantissa == 7) value = std::numeric_limits<double>::quiet_NaN();
  return code >= 128 ? -value : value;
}

int weight_code(const WeightMatrix& w, std::int64_t r, std::int64_t k) {
  const int byte = w.codes[(r * w.cols + k) / 2];
  return k % 2 == 0 ? byte % 16 : byte / 16;
}

double raw_weight(const WeightMatrix& w, std::int64_t r, std::int64_t k) {
  if (w.format == WeightFormat::kF32) return w.f32[r * w.cols + k];
  if (w.format == WeightFormat::kBf16) return bf16_value(w.b16[r * w.cols + k]);
  return kE2M1[weight_code(w, r, k)] * e4m3_value(w.scales[(r * w.cols + k) / 16]);
}

}  // namespace

double folded(int code, int scale) {
  static const std::vector<double> table = [] {
    std::vector<double> values;
    for (int i = 0; i < 16 * 256; ++i) {
      const double value = kE2M1[i % 16] * decode_e4m3_byte(i / 16) / 8.0;
      values.push_back(e4m3_value(nearest_e4m3(f32(value))));
    }
    return values;
  }();
  return table[static_cast<std::size_t>(scale * 16 + code)];
}

double e2m1_value(int code) { return kE2M1[code]; }

double e4m3_value(int code) {
  static const std::vector<double> table = [] {
    std::vector<double> values;
    for (int c = 0; c < 256; ++c) values.push_back(decode_e4m3_byte(c));
    return values;
  }();
  return table[static_cast<std::size_t>(code)];
}

double bf16_value(bf16 x) {
  const std::uint32_t b = static_cast<std::uint32_t>(x.bits) * 65536u;
  float value;
  std::memcpy(&value, &b, sizeof(b));
  return static_cast<double>(value);
}

int nearest_e2m1(float x) {
  if (x != x) return 7;
  return nearest(std::abs(static_cast<double>(x)), 8, e2m1_value) + (std::signbit(x) ? 8 : 0);
}

int nearest_e4m3(float x) {
  if (x != x) return 0x7F;
  return nearest(std::abs(static_cast<double>(x)), 127, e4m3_value) + (std::signbit(x) ? 128 : 0);
}

bf16 nearest_bf16(float x) {
  const auto top = static_cast<std::uint16_t>(float_bits(x) / 65536u);
  if (x != x) return {static_cast<std::uint16_t>(top | 0x40)};
  if (std::isinf(x)) return {top};
  const bf16 inner{top}, outer{static_cast<std::uint16_t>(top + 1)};
  // Above the largest finite value the next step would be 2^128.
  const double far = std::isinf(bf16_value(outer)) ? std::copysign(std::exp2(128.0), x) : bf16_value(outer);
  const double to_inner = std::abs(x - bf16_value(inner)), to_outer = std::abs(x - far);
  return to_inner < to_outer || (to_inner == to_outer && top % 2 == 0) ? inner : outer;
}

float sigmoid(float x) {
  const float e = exp_recipe(-std::abs(x));
  return f32(static_cast<double>(x < 0 ? e : 1.0f) / static_cast<double>(f32(1.0 + e)));
}

float silu(float x) {
  const float e = exp_recipe(-std::abs(x));
  const float numerator = x < 0 ? f32(static_cast<double>(x) * e) : x;
  return f32(static_cast<double>(numerator) / static_cast<double>(f32(1.0 + e)));
}

float activation(const ActivationConfig& config, float gate, float up) {
  if (config.kind == Activation::kRelu2) return up <= 0 ? 0.0f : f32(static_cast<double>(up) * up);
  if (config.kind != Activation::kSwiGlu) {
    if (gate > config.limit) gate = config.limit;
    if (up > config.limit) up = config.limit;
    if (up < -config.limit) up = -config.limit;
  }
  if (config.kind != Activation::kGptOss) return f32(static_cast<double>(silu(gate)) * up);
  const float inner = f32(static_cast<double>(config.alpha) * gate);
  const float left = f32(static_cast<double>(gate) * sigmoid(inner));
  return f32(static_cast<double>(left) * static_cast<double>(f32(static_cast<double>(up) + 1.0)));
}

float dynamic_scale(const std::vector<bf16>& x) {
  double amax = 0;
  for (const bf16 v : x) {
    if (std::isfinite(bf16_value(v))) amax = std::max(amax, std::abs(bf16_value(v)));
  }
  return amax == 0 ? 1.0f : f32(amax / 2688.0);
}

BlockScale nvfp4_scale(double amax, float tensor_scale) {
  const float wanted = amax == 0 ? 1.0f : f32(amax / static_cast<double>(f32(6.0 * tensor_scale)));
  return {nearest_e4m3(std::max(0x1p-9f, std::min(448.0f, wanted))), wanted > 448.0 * (1.0 + 0x1p-20)};
}

int nvfp4_code(double v, int scale, float tensor_scale) {
  if (v == 0) return std::signbit(v) ? 8 : 0;
  return nearest_e2m1(f32(v / f32(e4m3_value(scale) * tensor_scale)));
}

Row make_row(const std::vector<bf16>& x, ActivationFormat format, float tensor_scale) {
  Row row;
  row.format = format;
  std::vector<double> v;
  for (const bf16 b : x) v.push_back(bf16_value(b));
  row.values = v;
  if (format == ActivationFormat::kFp8) {
    for (std::size_t first = 0; first < v.size(); first += 128) {
      const std::size_t last = std::min(first + 128, v.size());
      double amax = 0;
      for (std::size_t k = first; k < last; ++k) {
        if (std::isfinite(v[k])) amax = std::max(amax, std::abs(v[k]));
      }
      const float d = amax == 0 ? 1.0f : f32(amax / 448.0);
      row.scales.push_back(d);
      for (std::size_t k = first; k < last; ++k) {
        const int code = std::isfinite(v[k]) ? nearest_e4m3(f32(v[k] / d)) : 0x7F;
        row.codes.push_back(static_cast<std::uint8_t>(code));
        row.values[k] = e4m3_value(code);
      }
    }
  }
  if (format == ActivationFormat::kNvfp4) {
    row.scales = {tensor_scale};
    row.codes.assign(v.size() / 2, 0);
    for (std::size_t first = 0; first < v.size(); first += 16) {
      double amax = 0;
      bool finite = true;
      for (std::size_t k = first; k < first + 16; ++k) {
        finite = finite && std::isfinite(v[k]);
        amax = std::max(amax, std::abs(v[k]));
      }
      const BlockScale scale = finite ? nvfp4_scale(amax, tensor_scale) : BlockScale{0x7F, false};
      if (scale.saturated) ++row.saturated;
      row.block_scales.push_back(static_cast<std::uint8_t>(scale.code));
      for (std::size_t k = first; k < first + 16; ++k) {
        const int code = finite ? nvfp4_code(v[k], scale.code, tensor_scale) : 0;
        row.codes[k / 2] = static_cast<std::uint8_t>(row.codes[k / 2] + code * (k % 2 == 0 ? 1 : 16));
        row.values[k] = e2m1_value(code) * e4m3_value(scale.code);
      }
    }
  }
  return row;
}

std::vector<float> linear(const Row& x, const WeightMatrix& w, const float* bias) {
  std::vector<float> y;
  for (std::int64_t r = 0; r < w.rows; ++r) {
    float result = 0.0f;
    if (x.format == ActivationFormat::kNvfp4) {
      for (std::int64_t first = 0; first < w.cols; first += 16) {
        double block = 0;
        for (std::int64_t k = first; k < first + 16; ++k) {
          block += x.values[static_cast<std::size_t>(k)] * raw_weight(w, r, k);
        }
        result = f32(result + block);
      }
      result = f32(static_cast<double>(f32(static_cast<double>(result) * x.scales[0])) * w.tensor_scale);
    } else if (x.format == ActivationFormat::kFp8) {
      double sum = 0;
      for (std::int64_t first = 0; first < w.cols; first += 128) {
        double tile = 0;
        for (std::int64_t k = first; k < std::min(first + 128, w.cols); ++k) {
          tile += x.values[static_cast<std::size_t>(k)] *
                  folded(weight_code(w, r, k), w.scales[(r * w.cols + k) / 16]);
        }
        sum += tile * static_cast<double>(x.scales[static_cast<std::size_t>(first / 128)]);
      }
      result = f32(sum * 8.0 * w.tensor_scale);
    } else {
      double sum = 0;
      for (std::int64_t k = 0; k < w.cols; ++k) {
        sum += x.values[static_cast<std::size_t>(k)] * raw_weight(w, r, k);
      }
      result = f32(w.format == WeightFormat::kNvfp4 ? sum * w.tensor_scale : sum);
    }
    y.push_back(bias == nullptr ? result : f32(static_cast<double>(result) + bias[r]));
  }
  return y;
}

std::vector<double> absolute_linear(const Row& x, const WeightMatrix& w) {
  std::vector<double> y(static_cast<std::size_t>(w.rows), 0.0);
  for (std::int64_t r = 0; r < w.rows; ++r) {
    double sum = 0;
    for (std::int64_t k = 0; k < w.cols; ++k) {
      const bool fp8 = x.format == ActivationFormat::kFp8;
      const double scale = fp8 ? x.scales[static_cast<std::size_t>(k / 128)] * 8.0
                           : x.format == ActivationFormat::kNvfp4 ? x.scales[0]
                                                                  : 1.0;
      const double weight =
          fp8 ? folded(weight_code(w, r, k), w.scales[(r * w.cols + k) / 16]) : raw_weight(w, r, k);
      sum += std::abs(x.values[static_cast<std::size_t>(k)] * scale * weight);
    }
    y[static_cast<std::size_t>(r)] = w.format == WeightFormat::kNvfp4 ? sum * w.tensor_scale : sum;
  }
  return y;
}

PairResult run_expert(const LayerConfig& config, const ExpertWeights& expert, const Row& x,
                      float h_tensor_scale) {
  const std::vector<float> up = linear(x, expert.up, expert.up_bias);
  const std::vector<float> gate = config.activation.gated() ? linear(x, expert.gate, expert.gate_bias) : up;
  PairResult result;
  for (std::size_t i = 0; i < up.size(); ++i) {
    result.h.push_back(nearest_bf16(activation(config.activation, gate[i], up[i])));
  }
  result.h_row = make_row(result.h, x.format, h_tensor_scale);
  result.y = linear(result.h_row, expert.down, expert.down_bias);
  return result;
}

}  // namespace megamoe::independent
