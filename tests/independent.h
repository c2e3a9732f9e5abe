// independent.h: the layer once more, for checking the reference: its own tables, its own rounding, plain
// doubles. It shares no code with the library; of the library's headers it uses the plain types alone.
#pragma once

#include <cstdint>
#include <vector>

#include "megamoe/layer.h"

namespace megamoe::independent {

double e2m1_value(int code);  // 0..15
double e4m3_value(int code);  // 0..255; NaN for 0x7F and 0xFF
double bf16_value(bf16 x);
// By a search for the nearest value; ties to the even code.
int nearest_e2m1(float x);
int nearest_e4m3(float x);
bf16 nearest_bf16(float x);

// The FP32 recipe of exp.h, step by step.
float silu(float x);
float sigmoid(float x);
float activation(const ActivationConfig& config, float gate, float up);

// One row of activations with the values its codes stand for, the tensor scale (kNvfp4) left out.
struct Row {
  ActivationFormat format = ActivationFormat::kBf16;
  std::vector<double> values;              // [K]: bf16; e4m3 codes; or e2m1 * block scale
  std::vector<float> scales;               // kFp8: [ceil(K / 128)]; kNvfp4: [1], the tensor scale
  std::vector<std::uint8_t> codes;         // kFp8: [K]; kNvfp4: [K / 2]
  std::vector<std::uint8_t> block_scales;  // kNvfp4: [K / 16]
  std::int64_t saturated = 0;              // blocks whose scale was cut to 448
};
// `tensor_scale` is for kNvfp4 alone.
Row make_row(const std::vector<bf16>& x, ActivationFormat format, float tensor_scale);
// The steps of kNvfp4. The scale of a block of largest magnitude amax (finite), and whether it was cut to
// 448; the code of v (finite) under that scale.
struct BlockScale {
  int code;
  bool saturated;
};
BlockScale nvfp4_scale(double amax, float tensor_scale);
int nvfp4_code(double v, int scale, float tensor_scale);
// amax / 2688 over the row's finite values.
float dynamic_scale(const std::vector<bf16>& x);

// The fp8 path's operand for a weight's code and scale byte: e4m3(e2m1 * scale / 8).
double folded(int code, int scale);

// y [w.rows] = x * w^T in the stated order of additions; and the sum of |x_k * w_k|, for error bounds.
std::vector<float> linear(const Row& x, const WeightMatrix& w, const float* bias);
std::vector<double> absolute_linear(const Row& x, const WeightMatrix& w);

// What becomes of one (token, slot) pair.
struct PairResult {
  std::vector<bf16> h;
  Row h_row;
  std::vector<float> y;  // the expert's output, not yet weighted
};
PairResult run_expert(const LayerConfig& config, const ExpertWeights& expert, const Row& x,
                      float h_tensor_scale);

}  // namespace megamoe::independent
