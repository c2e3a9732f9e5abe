#include "engine/input_scales.h"

#include <gtest/gtest.h>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

using testing::expect_error;

InputScales example() {
  InputScales scales;
  scales.layers[0] = {{7, {0.1f, 0.1f / 2688.0f}, {3.4e38f, 0x1p-149f}}, {0, {0.0f, 1.0f}, {1.0f, 0.3f}}};
  scales.layers[12] = {{1, {1.0f, 1.0f / 3.0f}, {2.0f, 2.0f / 3.0f}}};
  return scales;
}

TEST(InputScales, SurviveAFileBitForBit) {
  const testing::TempDir dir;
  const InputScales before = example();
  write_input_scales(dir / "scales.json", before);
  const InputScales after = read_input_scales(dir / "scales.json");
  ASSERT_EQ(after.layers.size(), before.layers.size());
  for (const auto& [layer, experts] : before.layers) {
    ASSERT_EQ(after.layers.at(layer).size(), experts.size());
    for (std::size_t e = 0; e < experts.size(); ++e) {
      const ExpertInputScales& read = after.layers.at(layer)[e];
      EXPECT_EQ(read.rows, experts[e].rows);
      EXPECT_EQ(read.x.scale, experts[e].x.scale);
      EXPECT_EQ(read.x.amax, experts[e].x.amax);
      EXPECT_EQ(read.h.scale, experts[e].h.scale);
      EXPECT_EQ(read.h.amax, experts[e].h.amax);
    }
  }
}

TEST(InputScales, NamesWhatIsMissing) {
  const InputScales scales = example();
  EXPECT_EQ(scales.at(12, 0).rows, 1);
  expect_error(ErrorCode::kInvalidArgument, {"layer 5"}, [&] { scales.at(5, 0); });
  expect_error(ErrorCode::kInvalidArgument, {"layer 12", "expert 1"}, [&] { scales.at(12, 1); });
}

void expect_refused(const std::string& layers, const std::vector<std::string>& parts) {
  const std::string text = R"({"format": "megamoe-input-scales", "version": 1, "layers": )" + layers + "}";
  expect_error(ErrorCode::kInvalidFile, parts, [&] { parse_input_scales(text, "s.json"); });
}

TEST(InputScales, RefusesWhatIsWrong) {
  expect_error(ErrorCode::kInvalidFile, {"s.json"}, [] { parse_input_scales("[]", "s.json"); });
  expect_error(ErrorCode::kInvalidFile, {"s.json"}, [] { parse_input_scales("{", "s.json"); });
  expect_error(ErrorCode::kInvalidFile, {"version"}, [] {
    parse_input_scales(R"({"format": "megamoe-input-scales", "version": 2, "layers": {}})", "s.json");
  });
  const std::string h = R"("h": {"amax": 1, "scale": 1})";
  expect_refused("[]", {"layers"});
  expect_refused(R"({"x": []})", {"\"x\""});
  expect_refused(R"({"-1": []})", {"-1"});
  expect_refused(R"({"0": [], "00": []})", {"\"00\""});
  expect_refused(R"({"99999999999": []})", {"99999999999"});
  expect_refused(R"({"0": {}})", {"layer 0"});
  expect_refused(R"({"0": [3]})", {"layer 0", "expert 0"});
  expect_refused(R"({"0": [{"rows": -1}]})", {"rows"});
  expect_refused(R"({"0": [{"rows": 1, )" + h + "}]}", {"expert 0", "\"x\""});
  expect_refused(R"({"0": [{"rows": 1, "x": {"amax": 1, "scale": 0}, )" + h + "}]}", {"expert 0", "\"x\""});
  expect_refused(R"({"0": [{"rows": 1, "x": {"amax": 1, "scale": -1}, )" + h + "}]}", {"greater than 0"});
  expect_refused(R"({"0": [{"rows": 1, "x": {"amax": 1, "scale": 1e39}, )" + h + "}]}", {"finite"});
  expect_refused(R"({"0": [{"rows": 1, "x": {"amax": "1", "scale": 1}, )" + h + "}]}", {"amax"});
}

}  // namespace
}  // namespace megamoe
