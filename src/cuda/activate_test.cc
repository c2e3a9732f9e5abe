// Activations whose BF16 is told from an approximation of h.
#include "cuda/activate_test.h"

#include "cuda/gpu_test.h"

namespace megamoe::cuda {
namespace {

class ActivateTest : public GpuTest {};

TEST_F(ActivateTest, SigmoidOfEveryGate) {
  const DeviceArray<SigmoidErrors> worst(std::vector<SigmoidErrors>(1));
  cuda_check(sigmoid_errors_for_test(worst.data()), "testing the sigmoid");
  const SigmoidErrors errors = worst.download()[0];
  EXPECT_GT(errors.sigmoid, 0u);
  EXPECT_LE(errors.sigmoid, errors.sigmoid_allowed);
  EXPECT_LE(errors.silu, errors.silu_allowed);
}

TEST_F(ActivateTest, NoOtherBf16ThanTheDefinitions) {
  constexpr std::int64_t kGroups = 1 << 24;
  for (const ActivationConfig& config :
       {ActivationConfig{Activation::kSwiGlu}, ActivationConfig{Activation::kSwiGluClamped, 1.5f},
        ActivationConfig{Activation::kGptOss, 7.0f, 1.702f}}) {
    for (const Gates gates : {Gates::kAnyBits, Gates::kUsual, Gates::kBesideMidpoints}) {
      std::vector<unsigned long long> told;
      for (const bool by_any : {false, true}) {
        SCOPED_TRACE(std::string(to_string(config.kind)) + ", gates " +
                     std::to_string(static_cast<int>(gates)) + (by_any ? ", by the steps of any" : ""));
        const DeviceArray<NearCounts> counts(std::vector<NearCounts>(1));
        cuda_check(activate_nearly_for_test(config, by_any, gates, kGroups, counts.data()),
                   "testing activations");
        const NearCounts got = counts.download()[0];
        EXPECT_EQ(got.wrong, 0u);
        // Beside midpoints hardly any can be told, of usual numbers nearly all.
        EXPECT_GT(got.told, gates == Gates::kUsual ? kGroups / 100 * 99 : 0u);
        EXPECT_LT(got.told, gates == Gates::kUsual ? kGroups : kGroups / 2);
        told.push_back(got.told);
      }
      EXPECT_EQ(told[0], told[1]);
    }
  }
}

}  // namespace
}  // namespace megamoe::cuda
