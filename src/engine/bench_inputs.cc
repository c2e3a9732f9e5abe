#include "engine/bench_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <utility>

#include "base/check.h"
#include "numerics/bf16.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

// Block scales: 32 neighbouring E4M3 codes, 0.25 to 3.75.
constexpr std::uint8_t kFirstScale = 0x28;
constexpr int kScaleCodes = 32;
// Where an expert's piece begins in the pool: a multiple of a cache line.
constexpr std::int64_t kStep = 64;
constexpr std::int64_t kPlaces = 1 << 14;

constexpr float kLargestToken = 3.5f;
// |gate| and |up| of a billion sums of variance 1 stay below 6.5, so |h| below 6.5 * (6.5 + 1) for any
// activation.
constexpr float kLargestHidden = 50.0f;

// The mean of the squares of a block's values before the tensor scale.
double mean_square() {
  double codes = 0, scales = 0;
  for (int code = 0; code < 16; ++code)
    codes += std::pow(decode_e2m1(static_cast<std::uint8_t>(code)), 2) / 16;
  for (int i = 0; i < kScaleCodes; ++i) {
    scales += std::pow(decode_e4m3(static_cast<std::uint8_t>(kFirstScale + i)), 2) / kScaleCodes;
  }
  return codes * scales;
}

// Random bytes that matrices are cut from.
struct Pool {
  std::vector<std::uint8_t> codes, scales;
  std::vector<float> biases;
};

std::vector<std::uint8_t> random_bytes(std::int64_t count, std::mt19937_64& random) {
  std::vector<std::uint8_t> bytes(static_cast<std::size_t>(count));
  std::uint64_t bits = 0;
  for (std::size_t i = 0; i < bytes.size(); ++i, bits >>= 8) {
    if (i % 8 == 0) bits = random();
    bytes[i] = static_cast<std::uint8_t>(bits);
  }
  return bytes;
}

std::int64_t random_place(std::mt19937_64& random) {
  return kStep * static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(kPlaces));
}

WeightMatrix random_matrix(const Pool& pool, std::int64_t rows, std::int64_t cols, std::mt19937_64& random) {
  return {.format = WeightFormat::kNvfp4,
          .rows = rows,
          .cols = cols,
          .codes = pool.codes.data() + random_place(random),
          .scales = pool.scales.data() + random_place(random),
          .tensor_scale = static_cast<float>(1.0 / std::sqrt(mean_square() * static_cast<double>(cols)))};
}

// A number in (0, 1].
double open_unit(std::mt19937_64& random) { return static_cast<double>((random() >> 11) + 1) * 0x1p-53; }

}  // namespace

std::string_view to_string(RoutingKind kind) {
  switch (kind) {
    case RoutingKind::kUniform: return "uniform";
    case RoutingKind::kZipf: return "zipf";
    case RoutingKind::kOne: break;
  }
  return "one";
}

LayerWeights random_layer(const LayerConfig& config, std::uint64_t seed) {
  validate(config);
  std::mt19937_64 random(seed);
  const std::int64_t values = checked_mul(config.hidden, config.intermediate);
  const auto pool = std::make_shared<Pool>();
  pool->codes = random_bytes(values / 2 + kStep * kPlaces, random);
  pool->scales = random_bytes(values / kNvfp4Block + kStep * kPlaces, random);
  for (std::uint8_t& scale : pool->scales) {
    scale = static_cast<std::uint8_t>(kFirstScale + scale % kScaleCodes);
  }
  const bool bias = config.activation.kind == Activation::kGptOss;
  if (bias) {
    for (const bf16 value : random_tokens(std::max(config.hidden, config.intermediate) + kPlaces, random())) {
      pool->biases.push_back(0.1f * to_float(value));
    }
  }
  LayerWeights layer;
  layer.config = config;
  layer.name = "the random layer";
  layer.storage.push_back(pool);
  const auto random_bias = [&] {
    return bias ? pool->biases.data() + random_place(random) / kStep : nullptr;
  };
  for (std::int64_t e = 0; e < config.num_experts; ++e) {
    ExpertWeights& expert = layer.experts.emplace_back();
    if (config.activation.gated()) {
      expert.gate = random_matrix(*pool, config.intermediate, config.hidden, random);
      expert.gate_bias = random_bias();
    }
    expert.up = random_matrix(*pool, config.intermediate, config.hidden, random);
    expert.up_bias = random_bias();
    expert.down = random_matrix(*pool, config.hidden, config.intermediate, random);
    expert.down_bias = random_bias();
    expert.input_scale = kLargestToken / kNvfp4Range;
    expert.down_input_scale = kLargestHidden / kNvfp4Range;
  }
  return layer;
}

std::vector<bf16> random_tokens(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<bf16> values(static_cast<std::size_t>(count));
  for (bf16& value : values) {
    // Four uniform numbers in (-1, 1), of variance 1/3 each.
    const std::uint64_t bits = random();
    int sum = 0;
    for (int i = 0; i < 4; ++i) sum += 2 * static_cast<int>(bits >> (16 * i) & 0xFFFF) - 0xFFFF;
    value = to_bf16(static_cast<float>(sum) * (0.8660254f / 0x1p16f));
  }
  return values;
}

std::vector<float> random_expert_weights(std::int64_t tokens, int top_k, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<float> weights(static_cast<std::size_t>(checked_mul(tokens, top_k)));
  for (std::size_t t = 0; t < weights.size(); t += static_cast<std::size_t>(top_k)) {
    float sum = 0;
    for (int slot = 0; slot < top_k; ++slot) {
      sum += weights[t + static_cast<std::size_t>(slot)] = static_cast<float>(0.5 + open_unit(random));
    }
    for (int slot = 0; slot < top_k; ++slot) weights[t + static_cast<std::size_t>(slot)] /= sum;
  }
  return weights;
}

RoutingSequence::RoutingSequence(RoutingKind kind, std::int64_t num_experts, int top_k, std::int64_t tokens,
                                 std::uint64_t seed)
    : kind_(kind),
      tokens_(tokens),
      top_k_(top_k),
      random_(seed),
      order_(static_cast<std::size_t>(num_experts)) {
  std::iota(order_.begin(), order_.end(), 0);
  std::shuffle(order_.begin(), order_.end(), random_);
}

std::vector<std::int32_t> RoutingSequence::next() {
  const std::size_t experts = order_.size();
  std::vector<std::int32_t> ids(static_cast<std::size_t>(checked_mul(tokens_, top_k_)));
  if (kind_ == RoutingKind::kOne) {
    for (std::size_t at = 0; at < ids.size(); ++at)
      ids[at] = static_cast<std::int32_t>(at % static_cast<std::size_t>(top_k_));
  } else {
    // The smallest of exponential numbers divided by weights belongs to each expert as often as its weight
    // says; the next smallest is a draw from the others.
    std::vector<std::pair<double, std::int32_t>> keys(experts);
    for (std::size_t at = 0; at < ids.size(); at += static_cast<std::size_t>(top_k_)) {
      for (std::size_t e = 0; e < experts; ++e) {
        const double inverse_weight = kind_ == RoutingKind::kZipf ? static_cast<double>(e + 1) : 1.0;
        keys[e] = {-std::log(open_unit(random_)) * inverse_weight, static_cast<std::int32_t>(e)};
      }
      std::partial_sort(keys.begin(), keys.begin() + top_k_, keys.end());
      for (std::size_t slot = 0; slot < static_cast<std::size_t>(top_k_); ++slot) {
        ids[at + slot] = keys[slot].second;
      }
    }
  }
  std::vector<std::int32_t> renamed(experts);
  for (const std::int32_t e : used_experts(ids, static_cast<std::int64_t>(experts))) {
    renamed[static_cast<std::size_t>(e)] = order_[turn_];
    turn_ = (turn_ + 1) % experts;
  }
  for (std::int32_t& id : ids) id = renamed[static_cast<std::size_t>(id)];
  return ids;
}

std::vector<std::int32_t> used_experts(const std::vector<std::int32_t>& ids, std::int64_t num_experts) {
  std::vector<bool> used(static_cast<std::size_t>(num_experts));
  for (const std::int32_t id : ids) used[static_cast<std::size_t>(id)] = true;
  std::vector<std::int32_t> experts;
  for (std::size_t e = 0; e < used.size(); ++e) {
    if (used[e]) experts.push_back(static_cast<std::int32_t>(e));
  }
  return experts;
}

std::int64_t reuse_distance(const std::vector<std::vector<std::int32_t>>& used_by_pass,
                            std::int64_t num_experts, std::int64_t first_bytes, std::int64_t second_bytes) {
  const std::int64_t bytes[2] = {first_bytes, second_bytes};
  std::vector<std::int64_t> last_end[2];
  for (auto& ends : last_end) ends.assign(static_cast<std::size_t>(num_experts), -1);
  std::int64_t position = 0, least = std::numeric_limits<std::int64_t>::max();
  for (int round = 0; round < 2; ++round) {  // the second one meets the uses of the first
    for (const std::vector<std::int32_t>& used : used_by_pass) {
      for (int matrix = 0; matrix < 2; ++matrix) {
        for (const std::int32_t e : used) {
          std::int64_t& end = last_end[matrix][static_cast<std::size_t>(e)];
          if (end >= 0) least = std::min(least, position - end);
          position += bytes[matrix];
          end = position;
        }
      }
    }
  }
  return least;
}

}  // namespace megamoe
