// route.cu: one warp routes one token.
//
//   Keys     choices as integers whose descending order is the order of choice
//   Scores   logits to scores, by all lanes
//   Choice   top_k rounds of the warp's maximum; groups likewise before
//   Weights  one lane a slot, the sum in slot order
#include "cuda/launch.h"
#include "cuda/route.h"
#include "numerics/float_bits.h"

namespace megamoe::cuda {
namespace {

constexpr int kWarps = 4;
constexpr unsigned kAll = ~0u;

using Key = unsigned long long;

// ---- Keys

// Larger for what is chosen earlier: a larger value, NaN last, then the lower index. Never 0.
__device__ Key key_of(float value, int index) {
  std::uint32_t order = 0;  // NaN
  if (!is_nan(value)) {
    const std::uint32_t bits = __float_as_uint(__fadd_rn(value, 0.0f));  // -0 becomes +0
    order = bits >> 31 ? ~bits : bits | 0x80000000u;
  }
  return static_cast<Key>(order) << 32 | (0xFFFFFFFFu - static_cast<std::uint32_t>(index));
}
__device__ int index_of(Key key) { return static_cast<int>(0xFFFFFFFFu - static_cast<std::uint32_t>(key)); }

__device__ Key warp_max(Key key) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) key = max(key, __shfl_xor_sync(kAll, key, step));
  return key;
}
__device__ double warp_max(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmax(x, __shfl_xor_sync(kAll, x, step));
  return x;
}
// Every lane gets the same bits: each step adds the same two numbers on both sides.
__device__ double warp_sum(double x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(kAll, x, step);
  return x;
}

// ---- Scores

__device__ double sigmoid(double x) {
  const double e = exp(-fabs(x));
  return (x < 0.0 ? e : 1.0) / (1.0 + e);
}
__device__ double softplus(double x) { return fmax(x, 0.0) + log1p(exp(-fabs(x))); }

// scores [experts] in shared memory; returns whether one is NaN.
__device__ bool score(const RouteParams& p, const float* logits, int lane, float* scores) {
  double top = -INFINITY, sum = 0.0;
  if (p.router.scoring == Scoring::kSoftmax) {
    for (int e = lane; e < p.experts; e += 32) {
      if (logits[e] > top) top = logits[e];
    }
    top = warp_max(top);
    for (int e = lane; e < p.experts; e += 32) {
      if (!is_nan(logits[e])) sum += exp(logits[e] - top);
    }
    sum = warp_sum(sum);
  }
  bool nan = false;
  for (int e = lane; e < p.experts; e += 32) {
    const double x = logits[e];
    float s = logits[e];
    if (!is_nan(s)) {
      switch (p.router.scoring) {
        case Scoring::kSoftmax: s = static_cast<float>(exp(x - top) / sum); break;
        case Scoring::kSoftmaxOverChosen: break;
        case Scoring::kSigmoid: s = static_cast<float>(sigmoid(x)); break;
        case Scoring::kSqrtSoftplus: s = static_cast<float>(sqrt(softplus(x))); break;
      }
    }
    nan |= is_nan(s);
    scores[e] = s;
  }
  __syncwarp();
  return __any_sync(kAll, nan);
}

// ---- Choice

__device__ float choice(const RouteParams& p, const float* scores, int e) {
  return p.selection_bias == nullptr ? scores[e] : __fadd_rn(scores[e], p.selection_bias[e]);
}

// Leaves 0 in keys [num_groups] for the groups that stay.
__device__ void keep_best_groups(const RouteParams& p, const float* scores, int lane, Key* keys) {
  const int groups = p.router.num_groups, size = p.experts / groups;
  for (int g = lane; g < groups; g += 32) {
    float best = -INFINITY, second = best;
    for (int e = g * size; e < (g + 1) * size; ++e) {
      const float value = choice(p, scores, e);
      if (value > best) {
        second = best;
        best = value;
      } else if (value > second) {
        second = value;
      }
    }
    keys[g] = key_of(size == 1 ? best : __fadd_rn(best, second), g);
  }
  __syncwarp();
  for (int round = 0; round < p.router.topk_groups; ++round) {
    Key best = 0;
    for (int g = lane; g < groups; g += 32) best = max(best, keys[g]);
    best = warp_max(best);
    if (lane == 0) keys[index_of(best)] = 0;
    __syncwarp();
  }
}

// The chosen expert of slot `lane`; kPerLane experts are a lane's.
template <int kPerLane>
__device__ int choose(const RouteParams& p, const float* scores, const Key* groups, int lane) {
  Key keys[kPerLane];  // 0: not eligible, or chosen before
  const int size = p.experts / p.router.num_groups;
#pragma unroll
  for (int i = 0; i < kPerLane; ++i) {
    const int e = lane + 32 * i;
    const bool eligible = e < p.experts && (p.router.num_groups == 1 || groups[e / size] == 0);
    keys[i] = eligible ? key_of(choice(p, scores, e), e) : 0;
  }
  int chosen = 0;
  for (int slot = 0; slot < p.top_k; ++slot) {
    Key best = 0;
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) best = max(best, keys[i]);
    best = warp_max(best);
    if (lane == slot) chosen = index_of(best);
#pragma unroll
    for (int i = 0; i < kPerLane; ++i) {
      if (keys[i] == best) keys[i] = 0;
    }
  }
  return chosen;
}

// ---- Weights

// Of slot `lane` (its score), all lanes of the warp taking part.
__device__ float weigh(const RouteParams& p, float score, int lane) {
  const bool over_chosen = p.router.scoring == Scoring::kSoftmaxOverChosen;
  const double own = score;
  double share = own;
  if (over_chosen) share = exp(own - warp_max(lane < p.top_k ? own : -INFINITY));
  double sum = 0.0;
  for (int slot = 0; slot < p.top_k; ++slot) sum += __shfl_sync(kAll, share, slot);
  const bool divide = over_chosen || p.router.renormalize;
  const double weight = !divide ? share : sum == 0.0 ? 0.0 : share / sum;
  return static_cast<float>(weight * static_cast<double>(p.router.scaling_factor));
}

template <int kPerLane>
__global__ void __launch_bounds__(kWarps * 32) route_kernel(const __grid_constant__ RouteParams p) {
  extern __shared__ Key shared[];
  const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const int groups = p.router.num_groups > 1 ? p.router.num_groups : 0;
  Key* group_keys = shared + warp * groups;
  float* scores = reinterpret_cast<float*>(shared + kWarps * groups) + warp * p.experts;
  const std::int64_t token = static_cast<std::int64_t>(blockIdx.x) * kWarps + warp;
  if (token >= p.tokens) return;

  const bool nan = score(p, p.logits + token * p.experts, lane, scores);
  int chosen = 0;
  if (p.router.hash_routed) {
    if (lane < p.top_k) chosen = p.hash_ids[token * p.top_k + lane];
  } else {
    if (groups > 0) keep_best_groups(p, scores, lane, group_keys);
    chosen = choose<kPerLane>(p, scores, group_keys, lane);
  }
  // An id that is no expert's has no score; the sort reports it.
  const bool known = chosen >= 0 && chosen < p.experts;
  const float weight = weigh(p, known ? scores[chosen] : NAN, lane);
  if (lane < p.top_k) {
    p.ids[token * p.top_k + lane] = chosen;
    p.weights[token * p.top_k + lane] = nan ? NAN : weight;
  }
}

}  // namespace

cudaError_t route(const RouteParams& p, cudaStream_t stream) {
  if (p.experts < 1 || p.experts > kMaxRoutedExperts || p.top_k < 1 || p.top_k > kMaxTopK ||
      p.router.num_groups < 1) {
    return cudaErrorInvalidValue;
  }
  const int groups = p.router.num_groups > 1 ? p.router.num_groups : 0;
  const int shared =
      kWarps * (groups * static_cast<int>(sizeof(Key)) + p.experts * static_cast<int>(sizeof(float)));
  const std::int64_t blocks = (p.tokens + kWarps - 1) / kWarps;
  const auto kernel = p.experts <= 32    ? route_kernel<1>
                      : p.experts <= 64  ? route_kernel<2>
                      : p.experts <= 128 ? route_kernel<4>
                      : p.experts <= 256 ? route_kernel<8>
                      : p.experts <= 512 ? route_kernel<16>
                                         : route_kernel<32>;
  return launch(kernel, blocks, kWarps * 32, shared, stream, p);
}

}  // namespace megamoe::cuda
