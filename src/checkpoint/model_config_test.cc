// model_config_test.cc: configs of every family, name patterns, and JSON that makes no sense.
#include "checkpoint/model_config.h"

#include <chrono>

#include "checkpoint/test_files.h"

namespace megamoe {
namespace {

using nlohmann::json;
using testing::expect_error;

TEST(SafeRegex, MatchesLikePythonsMatch) {
  struct Row {
    const char* pattern;
    const char* text;
    bool match;
  };
  const std::vector<Row> rows = {
      {"abc", "abcd", true},
      {"abc", "xabc", false},
      {".*abc$", "xxabc", true},
      {".*abc$", "abcx", false},
      {"^a\\.b$", "a.b", true},
      {"^a\\.b$", "axb", false},
      {"a|b|cd", "cd", true},
      {"a|b|cd", "c", false},
      {"(gate|up|down)_proj", "up_proj", true},
      {"(?:gate|up)_proj", "down_proj", false},
      {"x(ab)*y", "xababy", true},
      {"x(ab)+y", "xy", false},
      {"x(ab)?y", "xy", true},
      {"\\d{2,3}$", "12", true},
      {"\\d{2,3}$", "1234", false},
      {"\\d{2}", "1", false},
      {"[a-c]+[^a-c]", "abcd", true},
      {"[^.]+$", "ab.c", false},
      {"[]x]", "]", true},
      {"[a-]", "-", true},
      {"", "anything", true},
      {"(a|)b", "b", true},
      {"(a*)*$", "aaab", false},
      {"(a*)*b", "aaab", true},
      {".*\\.experts\\.\\d+\\.(gate|up)_proj$", "model.layers.0.mlp.experts.12.up_proj", true},
      {".*?lm_head", "x.lm_head", true},
      {"\\w+\\s", "ab_1 ", true},
  };
  for (const Row& row : rows) {
    const auto regex = SafeRegex::compile(row.pattern);
    ASSERT_NE(regex, nullptr) << row.pattern;
    EXPECT_EQ(regex->matches(row.text), row.match) << row.pattern << " on " << row.text;
  }
  for (const char* pattern : {"(", ")", "a)", "[a", "*", "a{", "a{3,2}", "a{1000}", "\\", "(?!x)", "(?=x)",
                              "\\1", "a**?+", "[z-a]", "{2}", "(?P<n>a)"}) {
    EXPECT_EQ(SafeRegex::compile(pattern), nullptr) << pattern;
  }
  EXPECT_EQ(SafeRegex::compile(std::string(3000, 'a')), nullptr);
  EXPECT_EQ(SafeRegex::compile(std::string(1000, '(') + std::string(1000, ')')), nullptr);
}

// Patterns that take others hours.
TEST(SafeRegex, TakesLinearTime) {
  const auto start = std::chrono::steady_clock::now();
  const std::string text(5000, 'x');
  EXPECT_FALSE(SafeRegex::compile("(x+x+)+y")->matches(text));
  EXPECT_FALSE(SafeRegex::compile("(x*)*(x*)*(x*)*y")->matches(text));
  EXPECT_EQ(SafeRegex::compile("((a{100}){100}){100}"), nullptr);
  std::string nested = "";
  for (int i = 0; i < 20; ++i) nested = "(" + nested + "){100}";
  EXPECT_NE(SafeRegex::compile(nested), nullptr);
  EXPECT_TRUE(glob_matches(std::string(100, '*') + "x", text));
  EXPECT_FALSE(glob_matches("*x*x*x*x*x*x*y", text));
  EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20));
}

TEST(NamePatterns, NamesGlobsAndExpressions) {
  using Match = NamePatterns::Match;
  NamePatterns patterns;
  EXPECT_TRUE(patterns.empty());
  patterns.add("lm_head");
  patterns.add("model.layers.1.*");
  patterns.add("model.layers.2.mlp");
  patterns.add("language_model.model.layers.5*");
  patterns.add("*.mixer.gate");
  patterns.add("re:.*shared_expert$");
  EXPECT_EQ(patterns.match("lm_head"), Match::kYes);
  EXPECT_EQ(patterns.match("lm_heads"), Match::kNo);
  EXPECT_EQ(patterns.match("model.layers.1.mlp.experts.0.up_proj"), Match::kYes);
  EXPECT_EQ(patterns.match("layers.1.mlp"), Match::kYes);
  EXPECT_EQ(patterns.match("model.language_model.layers.1.mlp"), Match::kYes);
  EXPECT_EQ(patterns.match("model.layers.10.mlp"), Match::kNo);
  EXPECT_EQ(patterns.match("model.layers.2.mlp.experts.0.up_proj"), Match::kYes);
  EXPECT_EQ(patterns.match("model.layers.2.mlp2.up_proj"), Match::kNo);
  EXPECT_EQ(patterns.match("model.layers.51.mlp"), Match::kYes);
  EXPECT_EQ(patterns.match("backbone.layers.0.mixer.gate"), Match::kYes);
  EXPECT_EQ(patterns.match("backbone.layers.0.mixer.gate.x"), Match::kYes);
  EXPECT_EQ(patterns.match("backbone.layers.0.mixer.gate_proj"), Match::kNo);
  EXPECT_EQ(patterns.match("a.shared_expert"), Match::kYes);
  EXPECT_EQ(patterns.match("a.shared_expert.up_proj"), Match::kNo);
  patterns.add("re:(?!x)");  // cannot be judged
  EXPECT_EQ(patterns.match("a.b"), Match::kUnknown);
  EXPECT_EQ(patterns.match("lm_head"), Match::kYes);
}

TEST(ModelConfig, SizesAndRoutersOfFamilies) {
  const json deepseek = {{"model_type", "deepseek_v3"},
                         {"hidden_size", 7168},
                         {"moe_intermediate_size", 2048},
                         {"intermediate_size", 18432},
                         {"n_routed_experts", 256},
                         {"num_experts_per_tok", 8},
                         {"n_group", 8},
                         {"topk_group", 4},
                         {"scoring_func", "sigmoid"},
                         {"topk_method", "noaux_tc"},
                         {"norm_topk_prob", true},
                         {"routed_scaling_factor", 2.5},
                         {"n_shared_experts", 1},
                         {"hidden_act", "silu"}};
  ModelConfig config = parse_model_config(deepseek, nullptr);
  EXPECT_EQ(config.hidden, 7168);
  EXPECT_EQ(config.intermediate, 2048);
  EXPECT_EQ(config.num_experts, 256);
  EXPECT_EQ(config.top_k, 8);
  EXPECT_EQ(config.num_groups, 8);
  EXPECT_EQ(config.topk_groups, 4);
  EXPECT_EQ(config.scoring, "sigmoid");
  EXPECT_EQ(config.scaling_factor, 2.5f);
  EXPECT_EQ(config.num_shared_experts, 1);
  EXPECT_FALSE(config.quantization.present);

  const json mixtral = {{"model_type", "mixtral"}, {"hidden_size", 4096},      {"intermediate_size", 14336},
                        {"num_local_experts", 8},  {"num_experts_per_tok", 2}, {"n_group", nullptr}};
  config = parse_model_config(mixtral, nullptr);
  EXPECT_EQ(config.intermediate, 14336);
  EXPECT_EQ(config.scoring, "softmax-over-chosen");
  EXPECT_EQ(config.num_groups, 1);

  const json wrapped = {{"model_type", "qwen3_5_moe"},
                        {"text_config",
                         {{"model_type", "qwen3_5_moe_text"},
                          {"hidden_size", 2048},
                          {"num_experts", 256},
                          {"num_experts_per_tok", 8},
                          {"moe_intermediate_size", 512}}}};
  config = parse_model_config(wrapped, nullptr);
  EXPECT_EQ(config.hidden, 2048);
  EXPECT_EQ(config.num_experts, 256);
  EXPECT_EQ(config.scoring, "softmax");
  EXPECT_TRUE(config.renormalize);

  EXPECT_FALSE(parse_model_config({{"model_type", "qwen3_moe"}}, nullptr).renormalize);
  EXPECT_EQ(parse_model_config({{"model_type", "deepseek_v4"}}, nullptr).swiglu_limit, 10.0f);
  EXPECT_EQ(parse_model_config({{"model_type", "deepseek_v4"}}, nullptr).scoring, "sqrtsoftplus");
  EXPECT_EQ(parse_model_config({{"model_type", "gpt_oss"}}, nullptr).swiglu_limit, 7.0f);
  EXPECT_FALSE(parse_model_config({{"model_type", "unheard_of"}}, nullptr).scoring_known);
  EXPECT_FALSE(parse_model_config(nullptr, nullptr).present);
  // Experts in a latent space: the router keeps the model's size.
  config = parse_model_config({{"hidden_size", 4096}, {"moe_latent_size", 1024}}, nullptr);
  EXPECT_EQ(config.hidden, 1024);
  EXPECT_EQ(config.router_hidden, 4096);
}

TEST(QuantConfig, ModelOptMixedPrecision) {
  const json hf = {{"quantization",
                    {{"quant_algo", "MIXED_PRECISION"},
                     {"quantized_layers",
                      {{"model.layers.0.mlp.experts", {{"quant_algo", "NVFP4"}}},
                       {"model.layers.0.mlp.shared_expert.up_proj", {{"quant_algo", "FP8"}}}}}}}};
  const QuantConfig q = parse_model_config(nullptr, hf).quantization;
  EXPECT_EQ(q.source, "hf_quant_config.json");
  EXPECT_EQ(q.allowed("model.layers.0.mlp.experts.3.up_proj"), kSchemeNvfp4);
  EXPECT_EQ(q.allowed("model.layers.0.mlp.shared_expert.up_proj"), kSchemeFp8);
  EXPECT_EQ(q.allowed("model.layers.1.mlp.experts.3.up_proj"), kSchemeDense);

  // A mixture of which only the NVFP4 part is listed.
  const json part = {{"quantization",
                      {{"quant_algo", "MIXED_PRECISION"},
                       {"quantized_layers", {{"model.layers.0.mlp.experts", {{"quant_algo", "NVFP4"}}}}}}}};
  const QuantConfig partly = parse_model_config(nullptr, part).quantization;
  EXPECT_EQ(partly.allowed("model.layers.0.mlp.experts.3.up_proj"), kSchemeNvfp4);
  EXPECT_EQ(partly.allowed("model.layers.1.mlp.experts.3.up_proj"), kSchemeDense | kSchemeFp8 | kSchemeMxfp4);
}

TEST(QuantConfig, Algorithms) {
  const auto allowed = [](const char* algorithm) {
    const json hf = {{"quantization", {{"quant_algo", algorithm}, {"exclude_modules", {"x*"}}}}};
    return parse_model_config(nullptr, hf).quantization.allowed("layers.0.mlp");
  };
  for (const char* name : {"NVFP4", "W4A16_NVFP4", "NVFP4_AWQ", "W4A8_NVFP4_FP8"}) {
    EXPECT_EQ(allowed(name), kSchemeNvfp4) << name;
  }
  EXPECT_EQ(allowed("FP8"), kSchemeFp8);
  EXPECT_EQ(allowed("fp8_pb_wo"), kSchemeFp8);
  EXPECT_EQ(allowed("W4A8_MXFP4_FP8"), kSchemeMxfp4);
  EXPECT_EQ(allowed("W4A16_AWQ"), kSchemeAny);
}

TEST(QuantConfig, HfQuantConfigHoldsWhereBothSpeak) {
  const json config = {{"quantization_config", {{"quant_method", "modelopt"}, {"quant_algo", "FP8"}}}};
  const json hf = {{"quantization", {{"quant_algo", "NVFP4"}}}};
  EXPECT_EQ(parse_model_config(config, hf).quantization.allowed("a"), kSchemeNvfp4);
  EXPECT_EQ(parse_model_config(config, nullptr).quantization.allowed("a"), kSchemeFp8);
}

TEST(ModelConfig, WrongKindsAreErrorsThatNameTheField) {
  const auto refuse = [](const json& config, const std::vector<std::string>& parts) {
    expect_error(ErrorCode::kInvalidFile, parts, [&] { parse_model_config(config, nullptr); });
  };
  refuse({{"hidden_size", "big"}}, {"config.json", "hidden_size", "whole number", "big"});
  refuse({{"hidden_size", 1.5}}, {"hidden_size", "1.5"});
  refuse({{"hidden_size", -1}}, {"hidden_size", "-1"});
  refuse({{"hidden_size", 18446744073709551615ull}}, {"hidden_size", "18446744073709551615"});
  refuse({{"num_experts", {1, 2}}}, {"num_experts", "a list"});
  refuse({{"routed_scaling_factor", 1e300}}, {"routed_scaling_factor"});
  refuse({{"norm_topk_prob", 1}}, {"norm_topk_prob", "true or false"});
  refuse({{"swiglu_limit", -1}}, {"swiglu_limit", "negative"});
  refuse({{"text_config", 3}}, {"text_config", "an object"});
  refuse(json::array(), {"config.json", "an object"});
  refuse({{"quantization_config", {{"quant_method", "fp8"}, {"weight_block_size", {128}}}}},
         {"weight_block_size"});
  expect_error(ErrorCode::kInvalidFile, {"hf_quant_config.json"}, [] { parse_model_config(nullptr, 3); });
}

// Every value of configs that make sense, replaced by every kind of value: a result or an Error, never more.
void replace_everywhere(json& root, json& at, const json& hf, int& errors, int& results) {
  static const std::vector<json> kOdd = {nullptr,
                                         true,
                                         -1,
                                         18446744073709551615ull,
                                         0.5,
                                         -1e308,
                                         "",
                                         "re:((((",
                                         "*",
                                         json::array(),
                                         json::object(),
                                         {{"a", {{"b", 1}}}},
                                         {"x", 1},
                                         {json::array({json::array()})},
                                         "\xff\xfe"};
  const json original = at;
  for (const json& odd : kOdd) {
    at = odd;
    try {
      const ModelConfig config = parse_model_config(root, hf.is_null() ? root : hf);
      (void)config.quantization.allowed("model.layers.0.mlp.experts.0.up_proj");
      ++results;
    } catch (const Error& error) {
      EXPECT_EQ(error.code(), ErrorCode::kInvalidFile);
      ++errors;
    }
  }
  at = original;
  if (at.is_structured()) {
    for (auto& item : at) replace_everywhere(root, item, hf, errors, results);
  }
}

TEST(ModelConfig, AnyJsonIsAResultOrAnError) {
  json config = {{"model_type", "deepseek_v4"},
                 {"hidden_size", 64},
                 {"num_experts", 4},
                 {"num_experts_per_tok", 2},
                 {"routed_scaling_factor", 1.5},
                 {"norm_topk_prob", true},
                 {"scoring_func", "sigmoid"},
                 {"n_group", 2},
                 {"hidden_act", "silu"},
                 {"swiglu_limit", 10},
                 {"expert_dtype", "fp4"},
                 {"text_config", {{"hidden_size", 64}, {"model_type", "x"}}},
                 {"quantization",
                  {{"quant_algo", "MIXED_PRECISION"},
                   {"quantized_layers", {{"a", {{"quant_algo", "NVFP4"}}}}},
                   {"exclude_modules", {"a*", "re:b"}}}},
                 {"quantization_config",
                  {{"quant_method", "compressed-tensors"},
                   {"format", "x"},
                   {"ignore", {"a", "re:b.*"}},
                   {"config_groups",
                    {{"g",
                      {{"targets", {"Linear", "Other", "re:x"}},
                       {"weights", {{"num_bits", 4}, {"type", "float"}, {"group_size", 16}}},
                       {"input_activations", nullptr}}}}}}}};
  int errors = 0, results = 0;
  replace_everywhere(config, config, nullptr, errors, results);
  const json none = json::object();
  replace_everywhere(config, config, none, errors, results);
  config["quantization_config"] = {{"quant_method", "fp8"},
                                   {"weight_block_size", {128, 128}},
                                   {"quant_algo", "x"},
                                   {"quantized_layers", {{"a", {{"quant_algo", "NVFP4"}}}}},
                                   {"modules_to_not_convert", {"b"}}};
  replace_everywhere(config, config, none, errors, results);
  EXPECT_GT(errors, 300);
  EXPECT_GT(results, 300);
}

}  // namespace
}  // namespace megamoe
