#include "checkpoint/quant_config_writer.h"

#include <gtest/gtest.h>

namespace megamoe {
namespace {

using nlohmann::json;

QuantDescription description(Family family, ActivationScales activations) {
  return {family, activations, {"lm_head", "model.layers.3.mlp.experts*"}, false, nullptr, {}};
}

TEST(QuantConfig, ModelOptWeightOnlyHasNoActivations) {
  const auto d = description(Family::kModelOpt, ActivationScales::kNone);
  EXPECT_EQ(quantization_config(d), json::parse(R"({
    "quant_method": "modelopt", "quant_algo": "W4A16_NVFP4",
    "config_groups": {"group_0": {"targets": ["Linear"],
      "weights": {"dynamic": false, "num_bits": 4, "type": "float", "group_size": 16}}},
    "ignore": ["lm_head", "model.layers.3.mlp.experts*"],
    "producer": {"name": "modelopt", "version": "megamoe"}})"));
  EXPECT_EQ(hf_quant_config(d), json::parse(R"({
    "producer": {"name": "modelopt", "version": "megamoe"},
    "quantization": {"quant_algo": "W4A16_NVFP4", "kv_cache_quant_algo": null, "group_size": 16,
      "exclude_modules": ["lm_head", "model.layers.3.mlp.experts*"]}})"));
}

TEST(QuantConfig, ModelOptActivations) {
  const json fixed = quantization_config(description(Family::kModelOpt, ActivationScales::kStatic));
  EXPECT_EQ(fixed["quant_algo"], "NVFP4");
  EXPECT_EQ(fixed["config_groups"]["group_0"]["input_activations"]["dynamic"], false);
  EXPECT_EQ(fixed["config_groups"]["group_0"]["input_activations"]["group_size"], 16);
  const json dynamic = quantization_config(description(Family::kModelOpt, ActivationScales::kDynamic));
  EXPECT_EQ(dynamic["config_groups"]["group_0"]["input_activations"]["dynamic"], true);
}

TEST(QuantConfig, ModelOptBesideFp8KeepsTheSourcesMethod) {
  auto d = description(Family::kModelOpt, ActivationScales::kStatic);
  d.other = {{"quant_method", "fp8"}, {"weight_block_size", {128, 128}}};
  d.quantized = {"model.layers.0.mlp.experts"};
  const json config = quantization_config(d);
  EXPECT_EQ(config["quant_method"], "fp8");
  EXPECT_EQ(config["weight_block_size"], json({128, 128}));
  EXPECT_EQ(config["quant_algo"], "MIXED_PRECISION");
  EXPECT_EQ(config["moe_quant_algo"], "NVFP4");
  EXPECT_EQ(config["quantized_layers"]["model.layers.0.mlp.experts"],
            json({{"quant_algo", "NVFP4"}, {"group_size", 16}}));
  const json hf = hf_quant_config(d)["quantization"];
  EXPECT_EQ(hf["quant_algo"], "MIXED_PRECISION");
  EXPECT_FALSE(hf.contains("exclude_modules"));
  EXPECT_TRUE(hf["quantized_layers"].contains("model.layers.0.mlp.experts"));
}

TEST(QuantConfig, CompressedTensors) {
  const json config = quantization_config(description(Family::kCompressedTensors, ActivationScales::kNone));
  EXPECT_EQ(config["quant_method"], "compressed-tensors");
  EXPECT_EQ(config["format"], "nvfp4-pack-quantized");
  EXPECT_EQ(config["quantization_status"], "compressed");
  EXPECT_EQ(config["ignore"], json({"lm_head", R"(re:model\.layers\.3\.mlp\.experts.*)"}));
  const json& group = config["config_groups"]["group_0"];
  EXPECT_TRUE(group["input_activations"].is_null());
  EXPECT_EQ(group["targets"], json({"Linear"}));
  EXPECT_EQ(group["weights"], json::parse(R"({"num_bits": 4, "type": "float", "symmetric": true,
    "strategy": "tensor_group", "group_size": 16, "dynamic": false, "scale_dtype": "torch.float8_e4m3fn"})"));
  EXPECT_EQ(quantization_config(description(
                Family::kCompressedTensors,
                ActivationScales::kStatic))["config_groups"]["group_0"]["input_activations"]["dynamic"],
            "local");
  EXPECT_EQ(quantization_config(description(
                Family::kCompressedTensors,
                ActivationScales::kDynamic))["config_groups"]["group_0"]["input_activations"]["dynamic"],
            true);
}

TEST(QuantConfig, KeepsAnFp8KvCache) {
  auto d = description(Family::kModelOpt, ActivationScales::kNone);
  d.fp8_kv_cache = true;
  EXPECT_EQ(quantization_config(d)["kv_cache_scheme"]["num_bits"], 8);
  EXPECT_EQ(hf_quant_config(d)["quantization"]["kv_cache_quant_algo"], "FP8");
  d.family = Family::kCompressedTensors;
  EXPECT_EQ(quantization_config(d)["kv_cache_scheme"]["strategy"], "tensor");
}

}  // namespace
}  // namespace megamoe
