#include "engine/quantize_checkpoint.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmath>
#include <limits>

#include "base/parallel.h"
#include "checkpoint/expert_matrix.h"
#include "engine/input_scales.h"
#include "engine/test_models.h"
#include "megamoe/quantize.h"
#include "numerics/e4m3.h"
#include "numerics/nvfp4.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;
using testing::expect_error;
using testing::Layout;
using testing::read_bytes;
using testing::read_json;
using testing::TempDir;
using testing::write_model;

// name -> dtype, shape and bytes.
std::map<std::string, std::string> contents(const fs::path& path) {
  std::map<std::string, std::string> all;
  const auto checkpoint = Checkpoint::open(path);
  for (const TensorRef& tensor : checkpoint->tensors()) {
    const auto bytes = tensor.bytes();
    all[tensor.info->name] =
        describe(*tensor.info) + " " + std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  }
  return all;
}

// Every file of a directory.
std::map<std::string, std::string> files_of(const fs::path& directory) {
  std::map<std::string, std::string> all;
  for (const auto& entry : fs::directory_iterator(directory)) {
    all[entry.path().filename().string()] = read_bytes(entry.path());
  }
  return all;
}

const std::string kShipped = MEGAMOE_SOURCE_DIR "/examples/tiny-qwen3-moe";

// What `matrix` decodes to, in the order the format defines.
std::vector<float> decoded(const ExpertMatrix& matrix) {
  const Nvfp4Data data = read_nvfp4(matrix);
  Nvfp4Tensor tensor;
  tensor.rows = matrix.rows;
  tensor.cols = matrix.cols;
  tensor.codes = data.codes;
  tensor.scales = data.scales;
  tensor.tensor_scales = {data.tensor_scale};
  return dequantize(tensor);
}

float largest(const std::vector<bf16>& values) {
  float a = 0.0f;
  for (const bf16 v : values) a = std::max(a, std::abs(to_float(v)));
  return a;
}

// The decoded weights of `destination` are those of quantize() on the source's matrices, whose tensor scale
// comes from the larger half where gate and up share one.
void expect_quantized(const fs::path& source, const fs::path& destination, Family family, GateUpScale gate_up,
                      bool four_over_six) {
  const ModelIndex before = index_model(Checkpoint::open(source));
  const ModelIndex after = index_model(Checkpoint::open(destination));
  ASSERT_EQ(after.layers.size(), before.layers.size());
  const float range = four_over_six ? 1536.0f : 2688.0f;
  for (std::size_t l = 0; l < before.layers.size(); ++l) {
    ASSERT_EQ(after.layers[l].experts.size(), before.layers[l].experts.size());
    for (std::size_t e = 0; e < before.layers[l].experts.size(); ++e) {
      std::array<std::vector<bf16>, 3> weights;
      std::array<float, 3> amax;
      for (std::size_t p = 0; p < 3; ++p) {
        weights[p] = read_bf16(*before.layers[l].experts[e][p]);
        amax[p] = largest(weights[p]);
      }
      if (gate_up == GateUpScale::kShared) amax[0] = amax[1] = std::max(amax[0], amax[1]);
      for (std::size_t p = 0; p < 3; ++p) {
        const ExpertMatrix& m = *after.layers[l].experts[e][p];
        ASSERT_EQ(m.encoding, Encoding::kNvfp4);
        QuantizeOptions options;
        options.mode = QuantizeOptions::TensorScale::kGiven;
        options.tensor_scale = amax[p] == 0.0f ? 1.0f : amax[p] / range;
        options.four_over_six = four_over_six;
        if (family == Family::kCompressedTensors) options.tensor_scale = 1.0f / (1.0f / options.tensor_scale);
        const Nvfp4Tensor expected =
            quantize(MatrixView<const bf16>(weights[p].data(), m.rows, m.cols), options);
        EXPECT_EQ(read_nvfp4(m).tensor_scale, options.tensor_scale);
        ASSERT_EQ(decoded(m), dequantize(expected)) << l << " " << e << " " << p;
      }
    }
  }
}

TEST(QuantizeCheckpoint, ShippedModelBothWays) {
  for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
    const TempDir dir;
    QuantizeCheckpointOptions options;
    options.format = family;
    const RewriteReport report = quantize_checkpoint(kShipped, dir / "out", options);
    EXPECT_EQ(report.quantized_linears, 2 * 16 * 3);
    EXPECT_EQ(report.consumed_tensors, 2 * 16 * 3);
    EXPECT_EQ(report.carried_tensors, 117 - 96);
    EXPECT_EQ(report.written_tensors, 117 - 96 + 3 * 96);
    EXPECT_EQ(report.inexact_blocks, 0);
    EXPECT_EQ(report.saturated_blocks, 0);
    expect_quantized(kShipped, dir / "out", family, GateUpScale::kShared, false);

    const auto before = contents(kShipped), after = contents(dir / "out");
    std::int64_t untouched = 0;
    for (const auto& [name, content] : before) {
      if (name.find(".experts.") != std::string::npos) continue;
      ASSERT_TRUE(after.contains(name)) << name;
      EXPECT_EQ(after.at(name), content) << name;
      ++untouched;
    }
    EXPECT_EQ(untouched, report.carried_tensors);
    std::int64_t bytes = 0;
    const auto written = Checkpoint::open(dir / "out");
    for (const TensorRef& tensor : written->tensors()) bytes += tensor.info->bytes();
    EXPECT_EQ(bytes, report.output_bytes);
    EXPECT_EQ(read_bytes(dir / "out/generation_config.json"),
              read_bytes(fs::path(kShipped) / "generation_config.json"));
    EXPECT_EQ(fs::exists(dir / "out/hf_quant_config.json"), family == Family::kModelOpt);
    const json config = read_json(dir / "out/config.json");
    json rest = config;
    rest.erase("quantization_config");
    EXPECT_EQ(rest, read_json(fs::path(kShipped) / "config.json"));
    EXPECT_EQ(config["quantization_config"]["quant_method"],
              family == Family::kModelOpt ? "modelopt" : "compressed-tensors");
    const json& ignored = config["quantization_config"]["ignore"];
    for (const char* name : {"lm_head", "model.layers.1.mlp.gate", "model.layers.0.self_attn.q_proj"}) {
      EXPECT_NE(std::find(ignored.begin(), ignored.end(), name), ignored.end()) << name;
    }
    for (const auto& name : ignored) {
      EXPECT_EQ(name.get<std::string>().find("experts"), std::string::npos) << name;
    }
  }
}

TEST(QuantizeCheckpoint, TensorShapesOfTheFamilies) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  QuantizeCheckpointOptions options;
  quantize_checkpoint(dir / "src", dir / "mo", options);
  options.format = Family::kCompressedTensors;
  quantize_checkpoint(dir / "src", dir / "ct", options);
  const std::string module = "model.layers.0.mlp.experts.11.down_proj.";
  const auto mo = Checkpoint::open(dir / "mo"), ct = Checkpoint::open(dir / "ct");
  EXPECT_EQ(describe(*mo->at(module + "weight").info), "U8 [48, 16]");
  EXPECT_EQ(describe(*mo->at(module + "weight_scale").info), "F8_E4M3 [48, 2]");
  EXPECT_EQ(describe(*mo->at(module + "weight_scale_2").info), "F32 []");
  EXPECT_EQ(describe(*ct->at(module + "weight_packed").info), "U8 [48, 16]");
  EXPECT_EQ(describe(*ct->at(module + "weight_scale").info), "F8_E4M3 [48, 2]");
  EXPECT_EQ(describe(*ct->at(module + "weight_global_scale").info), "F32 [1]");
  EXPECT_EQ(mo->find(module + "input_scale"), nullptr);
  EXPECT_EQ(mo->files().front().metadata().at("format"), "pt");
}

TEST(QuantizeCheckpoint, FourOverSixAndSeparateScales) {
  for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
    const TempDir dir;
    write_model(dir / "src", 1, Layout::kPerExpert, true);
    QuantizeCheckpointOptions options;
    options.format = family;
    options.four_over_six = true;
    options.gate_up_scale = GateUpScale::kSeparate;
    quantize_checkpoint(dir / "src", dir / "out", options);
    expect_quantized(dir / "src", dir / "out", family, GateUpScale::kSeparate, true);
  }
}

TEST(QuantizeCheckpoint, ThreeLayoutsGiveTheSameTensors) {
  const TempDir dir;
  std::map<std::string, std::string> results[3];
  const Layout layouts[3] = {Layout::kPerExpert, Layout::kFused, Layout::kW1W3W2};
  for (int i = 0; i < 3; ++i) {
    const fs::path source = dir / fmt::format("src{}", i), out = dir / fmt::format("out{}", i);
    write_model(source, 2, layouts[i]);
    const RewriteReport report = quantize_checkpoint(source, out, {});
    EXPECT_EQ(report.quantized_linears, 2 * testing::kExperts * 3);
    EXPECT_EQ(report.consumed_tensors, layouts[i] == Layout::kFused ? 4 : 2 * testing::kExperts * 3);
    for (const auto& [original, content] : contents(out)) {
      std::string name = original;
      const auto rename = [&](const std::string& from, const std::string& to) {
        if (const auto at = name.find(from); at != std::string::npos) name.replace(at, from.size(), to);
      };
      rename("block_sparse_moe", "mlp");
      rename(".w1.", ".gate_proj.");
      rename(".w3.", ".up_proj.");
      rename(".w2.", ".down_proj.");
      results[i][name] = content;
    }
  }
  EXPECT_EQ(results[0].size(), 3 + 2 * 2 + 2 * testing::kExperts * 3 * 3u);
  EXPECT_TRUE(results[0] == results[1]);
  EXPECT_TRUE(results[0] == results[2]);
}

TEST(QuantizeCheckpoint, ShardsKeepTheirNamesAndTheIndexIsRewritten) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert, true);
  const RewriteReport report = quantize_checkpoint(dir / "src", dir / "out", {});
  const json index = read_json(dir / "out/model.safetensors.index.json");
  EXPECT_EQ(index["metadata"]["total_size"], report.output_bytes);
  EXPECT_EQ(index["weight_map"].size(), static_cast<std::size_t>(report.written_tensors));
  const json source = read_json(dir / "src/model.safetensors.index.json");
  for (const auto& [name, file] : source["weight_map"].items()) {
    EXPECT_EQ(index["weight_map"][name], file) << name;
  }
  EXPECT_EQ(read_bytes(dir / "out/tokenizer.json"), read_bytes(dir / "src/tokenizer.json"));
}

TEST(QuantizeCheckpoint, LayersThatAreLeftOutStayAndAreExcluded) {
  const TempDir dir;
  write_model(dir / "src", 3, Layout::kPerExpert);
  QuantizeCheckpointOptions options;
  options.layers = {0, 2};
  const RewriteReport report = quantize_checkpoint(dir / "src", dir / "out", options);
  EXPECT_EQ(report.quantized_linears, 2 * testing::kExperts * 3);
  const auto before = contents(dir / "src"), after = contents(dir / "out");
  const std::string stays = "model.layers.1.mlp.experts.3.up_proj.weight";
  EXPECT_EQ(after.at(stays), before.at(stays));
  const json excluded = read_json(dir / "out/hf_quant_config.json")["quantization"]["exclude_modules"];
  EXPECT_NE(std::find(excluded.begin(), excluded.end(), "model.layers.1.mlp.experts*"), excluded.end());
  const ModelIndex model = index_model(Checkpoint::open(dir / "out"));
  EXPECT_EQ(model.layers[1].experts[0][0]->encoding, Encoding::kDense);
  EXPECT_EQ(model.layers[2].experts[0][0]->encoding, Encoding::kNvfp4);
  options.layers = {7};
  expect_error(ErrorCode::kNotFound, {"7"}, [&] { quantize_checkpoint(dir / "src", dir / "x", options); });
  options.layers = {2, 0, 2};
  expect_error(ErrorCode::kInvalidArgument, {"layer 2"},
               [&] { quantize_checkpoint(dir / "src", dir / "x", options); });
}

TEST(QuantizeCheckpoint, StaticInputScales) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  InputScales scales;
  for (int e = 0; e < testing::kExperts; ++e) {
    const float s = 0.01f * static_cast<float>(e + 1);
    scales.layers[0].push_back({1, {2688.0f * s, s}, {2688.0f * s / 3.0f, s / 3.0f}});
  }
  write_input_scales(dir / "scales.json", scales);
  QuantizeCheckpointOptions options;
  options.activations = ActivationScales::kStatic;
  expect_error(ErrorCode::kInvalidArgument, {"input scales"},
               [&] { quantize_checkpoint(dir / "src", dir / "x", options); });
  options.scales = dir / "scales.json";
  for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
    options.format = family;
    const fs::path out = dir / to_string(family);
    quantize_checkpoint(dir / "src", out, options);
    const ModelIndex model = index_model(Checkpoint::open(out));
    for (std::size_t e = 0; e < testing::kExperts; ++e) {
      const auto& experts = model.layers[0].experts[e];
      for (std::size_t p = 0; p < 3; ++p) {
        const float expected = p == 2 ? scales.layers[0][e].h.scale : scales.layers[0][e].x.scale;
        const float read = read_input_scale(*experts[p]);
        // compressed-tensors keeps the reciprocal: two roundings.
        EXPECT_LE(std::abs(read - expected), family == Family::kModelOpt ? 0.0f : expected * 0x1p-23f);
      }
    }
  }
  // A file that would go with what is replaced.
  options.overwrite = true;
  fs::rename(dir / "scales.json", dir / "modelopt/scales.json");
  options.scales = dir / "modelopt/scales.json";
  expect_error(ErrorCode::kInvalidArgument, {"modelopt holds", "scales.json"},
               [&] { quantize_checkpoint(dir / "src", dir / "modelopt", options); });
  options.scales = dir / "scales.json";
  scales.layers[0].pop_back();
  write_input_scales(dir / "scales.json", scales);
  expect_error(ErrorCode::kInvalidArgument, {"layer 0", "expert 11"},
               [&] { quantize_checkpoint(dir / "src", dir / "x", options); });
  EXPECT_FALSE(fs::exists(dir / "x"));
  EXPECT_FALSE(fs::exists(dir / "x.partial"));
}

// DeepSeek-V3's layout: experts and attention in FP8 under one scale for 128x128, here for the whole matrix.
// `more` are other tensors.
void write_fp8_model(const fs::path& directory, bool fp8_attention,
                     std::vector<testing::TestTensor> more = {}) {
  std::vector<testing::TestTensor> tensors = std::move(more);
  const auto add = [&](const testing::TestTensor& dense) {
    std::vector<std::uint8_t> codes(dense.bytes.size() / 2);
    for (std::size_t i = 0; i < codes.size(); ++i) {
      std::uint16_t bits;
      std::memcpy(&bits, dense.bytes.data() + 2 * i, 2);
      codes[i] = encode_e4m3(to_float(bf16{bits}) * 64.0f);
    }
    tensors.push_back(testing::tensor(dense.name, DType::kE4M3, dense.shape, codes));
    tensors.push_back(
        testing::tensor(dense.name + "_scale_inv", DType::kF32, {1, 1}, std::vector<float>{1.0f / 64.0f}));
  };
  for (const auto& t : testing::plain_tensors(1, Layout::kPerExpert)) {
    if (fp8_attention && t.name.find("q_proj") != std::string::npos) {
      add(t);
    } else {
      tensors.push_back(t);
    }
  }
  for (const auto& t : testing::expert_tensors(0, Layout::kPerExpert)) add(t);
  fs::create_directory(directory);
  testing::write_safetensors(directory / "model.safetensors", tensors);
  json config = testing::model_config_json(1, Layout::kPerExpert);
  config["quantization_config"] = {{"quant_method", "fp8"},
                                   {"fmt", "e4m3"},
                                   {"activation_scheme", "dynamic"},
                                   {"weight_block_size", {128, 128}}};
  testing::write_bytes(directory / "config.json", config.dump());
}

TEST(QuantizeCheckpoint, Fp8Experts) {
  for (const bool fp8_attention : {false, true}) {
    const TempDir dir;
    write_fp8_model(dir / "src", fp8_attention);
    const RewriteReport report = quantize_checkpoint(dir / "src", dir / "out", {});
    EXPECT_EQ(report.consumed_tensors, 2 * 3 * testing::kExperts);
    const ModelIndex before = index_model(Checkpoint::open(dir / "src"));
    const ModelIndex after = index_model(Checkpoint::open(dir / "out"));
    for (std::size_t e = 0; e < testing::kExperts; ++e) {
      const ExpertMatrix& m = *after.layers[0].experts[e][2];
      const std::vector<float> source = read_f32(*before.layers[0].experts[e][2]);
      EXPECT_EQ(decoded(m), dequantize(quantize(MatrixView<const float>(source.data(), m.rows, m.cols))));
    }
    const json config = read_json(dir / "out/config.json")["quantization_config"];
    const json hf = read_json(dir / "out/hf_quant_config.json")["quantization"];
    EXPECT_EQ(config["quant_method"], fp8_attention ? "fp8" : "modelopt");
    EXPECT_EQ(config["quant_algo"], fp8_attention ? "MIXED_PRECISION" : "W4A16_NVFP4");
    EXPECT_EQ(hf["quant_algo"], config["quant_algo"]);
    EXPECT_EQ(hf.contains("quantized_layers"), fp8_attention);
    QuantizeCheckpointOptions options;
    options.format = Family::kCompressedTensors;
    if (fp8_attention) {
      expect_error(ErrorCode::kUnsupported, {"q_proj", "compressed-tensors", "modelopt can"},
                   [&] { quantize_checkpoint(dir / "src", dir / "ct", options); });
      EXPECT_FALSE(fs::exists(dir / "ct.partial"));
    } else {
      quantize_checkpoint(dir / "src", dir / "ct", options);
      EXPECT_EQ(index_model(Checkpoint::open(dir / "ct")).layers[0].num_experts, testing::kExperts);
    }
  }
}

// An input scale of FP8 activations is none of NVFP4's, whatever is asked for.
TEST(QuantizeCheckpoint, InputScalesOfFp8ExpertsAreNotTakenOver) {
  std::vector<testing::TestTensor> scales;
  for (const auto& t : testing::expert_tensors(0, Layout::kPerExpert)) {
    const std::string module = t.name.substr(0, t.name.rfind('.'));
    scales.push_back(testing::tensor(module + ".input_scale", DType::kF32, {}, std::vector<float>{0.125f}));
  }
  for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
    const TempDir dir;
    write_fp8_model(dir / "src", false, scales);
    QuantizeCheckpointOptions options;
    options.format = family;
    const RewriteReport report = quantize_checkpoint(dir / "src", dir / "out", options);
    EXPECT_EQ(report.consumed_tensors, 3 * 3 * testing::kExperts);
    const ModelIndex model = index_model(Checkpoint::open(dir / "out"));
    EXPECT_EQ(model.layers[0].experts[0][2]->input_scale, nullptr);
    for (const TensorRef& tensor : model.checkpoint->tensors())
      EXPECT_EQ(tensor.info->name.find("input"), std::string::npos) << tensor.info->name;
  }
}

// Shared experts in FP8 stay that, and what is made says so.
TEST(QuantizeCheckpoint, SharedExpertsInFp8StayReadable) {
  std::vector<testing::TestTensor> shared;
  for (const char* name : {"gate_proj", "up_proj", "down_proj"}) {
    const std::string module = fmt::format("model.layers.0.mlp.shared_experts.{}", name);
    const bool down = std::string(name) == "down_proj";
    const std::int64_t rows = down ? testing::kHidden : 64, cols = down ? 64 : testing::kHidden;
    shared.push_back(testing::tensor(module + ".weight", DType::kE4M3, {rows, cols},
                                     std::vector<std::uint8_t>(static_cast<std::size_t>(rows * cols), 0x38)));
    shared.push_back(
        testing::tensor(module + ".weight_scale_inv", DType::kF32, {1, 1}, std::vector<float>{0.5f}));
  }
  const TempDir dir;
  write_fp8_model(dir / "src", false, shared);
  quantize_checkpoint(dir / "src", dir / "out", {});
  const ModelIndex model = index_model(Checkpoint::open(dir / "out"));
  EXPECT_EQ(model.layers[0].experts[0][2]->encoding, Encoding::kNvfp4);
  EXPECT_EQ(model.layers[0].shared[2]->encoding, Encoding::kFp8Block);
}

TEST(QuantizeCheckpoint, DynamicActivationsAreSaidInTheConfig) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  QuantizeCheckpointOptions options;
  options.activations = ActivationScales::kDynamic;
  for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
    options.format = family;
    const fs::path out = dir / to_string(family);
    quantize_checkpoint(dir / "src", out, options);
    const json config = read_json(out / "config.json")["quantization_config"];
    EXPECT_EQ(config["config_groups"]["group_0"]["input_activations"]["dynamic"], true);
    EXPECT_EQ(read_input_scale(*index_model(Checkpoint::open(out)).layers[0].experts[0][0]), 0.0f);
  }
}

TEST(QuantizeCheckpoint, KilledHalfWayItContinuesToTheSameBytes) {
  const TempDir dir;
  write_model(dir / "src", 2, Layout::kPerExpert, true);
  quantize_checkpoint(dir / "src", dir / "whole", {});
  // In the first shard, which is too small to have reached the disk, and in the second.
  for (const int calls : {9, 60}) {
    const fs::path out = dir / fmt::format("out{}", calls);
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      set_num_threads(1);  // the parent's threads did not survive the fork
      int seen = 0;
      quantize_checkpoint(dir / "src", out, {}, [&](const Progress&) {
        if (++seen == calls) raise(SIGKILL);
      });
      _exit(0);
    }
    int status = 0;
    waitpid(child, &status, 0);
    ASSERT_TRUE(WIFSIGNALED(status)) << "the child ran to its end";
    EXPECT_FALSE(fs::exists(out));
    const RewriteReport report = quantize_checkpoint(dir / "src", out, {});
    EXPECT_EQ(report.resumed_tensors > 0, calls == 60);
    EXPECT_TRUE(files_of(out) == files_of(dir / "whole"));
    EXPECT_FALSE(fs::exists(out.string() + ".partial"));
  }
}

TEST(QuantizeCheckpoint, StoppedWithinAShardItContinuesBehindTheLastTensor) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  quantize_checkpoint(dir / "src", dir / "whole", {});
  int seen = 0;
  const auto stop = [&](const Progress&) {
    if (++seen == 20) throw std::runtime_error("stopped");
  };
  set_num_threads(1);
  EXPECT_THROW(quantize_checkpoint(dir / "src", dir / "out", {}, stop), std::runtime_error);
  EXPECT_FALSE(fs::exists(dir / "out"));
  // The file has 5 plain tensors and then matrices of 3 tensors each. One thread writes 8 of them at a time.
  EXPECT_EQ(quantize_checkpoint(dir / "src", dir / "out", {}).resumed_tensors, 5 + 3 * (24 - 5));
  set_num_threads(0);
  EXPECT_TRUE(files_of(dir / "out") == files_of(dir / "whole"));
}

void stop_halfway(const Progress& p) {
  if (2 * p.done_bytes > p.total_bytes) throw std::runtime_error("stopped");
}

TEST(QuantizeCheckpoint, AnotherRecipeStartsAnew) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  EXPECT_THROW(quantize_checkpoint(dir / "src", dir / "out", {}, stop_halfway), std::runtime_error);
  QuantizeCheckpointOptions options;
  options.four_over_six = true;
  EXPECT_EQ(quantize_checkpoint(dir / "src", dir / "out", options).resumed_tensors, 0);
  expect_quantized(dir / "src", dir / "out", Family::kModelOpt, GateUpScale::kShared, true);
}

// Even one of the same size and time.
TEST(QuantizeCheckpoint, AnotherConfigStartsAnew) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  const fs::path path = dir / "src/config.json";
  EXPECT_THROW(quantize_checkpoint(dir / "src", dir / "out", {}, stop_halfway), std::runtime_error);
  const auto time = fs::last_write_time(path);
  std::string config = read_bytes(path);
  config.replace(config.find("qwen3_moe"), 9, "qwen2_moe");
  testing::write_bytes(path, config);
  fs::last_write_time(path, time);
  EXPECT_EQ(quantize_checkpoint(dir / "src", dir / "out", {}).resumed_tensors, 0);
  EXPECT_EQ(read_json(dir / "out/config.json")["model_type"], "qwen2_moe");
}

TEST(QuantizeCheckpoint, DestinationsThatAreInTheWay) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  quantize_checkpoint(dir / "src", dir / "out", {});
  const auto first = files_of(dir / "out");
  expect_error(ErrorCode::kInvalidArgument, {"out exists already"},
               [&] { quantize_checkpoint(dir / "src", dir / "out", {}); });
  QuantizeCheckpointOptions options;
  options.overwrite = true;
  options.format = Family::kCompressedTensors;
  const auto stop = [](const Progress&) { throw std::runtime_error("stopped"); };
  EXPECT_THROW(quantize_checkpoint(dir / "src", dir / "out", options, stop), std::runtime_error);
  EXPECT_TRUE(files_of(dir / "out") == first);
  quantize_checkpoint(dir / "src", dir / "out", options);
  EXPECT_FALSE(files_of(dir / "out") == first);
  EXPECT_FALSE(fs::exists(dir / "out/hf_quant_config.json"));
  expect_error(ErrorCode::kInvalidArgument, {"the source itself"},
               [&] { quantize_checkpoint(dir / "src", dir / "src", options); });
  // Replacing a directory must not take the source away with it.
  fs::rename(dir / "src", dir / "out/src");
  expect_error(ErrorCode::kInvalidArgument, {"holds the source"},
               [&] { quantize_checkpoint(dir / "out/src", dir / "out", options); });
  fs::rename(dir / "out/src", dir / "src");
  expect_error(ErrorCode::kInvalidArgument, {"holds the source"},
               [&] { quantize_checkpoint(dir / "src/model.safetensors", dir / "src", options); });
  // Nor may that, by a link, or what makes room for work in progress.
  fs::create_directory(dir / "links");
  fs::create_symlink(dir / "src/model.safetensors", dir / "links/model.safetensors");
  expect_error(ErrorCode::kInvalidArgument, {"holds the source"},
               [&] { quantize_checkpoint(dir / "links", dir / "src", options); });
  fs::rename(dir / "src", dir / "new.partial");
  expect_error(ErrorCode::kInvalidArgument, {"the source itself"},
               [&] { quantize_checkpoint(dir / "new.partial", dir / "new", {}); });
  fs::rename(dir / "new.partial", dir / "src");
  fs::rename(dir / "src/model.safetensors", dir / "y.safetensors.partial");
  expect_error(ErrorCode::kInvalidArgument, {"the source itself"},
               [&] { quantize_checkpoint(dir / "y.safetensors.partial", dir / "y.safetensors", {}); });
  fs::rename(dir / "y.safetensors.partial", dir / "src/model.safetensors");
  fs::create_hard_link(dir / "src/model.safetensors", dir / "y.safetensors.partial");
  expect_error(ErrorCode::kInvalidArgument, {"the source itself"},
               [&] { quantize_checkpoint(dir / "src/model.safetensors", dir / "y.safetensors", {}); });
  expect_error(ErrorCode::kInvalidArgument, {"must be one"},
               [&] { quantize_checkpoint(dir / "src", dir / "x.safetensors", {}); });
}

TEST(QuantizeCheckpoint, ASingleFileBecomesAFileOrADirectory) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  const fs::path source = dir / "src/model.safetensors";
  quantize_checkpoint(source, dir / "out.safetensors", {});
  quantize_checkpoint(source, dir / "out", {});
  EXPECT_TRUE(contents(dir / "out.safetensors") == contents(dir / "out"));
  EXPECT_TRUE(fs::exists(dir / "out/hf_quant_config.json"));
  EXPECT_FALSE(fs::exists(dir / "out/tokenizer.json"));
  expect_error(ErrorCode::kInvalidArgument, {"exists already"},
               [&] { quantize_checkpoint(source, dir / "out.safetensors", {}); });
  expect_quantized(source, dir / "out.safetensors", Family::kModelOpt, GateUpScale::kShared, false);
  // By a link it goes where that leads; only a file is replaced by one, and that is known before the work.
  QuantizeCheckpointOptions options;
  options.overwrite = true;
  fs::rename(dir / "out.safetensors", dir / "real");
  fs::create_symlink("real", dir / "out.safetensors");
  quantize_checkpoint(source, dir / "out.safetensors", options);
  EXPECT_TRUE(fs::is_symlink(dir / "out.safetensors"));
  EXPECT_TRUE(contents(dir / "real") == contents(dir / "out"));
  fs::create_directory(dir / "folder.safetensors");
  const auto never = [](const Progress&) { ADD_FAILURE() << "work was done"; };
  expect_error(ErrorCode::kInvalidArgument, {"folder.safetensors is no regular file"},
               [&] { quantize_checkpoint(source, dir / "folder.safetensors", options, never); });
  // Whatever its name is.
  fs::copy_file(source, dir / "model.bin");
  quantize_checkpoint(dir / "model.bin", dir / "of_bin", {});
  EXPECT_TRUE(contents(dir / "of_bin") == contents(dir / "out"));
}

TEST(QuantizeCheckpoint, WhatIsNvfp4AlreadyIsRefused) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert);
  quantize_checkpoint(dir / "src", dir / "out", {});
  expect_error(ErrorCode::kInvalidArgument, {"layer 0", "NVFP4 already", "convert"},
               [&] { quantize_checkpoint(dir / "out", dir / "again", {}); });
}

TEST(QuantizeCheckpoint, ANanInTheWeightsIsNamedAndNothingIsLeft) {
  const TempDir dir;
  auto tensors = testing::plain_tensors(1, Layout::kPerExpert);
  for (auto& t : testing::expert_tensors(0, Layout::kPerExpert)) {
    if (t.name.find("experts.7.up_proj") != std::string::npos) t.bytes[41] = '\x7f', t.bytes[40] = '\xc0';
    tensors.push_back(t);
  }
  testing::write_safetensors(dir / "src.safetensors", tensors);
  // It would come again, so there is nothing to continue.
  for (const char* out : {"out", "out.safetensors"}) {
    expect_error(ErrorCode::kInvalidFile, {"experts.7.up_proj", "1 blocks"},
                 [&] { quantize_checkpoint(dir / "src.safetensors", dir / out, {}); });
    EXPECT_EQ(std::distance(fs::directory_iterator(dir.path()), {}), 1) << out;
  }
}

TEST(QuantizeCheckpoint, KilledAtTheEndOfAFileItLeavesNoJournal) {
  const TempDir dir;
  write_model(dir / "src", 1, Layout::kPerExpert, true);
  quantize_checkpoint(dir / "src", dir / "whole", {});
  const std::string stale = "megamoe journal 1, recipe 0123456789abcdef\n";
  const fs::path shard = dir / "out.partial/model-00001-of-00002.safetensors";
  EXPECT_THROW(quantize_checkpoint(dir / "src", dir / "out", {},
                                   [&](const Progress&) {
                                     if (fs::exists(shard)) throw std::runtime_error("stopped");
                                   }),
               std::runtime_error);
  testing::write_bytes(shard.string() + ".journal", stale);
  quantize_checkpoint(dir / "src", dir / "out", {});
  EXPECT_TRUE(files_of(dir / "out") == files_of(dir / "whole"));

  write_model(dir / "one", 1, Layout::kPerExpert);
  const fs::path out = dir / "out.safetensors";
  testing::write_bytes(out, "whole");
  testing::write_bytes(out.string() + ".journal", stale);
  expect_error(ErrorCode::kInvalidArgument, {"exists already"},
               [&] { quantize_checkpoint(dir / "one/model.safetensors", out, {}); });
  EXPECT_FALSE(fs::exists(out.string() + ".journal"));
}

TEST(QuantizeCheckpoint, ADeadExpertGetsFiniteScales) {
  const TempDir dir;
  auto tensors = testing::plain_tensors(1, Layout::kPerExpert);
  for (auto& t : testing::expert_tensors(0, Layout::kPerExpert)) {
    if (t.name.find("experts.1.") != std::string::npos) std::fill(t.bytes.begin(), t.bytes.end(), '\0');
    // Of expert 2 only the gate is zero: the scale it shares is that of up.
    if (t.name.find("experts.2.gate") != std::string::npos) std::fill(t.bytes.begin(), t.bytes.end(), '\0');
    tensors.push_back(t);
  }
  testing::write_safetensors(dir / "src.safetensors", tensors);
  for (const Family family : {Family::kModelOpt, Family::kCompressedTensors}) {
    QuantizeCheckpointOptions options;
    options.format = family;
    const fs::path out = dir / fmt::format("{}.safetensors", to_string(family));
    quantize_checkpoint(dir / "src.safetensors", out, options);
    expect_quantized(dir / "src.safetensors", out, family, GateUpScale::kShared, false);
    const ModelIndex model = index_model(Checkpoint::open(out));
    EXPECT_EQ(read_nvfp4(*model.layers[0].experts[1][2]).tensor_scale, 1.0f);
    for (const float v : decoded(*model.layers[0].experts[1][0])) ASSERT_EQ(v, 0.0f);
  }
}

TEST(QuantizeCheckpoint, Layers) {
  EXPECT_EQ(parse_layers("3"), (std::vector<int>{3}));
  EXPECT_EQ(parse_layers("4,0,3-5"), (std::vector<int>{0, 3, 4, 5}));
  for (const char* text :
       {"", ",", "1,", "-1", "3-1", "a", "1-", "1 ", "1-2-3", "99999999999", "0-9999999"}) {
    expect_error(ErrorCode::kInvalidArgument, {"0,3-5"}, [&] { parse_layers(text); });
  }
}

}  // namespace
}  // namespace megamoe
