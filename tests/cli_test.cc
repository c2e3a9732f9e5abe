// cli_test.cc: the command from outside: what each verb prints, and how each bad input ends.
#include <fcntl.h>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <nlohmann/json.hpp>

#include "base/test_variable.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/test_files.h"
#include "cli/test_xml.h"
#include "engine/input_scales.h"

namespace megamoe {
namespace {

using nlohmann::json;
using testing::tensor;
using testing::TestTensor;

const std::string kModel = MEGAMOE_SOURCE_DIR "/examples/tiny-qwen3-moe";
const std::string kActivations = kModel + "/activations.safetensors";

struct Outcome {
  int code = -1;
  std::string out, err;
};

class CliTest : public ::testing::Test {
 protected:
  // Runs the command through the shell, so that arguments with spaces need quotes.
  Outcome megamoe(const std::string& arguments) {
    const std::string errors = (dir_ / "stderr").string();
    FILE* pipe = popen(fmt::format("{} {} 2>{}", MEGAMOE_CLI, arguments, errors).c_str(), "r");
    if (pipe == nullptr) throw std::runtime_error("cannot start a shell");
    Outcome outcome;
    char buffer[4096];
    for (std::size_t n; (n = std::fread(buffer, 1, sizeof(buffer), pipe)) > 0;) outcome.out.append(buffer, n);
    const int status = pclose(pipe);
    outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    outcome.err = testing::read_bytes(errors);
    return outcome;
  }
  json megamoe_json(const std::string& arguments) {
    const Outcome outcome = megamoe(arguments + " --json");
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    return json::parse(outcome.out);
  }
  // Every error ends the same way: exit code, one line on stderr that holds `part`, nothing on stdout.
  void expect_refused(const std::string& arguments, int code, const std::string& part) {
    const Outcome outcome = megamoe(arguments);
    EXPECT_EQ(outcome.code, code) << arguments << ": " << outcome.err;
    EXPECT_EQ(outcome.out, "") << arguments;
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1)
        << arguments << ": " << outcome.err;
    EXPECT_TRUE(outcome.err.starts_with("megamoe: ")) << outcome.err;
    EXPECT_NE(outcome.err.find(part), std::string::npos) << arguments << ": " << outcome.err;
  }
  std::string path(const std::string& name) const { return (dir_ / name).string(); }

  testing::TempDir dir_;
};

// Bad arguments and inputs of one verb.
struct Refusal {
  const char* arguments;
  int code;
  const char* part;
};

TEST_F(CliTest, HelpAndVersion) {
  EXPECT_EQ(megamoe("--version").out, "megamoe " MEGAMOE_VERSION "\n");
  const Outcome help = megamoe("--help");
  EXPECT_EQ(help.code, 0);
  for (const std::string verb : {"inspect", "run", "calibrate", "verify", "bench", "backends"}) {
    EXPECT_NE(help.out.find("\n  " + verb), std::string::npos) << verb;
    const Outcome verb_help = megamoe(verb + " --help");
    EXPECT_EQ(verb_help.code, 0) << verb;
    EXPECT_NE(verb_help.out.find("--json"), std::string::npos) << verb;
    EXPECT_NE(verb_help.out.find("example: megamoe " + verb), std::string::npos) << verb;
  }
}

TEST_F(CliTest, BackendsNameOneDefault) {
  const json list = megamoe_json("backends").at("backends");
  EXPECT_EQ(
      std::count_if(list.begin(), list.end(), [](const json& b) { return b.at("default").get<bool>(); }), 1);
  EXPECT_EQ(list.back().at("name"), "ref");
  EXPECT_NE(megamoe("backends").out.find("* "), std::string::npos);
}

TEST_F(CliTest, InspectDescribesTheExample) {
  const json found = megamoe_json("inspect " + kModel);
  ASSERT_EQ(found.at("layers").size(), 2u);
  EXPECT_EQ(found["layers"][1]["experts"], 16);
  EXPECT_EQ(found["layers"][1]["hidden"], 256);
  EXPECT_EQ(found["layers"][1]["intermediate"], 128);
  EXPECT_EQ(found["layers"][1]["bits_per_weight"], 16);
  EXPECT_EQ(found["layers"][1]["bytes"], 16 * 3 * 256 * 128 * 2);
  EXPECT_NE(megamoe("inspect " + kModel).out.find("nothing suspicious"), std::string::npos);
  EXPECT_EQ(megamoe_json("inspect --layer 1 " + kModel)["layers"][0]["expert_list"].size(), 16u);
}

// The recorded output is FP32, of an input that was rounded to BF16 when it was saved: the error before our
// output's own rounding is 0.0015 and 0.0012, as an independent implementation has it.
TEST_F(CliTest, RunMeasuresTheExample) {
  const json found = megamoe_json(fmt::format("run {} --activations {} --repeat 2", kModel, kActivations));
  ASSERT_EQ(found.at("layers").size(), 2u);
  EXPECT_NEAR(found["layers"][0]["error"]["relative_l2_before_rounding"].get<double>(), 0.0015, 0.00005);
  EXPECT_NEAR(found["layers"][1]["error"]["relative_l2_before_rounding"].get<double>(), 0.0012, 0.00006);
  EXPECT_LT(found["layers"][0]["error"]["relative_l2"].get<double>(), 0.0025);
  EXPECT_EQ(found["layers"][0]["rows"], 512 * 4);
  EXPECT_EQ(found["layers"][0]["routing"], "recorded logits");
}

TEST_F(CliTest, RunSavesOutputsAndStages) {
  const json found =
      megamoe_json(fmt::format("run {} --activations {} --layer 1 --tokens 3 --repeat 1 --save {} --dump {}",
                               kModel, kActivations, path("y.safetensors"), path("stages")));
  EXPECT_EQ(found["layers"][0]["tokens"], 3);
  const SafetensorsFile saved = SafetensorsFile::open(path("y.safetensors"));
  ASSERT_EQ(saved.tensors().size(), 1u);
  EXPECT_EQ(saved.tensors()[0].name, "layers.1.mlp.output");
  EXPECT_EQ(saved.tensors()[0].shape, (std::vector<std::int64_t>{3, 256}));
  const SafetensorsFile stages = SafetensorsFile::open(path("stages") + "/layer-1.safetensors");
  ASSERT_EQ(stages.tensors().size(), found["layers"][0]["stages"].size());
  const auto find = [&](const std::string& name) -> const TensorInfo& {
    for (const TensorInfo& t : stages.tensors()) {
      if (t.name == name) return t;
    }
    throw std::runtime_error("no stage " + name);
  };
  EXPECT_EQ(find("x").shape, (std::vector<std::int64_t>{3, 256}));
  EXPECT_EQ(find("h").shape, (std::vector<std::int64_t>{12, 128}));
  // What was saved is the last stage, bit for bit.
  const auto y = stages.bytes(find("y")), output = saved.bytes(saved.tensors()[0]);
  EXPECT_TRUE(std::equal(y.begin(), y.end(), output.begin(), output.end()));
}

TEST_F(CliTest, RunTakesNoTokensAndAnyThreadCount) {
  EXPECT_EQ(megamoe_json(fmt::format("run {} --activations {} --layer 0 --tokens 0", kModel,
                                     kActivations))["layers"][0]["rows"],
            0);
  std::string first;
  for (const int threads : {1, 2, 64}) {
    const std::string file = path(fmt::format("y{}.safetensors", threads));
    EXPECT_EQ(
        megamoe(fmt::format("run {} --activations {} --layer 0 --tokens 9 --repeat 1 --threads {} --save {}",
                            kModel, kActivations, threads, file))
            .code,
        0);
    if (first.empty()) first = testing::read_bytes(file);
    EXPECT_EQ(testing::read_bytes(file), first) << threads;
  }
}

TEST_F(CliTest, CalibrateWritesScalesOfEveryExpert) {
  const json found =
      megamoe_json(fmt::format("calibrate {} --activations {} -o {}", kModel, kActivations, path("s.json")));
  EXPECT_EQ(found["layers"].size(), 2u);
  const InputScales scales = read_input_scales(path("s.json"));
  ASSERT_EQ(scales.layers.size(), 2u);
  for (std::int64_t e = 0; e < 16; ++e) {
    EXPECT_GT(scales.at(1, e).x.scale, 0);
    EXPECT_GT(scales.at(1, e).h.scale, 0);
  }
}

TEST_F(CliTest, VerifyOfACheckpointAgainstItselfIsExact) {
  const json found =
      megamoe_json(fmt::format("verify {} {} --min-snr 60 --html {}", kModel, kModel, path("r.html")));
  EXPECT_TRUE(found["passed"].get<bool>());
  EXPECT_TRUE(found["layers"][0]["matrices"][0]["exact"].get<bool>());
  EXPECT_TRUE(found["layers"][0]["matrices"][0]["snr_db"].is_null());  // infinite
  const std::string page = testing::read_bytes(path("r.html"));
  for (const std::string outside : {"http", "src=", "href", "@import", "url(", "<script"}) {
    EXPECT_EQ(page.find(outside), std::string::npos) << outside;
  }
  EXPECT_NE(page.find("<title>layer 1, expert 15, down: exact"), std::string::npos);
}

TEST_F(CliTest, VerifyFailsWhereTheSnrIsMissed) {
  const auto write = [&](const std::string& name, float value) {
    std::vector<TestTensor> tensors;
    for (const std::string matrix : {"gate_proj", "up_proj", "down_proj"}) {
      tensors.push_back(tensor(fmt::format("model.layers.0.mlp.experts.0.{}.weight", matrix), DType::kF32,
                               {16, 16}, std::vector<float>(256, value)));
    }
    testing::write_safetensors(path(name), tensors);
  };
  write("a.safetensors", 1.125f), write("b.safetensors", 1.0f);  // 18.06 dB
  const std::string pair = fmt::format("verify {} {}", path("a.safetensors"), path("b.safetensors"));
  EXPECT_EQ(megamoe(pair).code, 0);
  EXPECT_EQ(megamoe(pair + " --min-snr 18").code, 0);
  const Outcome missed = megamoe(pair + " --min-snr 18.1 --json");
  EXPECT_EQ(missed.code, 1);
  EXPECT_FALSE(json::parse(missed.out)["passed"].get<bool>());
}

TEST_F(CliTest, BenchListsTheModels) {
  const json list = megamoe_json("bench --list").at("models");
  const auto mixtral =
      std::find_if(list.begin(), list.end(), [](const json& m) { return m.at("model") == "mixtral-8x7b"; });
  ASSERT_NE(mixtral, list.end());
  EXPECT_EQ(mixtral->at("hidden"), 4096);
  EXPECT_EQ(mixtral->at("experts"), 8);
  EXPECT_EQ(mixtral->at("layer_bytes"), std::int64_t{8} * 3 * 4096 * 14336 * 9 / 16);
  EXPECT_NE(megamoe("bench --list").out.find("\nqwen3-30b-a3b "), std::string::npos);
}

// The smallest layer in the table whose tokens take four experts.
const std::string kBench = "bench --model GLM-4.7-Flash --experts 4 --repeat 2 ";

TEST_F(CliTest, BenchTimesALayer) {
  const json found = megamoe_json(kBench + "--tokens 3,1,3 --activations nvfp4,bf16 --svg " + path("t.svg"));
  EXPECT_FALSE(found.at("device").get<std::string>().empty());
  EXPECT_EQ(found.at("sustained"), false);
  EXPECT_FALSE(found.at("bandwidth_of").get<std::string>().empty());
  EXPECT_GT(found.at("bandwidth_bytes_per_second").get<double>(), 0);
  const json& results = found.at("results");
  ASSERT_EQ(results.size(), 4u);
  for (std::size_t i = 0; i < 4; ++i) {
    const json& r = results[i];
    EXPECT_EQ(r.at("model"), "glm-4.7-flash");
    EXPECT_EQ(r.at("activations"), i < 2 ? "nvfp4" : "bf16");
    const int tokens = i % 2 == 0 ? 1 : 3;
    EXPECT_EQ(r.at("tokens"), tokens);
    EXPECT_EQ(r.at("rows"), tokens * 4);
    EXPECT_EQ(r.at("experts"), 4);
    EXPECT_EQ(r.at("model_experts"), 64);
    EXPECT_EQ(r.at("experts_used"), 4);
    EXPECT_EQ(r.at("checked_rows"), tokens);
    EXPECT_EQ(r.at("all_seconds").size(), 2u);
    const double values = 3.0 * 2048 * 1536, seconds = r.at("seconds");
    EXPECT_GT(seconds, 0);
    EXPECT_EQ(r.at("flops"), 2 * values * tokens * 4);
    EXPECT_EQ(r.at("weight_bytes"), 4 * values * 9 / 16);
    EXPECT_DOUBLE_EQ(r.at("payload_bytes_per_second").get<double>() * seconds, 4 * values * 9 / 16);
    EXPECT_EQ(r.at("warm"), 10 * values / 3 * 9 / 16 < 4 * found.at("cache_bytes").get<double>());
    // The middle of two is their mean.
    const auto rate_of = [&](const char* name, const char* once) {
      const json& all = r.at(name);
      return all.empty() ? found.at(once) : json((all.at(0).get<double>() + all.at(1).get<double>()) / 2);
    };
    const json memory = rate_of("all_bandwidths", "bandwidth_bytes_per_second"),
               peak = rate_of("all_peak_flops", "flops_per_second");
    const double reading = r.at("weight_bytes").get<double>() / memory.get<double>();
    const double computing = peak.is_null() ? 0.0 : r.at("flops").get<double>() / peak.get<double>();
    EXPECT_EQ(r.at("floor_of"), computing > reading ? "compute" : "memory");
    EXPECT_DOUBLE_EQ(r.at("floor_seconds").get<double>(), std::max(reading, computing));
  }
  const testing::Xml image = testing::parse_xml(testing::read_bytes(path("t.svg")));
  EXPECT_EQ(image.count("polyline"), 3);
  for (const char* text :
       {"glm-4.7-flash", "4 of its 64 experts", "bf16 activations", "nvfp4 activations", "floor"}) {
    EXPECT_NE(image.text.find(text), std::string::npos) << text;
  }
}

TEST_F(CliTest, BenchPrintsATable) {
  const Outcome outcome = megamoe(kBench + "--tokens 2 --activations fp8 --routing one --backend cpu");
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  for (const char* part :
       {"backend cpu on ", "glm-4.7-flash: hidden 2048, intermediate 1536, 4 of its 64 experts, top-4",
        "routing one", "\nfp8 ", "rows held against ref: 2 "}) {
    EXPECT_NE(outcome.out.find(part), std::string::npos) << part << " in\n" << outcome.out;
  }
}

TEST_F(CliTest, BenchRefusesWhatItCannotTime) {
  for (const auto& [arguments, code, part] : std::vector<Refusal>{
           {"--model deepseek-v5", 1,
            "did you mean deepseek-v3, deepseek-v4-flash, deepseek-v4-pro; `megamoe bench"},
           {"--model llama", 1, "did you mean llama-4-scout, llama-4-maverick"},
           {"--model ''", 2, "--model: expected no empty part"},
           {"--model gpt-oss-20b,", 2, "--model: expected no empty part, got 'gpt-oss-20b,'"},
           {"--activations ,bf16", 2, "--activations: expected no empty part"},
           {"--tokens 1,,2", 2, "--tokens: expected no empty part, got '1,,2'"},
           {"--tokens 1,99999999999999999999", 2, "--tokens: expected a whole number"},
           {"--tokens 010", 2, "--tokens: expected a whole number, got '010'"},
           {"--experts 99999999999999999999", 2, "--experts: expected a whole number"},
           {"--tokens 0", 1, "got 0"},
           {"--tokens 1,-8", 1, "got -8"},
           {"--tokens many", 2, "--tokens"},
           {"--tokens 1.5", 2, "--tokens"},
           {"--activations int4", 1, "int4"},
           {"--routing sideways", 1, "uniform, zipf or one"},
           {"--x-scale sometimes", 1, "sometimes"},
           {"--x-scale tensor", 1, "got tensor"},
           {"--experts 0", 1, "--experts"},
           {"--experts 7", 1, "8 to 128 experts, got 7"},
           {"--experts 129", 1, "got 129"},
           {"--repeat 0", 1, "--repeat"},
           {"--threads -1", 1, "-1"},
           {"--backend abacus", 1, "abacus"},
           {"--svg /no/such/dir/t.svg", 1, "/no/such/dir"},
           {"--svg /", 1, "is a directory"},
           {"--model glm-4.7-flash --experts 4 --backend cpu --tokens 1000000000000", 1, "GiB are available"},
           {"--tune /no/such/dir/tiles.txt", 1, "/no/such/dir"},
       }) {
    expect_refused("bench " + std::string(arguments), code, part);
  }
  // Refused after it was found that the image could be written: there is none.
  expect_refused("bench --experts 7 --svg " + path("t.svg"), 1, "got 7");
  expect_refused(
      fmt::format("bench --model glm-4.7-flash --experts 4 --tokens 1000000000000 --backend cpu --svg {}",
                  path("t.svg")),
      1, "GiB");
  const std::string tune = "bench --tune " + path("tiles.txt");
  expect_refused(tune + " --backend cpu", 1, "timed on a GPU; the backend is cpu");
  expect_refused(tune + " --svg " + path("t.svg"), 1, "leave --svg away");
  for (const auto& entry : std::filesystem::directory_iterator(dir_.path())) {
    EXPECT_EQ(entry.path().filename(), "stderr");
  }
}

TEST_F(CliTest, AClosedPipeIsNoError) {
  EXPECT_EQ(megamoe(fmt::format("inspect {} --layer 0 --json | true; exit 0", kModel)).err, "");
  expect_refused("--version >/dev/full", 1, "standard output");
}

// Nor is a standard stream that is closed or full; and no file takes its place.
TEST_F(CliTest, StandardErrorMayBeAway) {
  for (const char* away : {"2>&-", "2>/dev/full"}) {
    EXPECT_EQ(megamoe(fmt::format("nope {}; echo $?; true", away)).out, "2\n") << away;
    EXPECT_EQ(megamoe(fmt::format("inspect nope {}; echo $?; true", away)).out, "1\n") << away;
    const std::string made = path(std::string("made") + away[3]);
    EXPECT_EQ(megamoe(fmt::format("quantize {} {} --progress <&- >&- {}; true", kModel, made, away)).err, "");
    const Outcome outcome = megamoe(fmt::format("verify {} {}", made, kModel));
    EXPECT_EQ(outcome.code, 0) << away << ": " << outcome.err;
  }
}

TEST_F(CliTest, RefusesWrongUsage) {
  for (const auto& [arguments, code, part] : std::vector<Refusal>{
           {"", 2, "--help"},
           {"frobnicate", 2, "no verb 'frobnicate'"},
           {"--frobnicate", 2, "no option '--frobnicate'"},
           {"run a --activations b --tokens 99999999999999999999", 2,
            "--tokens: expected a whole number, got '9"},
           {"run a --activations b --tokens 0x10", 2, "--tokens: expected a whole number, got '0x10'"},
           {"inspect a --layer ' 1'", 2, "--layer: expected a whole number, got ' 1'"},
           {"verify a b --min-snr nan", 2, "--min-snr: expected a number, got 'nan'"},
           {"verify a b --worst -1", 1, "--worst must be 0 or more, got -1"},
           {"verify a b --min-snr ''", 2, "--min-snr: expected a number, got an empty text"},
           {"run a --activations b --layer ''", 2, "--layer: expected a whole number, got an empty text"},
           {"quantize a b --layers ''", 2, "expected layers"},
           {"inspect", 2, "CHECKPOINT"},
           {"inspect a b", 2, "--help"},
           {"inspect x --frobnicate", 2, "--frobnicate"},
           {"inspect x --layer two", 2, "--layer"},
           {"run x", 2, "--activations"},
           {"run x --activations y --repeat 0", 1, "--repeat"},
           {"run x --activations y --tokens -1", 1, "--tokens"},
           {"run x --activations y --format int4", 1, "int4"},
           {"run x --activations y --format nvfp4 --x-scale sometimes", 1, "sometimes"},
           {"run x --activations y --x-scale tensor", 1, "nvfp4"},
           {"run x --activations y --l1 sideways", 1, "sideways"},
           {"run x --activations y --threads -1", 1, "-1"},
           {"inspect x --threads=-1", 1, "-1"},
           {"calibrate x --activations y", 2, "--output"},
           {"verify x", 2, "SOURCE"},
           {"verify x y --min-snr much", 2, "--min-snr"},
       }) {
    expect_refused(arguments, code, part);
  }
}

// Square fused tensors: the error asks for an option, so the verb must have it.
TEST_F(CliTest, EveryReaderTakesAFusedLayout) {
  std::vector<float> values(2 * 32 * 32);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = 0.01f * static_cast<float>(i % 97) - 0.5f;
  const auto experts = [&](const char* name, std::int64_t rows, std::int64_t cols) {
    return tensor(fmt::format("model.layers.0.mlp.experts.{}", name), DType::kF32, {2, rows, cols},
                  std::vector<float>(values.begin(), values.begin() + 2 * rows * cols));
  };
  std::filesystem::create_directory(dir_ / "square");
  testing::write_safetensors(dir_ / "square/model.safetensors",
                             {experts("gate_up_proj", 32, 32), experts("down_proj", 32, 16)});
  testing::write_bytes(dir_ / "square/config.json", R"({"num_experts_per_tok": 1})");
  testing::write_safetensors(
      dir_ / "x.safetensors",
      {tensor("layers.0.mlp.input", DType::kF32, {1, 32}, std::vector<float>(32, 1)),
       tensor("layers.0.mlp.router_logits", DType::kF32, {1, 2}, std::vector<float>{1, 0})});
  const std::string model = path("square"), with = " --activations " + path("x.safetensors");
  for (const std::string& verb :
       {"inspect " + model, "run " + model + with, "calibrate " + model + with + " -o " + path("s.json"),
        "quantize " + model + " " + path("q"), "verify " + path("q") + " " + model}) {
    if (!verb.starts_with("verify")) expect_refused(verb, 1, "--fused-layout");
    megamoe_json(verb + " --fused-layout rows-first");
  }
  expect_refused("inspect " + model + " --fused-layout sideways", 2, "--fused-layout");
}

TEST_F(CliTest, RefusesWrongFiles) {
  testing::write_bytes(dir_ / "empty.safetensors", "");
  testing::write_bytes(dir_ / "text.safetensors", "this is no safetensors file at all");
  std::filesystem::create_directory(dir_ / "nothing");
  const std::string whole = testing::read_bytes(kModel + "/model.safetensors");
  testing::write_bytes(dir_ / "short.safetensors", whole.substr(0, whole.size() - 1));
  const std::string activations = " --activations " + kActivations, empty = path("empty.safetensors");
  expect_refused("inspect /no/such/model", 1, "/no/such/model");
  expect_refused("inspect '/no/such\nmodel' --json", 1, "such\\nmodel");
  expect_refused("inspect " + empty, 1, "empty.safetensors");
  expect_refused("inspect " + path("text.safetensors") + " --json", 1, "text.safetensors");
  expect_refused("inspect " + path("short.safetensors"), 1, "short.safetensors");
  expect_refused("inspect " + path("nothing"), 1, "nothing");
  expect_refused("inspect --layer 2 " + kModel, 1, "2");
  expect_refused("run --layer 2 " + kModel + activations, 1, "2");
  expect_refused("run " + kModel + " --activations " + path("none.safetensors"), 1, "none.safetensors");
  expect_refused("run " + kModel + " --activations " + empty, 1, "empty.safetensors");
  expect_refused("run " + kModel + " --activations " + kModel + "/model.safetensors", 1, "mlp.input");
  expect_refused("run " + kModel + activations + " --format fp8", 1, "fp8 activations with bf16 weights");
  expect_refused("run " + kModel + activations + " --backend abacus", 1, "abacus");
  expect_refused("run " + kModel + activations + " --input x", 1, "no tensor x");
  expect_refused("calibrate " + kModel + activations + " --layer 5 -o " + path("s.json"), 1, "5");
  expect_refused("verify " + kModel + " /no/such/model", 1, "/no/such/model");
}

TEST_F(CliTest, RefusesWrongActivations) {
  const auto write = [&](const std::vector<TestTensor>& tensors) {
    testing::write_safetensors(dir_ / "a.safetensors", tensors);
    return fmt::format("run {} --layer 0 --activations {}", kModel, path("a.safetensors"));
  };
  const TestTensor x = tensor("layers.0.mlp.input", DType::kF32, {1, 256}, std::vector<float>(256, 1));
  EXPECT_EQ(megamoe(write({x})).code, 0);  // routed by the checkpoint's router
  expect_refused(write({tensor("layers.0.mlp.input", DType::kF32, {1, 255}, std::vector<float>(255))}), 1,
                 "[1, 255]");
  expect_refused(write({tensor("layers.0.mlp.input", DType::kI8, {1, 256}, std::vector<char>(256))}), 1,
                 "I8");
  expect_refused(write({x, tensor("layers.0.mlp.output", DType::kF32, {2, 256}, std::vector<float>(512))}), 1,
                 "1 tokens");
  const TestTensor weights =
      tensor("layers.0.mlp.expert_weights", DType::kF32, {1, 4}, std::vector<float>(4, 1));
  const auto ids = [](std::int32_t last) {
    return tensor("layers.0.mlp.expert_ids", DType::kI32, {1, 4}, std::vector<std::int32_t>{0, -1, 1, last});
  };
  EXPECT_EQ(megamoe(write({x, weights, ids(15)})).code, 0);
  expect_refused(write({x, weights, ids(16)}), 1, "slot 3");
  expect_refused(write({x, weights, ids(-2)}), 1, "slot 3");
  expect_refused(write({x, ids(0)}), 1, "no expert weights");
}

// An output that cannot be written leaves nothing, and no half of anything on stdout.
TEST_F(CliTest, RefusesOutputsThatCannotBeWritten) {
  const std::string tail = fmt::format("{} --activations {} --layer 0 ", kModel, kActivations);
  expect_refused("calibrate " + tail + "-o /no/such/dir/s.json --json", 1, "/no/such/dir");
  expect_refused("run " + tail + "--tokens 1 --save /no/such/dir/y.safetensors --json", 1, "/no/such/dir");
  std::filesystem::create_directory(dir_ / "folder");
  expect_refused("run " + tail + "--tokens 1 --save " + path("folder"), 1, "folder");
  EXPECT_FALSE(std::filesystem::exists(path("folder") + ".partial"));
  EXPECT_FALSE(std::filesystem::exists(path("folder") + ".journal"));
  testing::write_bytes(dir_ / "file", "");
  expect_refused("run " + tail + "--tokens 1 --dump " + path("file") + " --json", 1, "file");
  expect_refused(fmt::format("verify {} {} --html /no/such/dir/r.html --json", kModel, kModel), 1,
                 "/no/such/dir");
}

// Whatever a verb writes, what it reads stays as it is.
TEST_F(CliTest, RefusesOutputsThatAreInputs) {
  namespace fs = std::filesystem;
  fs::create_directory(dir_ / "model");
  for (const char* name : {"model.safetensors", "config.json"})
    fs::copy_file(fs::path(kModel) / name, dir_ / "model" / name);
  fs::copy_file(kActivations, dir_ / "layer-0.safetensors");
  fs::create_symlink("model/config.json", dir_ / "link");
  const std::string model = path("model"), activations = path("layer-0.safetensors");
  const std::string tail = fmt::format(" {} --activations {} --layer 0 ", model, activations);
  for (const std::string& file : {activations, model + "/model.safetensors", model + "/new", path("link")}) {
    expect_refused("calibrate" + tail + "-o " + file, 1, file + " is not written");
    expect_refused("run" + tail + "--save " + file, 1, file + " is not written");
    if (file == activations) continue;
    expect_refused(fmt::format("verify {} {} --html {}", model, kModel, file), 1, file + " is not written");
    expect_refused(fmt::format("verify {} {} --html {}", kModel, model, file), 1, file + " is not written");
  }
  expect_refused("run" + tail + "--dump " + dir_.path().string(), 1, activations + " is not written");
  expect_refused("run" + tail + "--dump " + model + "/new", 1, "is not written");
  expect_refused("calibrate" + tail + "-o ''", 1, "has no name");
  expect_refused("run" + tail + "--dump " + path("d") + " --save " + path("d/layer-0.safetensors"), 1,
                 "--save and --dump would both write");
  EXPECT_FALSE(fs::exists(dir_ / "d"));
  EXPECT_EQ(megamoe("run" + tail + "--tokens 1 --dump " + path("d") + " --save " + path("d/y")).code, 0);
  testing::write_bytes(dir_ / "tiles", "");
  const ForcedVariable tiles("MEGAMOE_TILES", path("tiles"));
  expect_refused("bench --tune " + path("tiles"), 1, "tiles is not written");
  EXPECT_FALSE(fs::exists(dir_ / "model/new"));
  EXPECT_EQ(testing::read_bytes(activations), testing::read_bytes(kActivations));
  EXPECT_EQ(testing::read_bytes(path("link")), testing::read_bytes(kModel + "/config.json"));
}

// What is no file is written to, and stays what it is.
TEST_F(CliTest, WritesToDevicesAndStandardOutput) {
  const std::string tail = fmt::format("{} --activations {} --layer 0 ", kModel, kActivations);
  const Outcome piped = megamoe("calibrate " + tail + "-o /dev/stdout");
  EXPECT_EQ(piped.code, 0) << piped.err;
  EXPECT_TRUE(piped.out.starts_with("{\n \"format\": \"megamoe-input-scales\"")) << piped.out;
  EXPECT_NE(piped.out.find("wrote /dev/stdout"), std::string::npos);
  EXPECT_EQ(megamoe("calibrate " + tail + "-o /dev/stdout >" + path("file")).code, 0);
  EXPECT_EQ(testing::read_bytes(path("file")), piped.out);
  EXPECT_EQ(megamoe("run " + tail + "--tokens 1 --repeat 1 --save /dev/null").code, 0);
  EXPECT_TRUE(std::filesystem::is_character_file("/dev/null"));
}

TEST_F(CliTest, InspectsWhatRunRefuses) {
  std::vector<TestTensor> tensors;
  for (const std::string matrix : {"gate_proj", "up_proj", "down_proj"}) {
    const std::string prefix = fmt::format("model.layers.0.mlp.experts.0.{}.", matrix);
    tensors.push_back(tensor(prefix + "weight", DType::kU8, {16, 8}, std::vector<std::uint8_t>(128, 0x22)));
    tensors.push_back(
        tensor(prefix + "weight_scale", DType::kE4M3, {16, 1}, std::vector<std::uint8_t>(16, 0x38)));
    tensors.push_back(tensor(prefix + "weight_scale_2", DType::kF32, {}, std::vector<float>{1}));
  }
  tensors[1].bytes[3] = 0x7F;
  std::filesystem::create_directory(dir_ / "nan");
  testing::write_safetensors(dir_ / "nan" / "model.safetensors", tensors);
  testing::write_bytes(dir_ / "nan" / "config.json",
                       R"({"model_type": "qwen3_moe", "num_experts": 1, "num_experts_per_tok": 1,
      "hidden_size": 16, "moe_intermediate_size": 16, "norm_topk_prob": true, "hidden_act": "silu"})");
  const json found = megamoe_json("inspect " + path("nan"));
  EXPECT_EQ(found["findings"][0]["severity"], "error");
  testing::write_safetensors(dir_ / "a.safetensors",
                             {tensor("layers.0.mlp.input", DType::kF32, {1, 16}, std::vector<float>(16, 1))});
  expect_refused(fmt::format("run {} --activations {}", path("nan"), path("a.safetensors")), 1, "gate_proj");
  expect_refused(fmt::format("verify {} {}", path("nan"), path("nan")), 1, "gate_proj");
}

}  // namespace
}  // namespace megamoe
