// run.cc: `megamoe run`: layers on recorded activations: routing, error, time, dumps.
#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <set>

#include "base/aligned_buffer.h"
#include "base/file.h"
#include "base/median.h"
#include "cli/dump.h"
#include "cli/output.h"
#include "cli/verb.h"
#include "engine/error_stats.h"
#include "engine/recorded.h"
#include "layer/load_layer.h"
#include "numerics/bf16.h"

namespace megamoe::cli {
namespace {

using nlohmann::json;

struct RunArguments {
  std::string checkpoint, fused_layout;
  std::string activations;
  std::optional<int> layer;
  RecordedNames names;
  std::string format = "bf16";
  std::string x_scale, h_scale;
  std::string backend;
  std::string l1 = "fused";
  std::optional<std::int64_t> tokens;
  int repeat = 5;
  std::string dump, save;
  bool json = false;
};

MoeLayerOptions layer_options(const RunArguments& options) {
  MoeLayerOptions out;
  out.backend = options.backend;
  out.activations = parse_activation_format(options.format);
  if (!options.x_scale.empty()) out.x_scale = parse_scale_source(options.x_scale);
  if (!options.h_scale.empty()) out.h_scale = parse_scale_source(options.h_scale);
  if ((out.x_scale || out.h_scale) && out.activations != ActivationFormat::kNvfp4) {
    fail(ErrorCode::kInvalidArgument, "--x-scale and --h-scale go with --format nvfp4, got {}",
         options.format);
  }
  using L1 = MoeLayerOptions::L1;
  if (options.l1 == "compact") {
    out.l1 = L1::kCompact;
  } else if (options.l1 == "interleaved") {
    out.l1 = L1::kInterleaved;
  } else if (options.l1 != "fused") {
    fail(ErrorCode::kInvalidArgument,
         "there is no first GEMM output '{}'; expected fused, compact or interleaved", options.l1);
  }
  return out;
}

struct Result {
  int layer = 0;
  std::int64_t tokens = 0, rows = 0, experts_used = 0, max_rows = 0, saturated = 0, rounded_inputs = 0;
  std::int64_t hidden = 0, intermediate = 0, num_experts = 0;
  int top_k = 0;
  RoutingSource routing = RoutingSource::kRouter;
  std::string weights;  // formats of the experts
  double norm = 0;
  std::int64_t nonfinite = 0;       // elements of the output
  double unrounded_error = 0;       // of the output before it is rounded to BF16
  std::optional<ErrorStats> error;  // against the recorded output
  double seconds = 0;               // median
  MoeLayerOptions options;          // with every choice made
  std::vector<DumpedTensor> stages;
  std::vector<std::string> notes;
  std::vector<bf16> y;
};

std::string weight_formats(const LayerWeights& weights) {
  std::set<std::string_view> formats;
  for (const ExpertWeights& expert : weights.experts) {
    for (const WeightMatrix* matrix : {&expert.gate, &expert.up, &expert.down}) {
      if (matrix->rows > 0) formats.insert(to_string(matrix->format));
    }
  }
  return fmt::format("{}", fmt::join(formats, "+"));
}

// Runs forward() `repeat` times, keeps the median of the times, and holds every result against the first.
void run_repeatedly(const MoeLayer& layer, const RecordedLayer& recorded, int repeat, Result& out) {
  const std::int64_t hidden = layer.config().hidden;
  const MatrixView<const bf16> x(recorded.x.data(), recorded.tokens, hidden);
  const MatrixView<const std::int32_t> ids(recorded.ids.data(), recorded.tokens, layer.config().top_k);
  const MatrixView<const float> weights(recorded.weights.data(), recorded.tokens, layer.config().top_k);
  const AlignedBuffer<std::byte> workspace(layer.workspace_bytes(recorded.tokens));
  std::vector<bf16> y(out.y.size());
  std::vector<double> times;
  for (int i = 0; i < repeat; ++i) {
    std::fill(y.begin(), y.end(), bf16{0xffff});  // what is not written shows
    const auto start = std::chrono::steady_clock::now();
    const std::int64_t saturated =
        layer.forward(x, ids, weights, {y.data(), recorded.tokens, hidden}, workspace);
    times.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    if (saturated != out.saturated || y != out.y) {
      fail(ErrorCode::kInternal, "layer {}: pass {} gave other bits than the first one", out.layer, i + 2);
    }
  }
  out.seconds = median(times);
}

// The output as it is before it is rounded to BF16, from the stages that a pass left: what tells the error of
// the arithmetic from that of the output's own format.
class UnroundedOutput {
 public:
  UnroundedOutput(std::int64_t tokens, std::int64_t hidden, int top_k)
      : hidden_(hidden), top_k_(top_k), sums_(static_cast<std::size_t>(tokens * hidden)) {}

  void add(const Stage& stage) {
    if (stage.name == "expert_weights") weights_ = copy<float>(stage);
    if (stage.name == "row_to_token") tokens_ = copy<std::int32_t>(stage);
    if (stage.name == "row_to_slot") slots_ = copy<std::int32_t>(stage);
    const auto* values = static_cast<const float*>(stage.data);
    for (std::int64_t r = 0; stage.name == "expert_out" && r < stage.shape[0]; ++r) {
      const std::int64_t token = tokens_[static_cast<std::size_t>(r)];
      const float weight =
          weights_[static_cast<std::size_t>(token * top_k_ + slots_[static_cast<std::size_t>(r)])];
      add_row(token, weight, values + r * hidden_);
    }
    for (std::int64_t t = 0; stage.name == "shared_out" && t < stage.shape[0]; ++t) {
      add_row(t, 1.0f, values + t * hidden_);
    }
  }
  std::vector<float> values() const { return {sums_.begin(), sums_.end()}; }

 private:
  template <class T>
  static std::vector<T> copy(const Stage& stage) {
    std::int64_t count = 1;
    for (const std::int64_t size : stage.shape) count *= size;
    const auto* data = static_cast<const T*>(stage.data);
    return {data, data + count};
  }
  void add_row(std::int64_t token, double weight, const float* row) {
    for (std::int64_t c = 0; c < hidden_; ++c)
      sums_[static_cast<std::size_t>(token * hidden_ + c)] += weight * static_cast<double>(row[c]);
  }

  std::int64_t hidden_;
  int top_k_;
  std::vector<double> sums_;
  std::vector<float> weights_;
  std::vector<std::int32_t> tokens_, slots_;
};

void count_rows(const std::int64_t* offsets, Result& out) {
  out.rows = offsets[out.num_experts];
  for (std::int64_t e = 0; e < out.num_experts; ++e) {
    const std::int64_t rows = offsets[e + 1] - offsets[e];
    out.experts_used += rows > 0;
    out.max_rows = std::max(out.max_rows, rows);
  }
}

Result run_layer(const ModelIndex& model, const RecordedActivations& activations, int number,
                 const RunArguments& options) {
  LayerWeights weights = load_layer(model, find_layer(model, number));
  Result out;
  out.layer = number;
  out.weights = weight_formats(weights);
  MoeLayer layer(std::move(weights), layer_options(options));
  const LayerConfig& config = layer.config();
  RecordedLayer recorded = activations.read(
      number, config, options.tokens.value_or(std::numeric_limits<std::int64_t>::max()), options.names);
  out.routing = route_recorded(layer, recorded);
  out.tokens = recorded.tokens;
  out.hidden = config.hidden, out.intermediate = config.intermediate, out.num_experts = config.num_experts;
  out.top_k = config.top_k;
  out.rounded_inputs = recorded.rounded_inputs;
  out.notes = layer.notes();
  out.y.resize(recorded.x.size());
  out.options = layer.options();
  if (!options.dump.empty()) {
    out.stages.push_back(
        copy_stage({"x", DType::kBF16, {recorded.tokens, config.hidden}, recorded.x.data()}));
    if (!recorded.router_logits.empty()) {
      out.stages.push_back(copy_stage({"router_logits",
                                       DType::kF32,
                                       {recorded.tokens, config.num_experts},
                                       recorded.router_logits.data()}));
    }
  }
  UnroundedOutput unrounded(recorded.tokens, config.hidden, config.top_k);
  // The first pass looks at its stages; the timed ones after it do not.
  layer.on_stage([&](const Stage& stage) {
    if (stage.name == "offsets") count_rows(static_cast<const std::int64_t*>(stage.data), out);
    if (!options.dump.empty()) out.stages.push_back(copy_stage(stage));
    if (!recorded.output.empty()) unrounded.add(stage);
  });
  out.saturated = layer.forward({recorded.x.data(), recorded.tokens, config.hidden},
                                {recorded.ids.data(), recorded.tokens, config.top_k},
                                {recorded.weights.data(), recorded.tokens, config.top_k},
                                {out.y.data(), recorded.tokens, config.hidden});
  layer.on_stage({});
  std::vector<float> values;
  for (const bf16 value : out.y) values.push_back(to_float(value));
  out.norm = compare(values, values).norm;
  out.nonfinite = std::count_if(values.begin(), values.end(), [](float v) { return !std::isfinite(v); });
  if (!recorded.output.empty()) {
    out.error = compare(values, recorded.output);
    out.unrounded_error = compare(unrounded.values(), recorded.output).relative;
  }
  run_repeatedly(layer, recorded, options.repeat, out);
  return out;
}

json to_json(const Result& result) {
  json out = {{"layer", result.layer},
              {"tokens", result.tokens},
              {"hidden", result.hidden},
              {"intermediate", result.intermediate},
              {"experts", result.num_experts},
              {"top_k", result.top_k},
              {"routing", to_string(result.routing)},
              {"rows", result.rows},
              {"experts_used", result.experts_used},
              {"max_rows_per_expert", result.max_rows},
              {"weights", result.weights},
              {"output_norm", result.norm},
              {"nonfinite_outputs", result.nonfinite},
              {"saturated_blocks", result.saturated},
              {"rounded_inputs", result.rounded_inputs},
              {"seconds", result.seconds},
              {"deterministic", true},
              {"notes", result.notes},
              {"error", nullptr}};
  if (result.error) {
    out["error"] = {{"relative_l2", result.error->relative},
                    {"relative_l2_before_rounding", result.unrounded_error},
                    {"snr_db", result.error->snr_db},
                    {"cosine", result.error->cosine},
                    {"worst", result.error->worst},
                    {"worst_token", result.error->worst_at / result.hidden},
                    {"worst_column", result.error->worst_at % result.hidden},
                    {"nonfinite", result.error->nonfinite}};
  }
  if (!result.stages.empty()) out["stages"] = stages_json(result.stages);
  return out;
}

std::string results_text(const std::vector<Result>& results, const RunArguments& options) {
  const MoeLayerOptions& made = results[0].options;
  std::string text =
      fmt::format("backend {}, weights {}, activations {}", made.backend, results[0].weights, options.format);
  if (made.x_scale)
    text += fmt::format(", scale of x {}, of h {}", to_string(*made.x_scale), to_string(*made.h_scale));
  text += fmt::format(", routed by {}, median of {} passes with equal bits\n\n",
                      to_string(results[0].routing), options.repeat);
  Table table({">layer", ">tokens", ">rows", ">experts used", ">most rows", ">output norm", ">relative error",
               ">before rounding", ">worst element", ">saturated", ">time"});
  for (const Result& r : results) {
    table.add({fmt::format("{}", r.layer), fmt::format("{}", r.tokens), fmt::format("{}", r.rows),
               fmt::format("{} of {}", r.experts_used, r.num_experts), fmt::format("{}", r.max_rows),
               fmt::format("{:.6g}", r.norm), r.error ? fmt::format("{:.5f}", r.error->relative) : "-",
               r.error ? fmt::format("{:.5f}", r.unrounded_error) : "-",
               r.error ? fmt::format("{:.3g} at [{}, {}]", r.error->worst, r.error->worst_at / r.hidden,
                                     r.error->worst_at % r.hidden)
                       : "-",
               fmt::format("{}", r.saturated), human_seconds(r.seconds)});
  }
  text += table.text();
  for (const Result& r : results) {
    if (r.rounded_inputs > 0) {
      text += fmt::format("note: {} inputs of layer {} were rounded to bf16\n", r.rounded_inputs, r.layer);
    }
    if (r.nonfinite > 0) {
      text += fmt::format("warning: {} outputs of layer {} are NaN or infinite\n", r.nonfinite, r.layer);
    }
    for (const std::string& note : r.notes)
      text += fmt::format("note: layer {}: {}\n", r.layer, one_line(note));
    if (!r.stages.empty()) text += fmt::format("\nstages of layer {}\n{}", r.layer, stages_text(r.stages));
  }
  return text;
}

std::filesystem::path dump_path(const RunArguments& options, int layer) {
  return std::filesystem::path(options.dump) / fmt::format("layer-{}.safetensors", layer);
}

// Before anything runs: no output is an input or another output, and all can be written.
void check_outputs(const ModelIndex& model, const std::vector<int>& layers, const RunArguments& options) {
  std::vector<std::filesystem::path> inputs = model.checkpoint->sources(), outputs;
  inputs.emplace_back(options.activations);
  if (!options.save.empty()) outputs.emplace_back(options.save);
  if (!options.dump.empty()) {
    for (const int layer : layers) {
      outputs.push_back(dump_path(options, layer));
      if (!options.save.empty() && lies_in(options.save, outputs.back()))
        fail(ErrorCode::kInvalidArgument, "--save and --dump would both write {}", options.save);
    }
  }
  for (const std::filesystem::path& path : outputs) check_is_no_input(path, inputs);
  if (!options.dump.empty()) {
    std::error_code error;
    std::filesystem::create_directories(options.dump, error);
    if (error) fail(ErrorCode::kIo, "cannot create the directory {}: {}", options.dump, error.message());
  }
  for (const std::filesystem::path& path : outputs) check_writable(path);
}

// Everything has run by now, so a failing layer leaves no files of the others.
void write_files(const std::vector<Result>& results, const RunArguments& options) {
  if (!options.dump.empty()) {
    for (const Result& result : results) write_tensors(dump_path(options, result.layer), result.stages);
  }
  if (!options.save.empty()) {
    std::vector<DumpedTensor> outputs;
    for (const Result& result : results) {
      outputs.push_back(copy_stage({fmt::format("layers.{}.mlp.output", result.layer),
                                    DType::kBF16,
                                    {result.tokens, result.hidden},
                                    result.y.data()}));
    }
    write_tensors(options.save, outputs);
  }
}

int run(const RunArguments& options) {
  if (options.repeat < 1)
    fail(ErrorCode::kInvalidArgument, "--repeat must be 1 or more, got {}", options.repeat);
  if (options.tokens && *options.tokens < 0) {
    fail(ErrorCode::kInvalidArgument, "--tokens must be 0 or more, got {}", *options.tokens);
  }
  layer_options(options);  // refuses before any file is read
  const ModelIndex model = index_model(Checkpoint::open(options.checkpoint), {options.fused_layout});
  const RecordedActivations activations(options.activations);
  std::vector<int> numbers;
  if (options.layer) {
    numbers.push_back(*options.layer);
  } else {
    for (const int number : activations.layers()) {
      const bool known =
          std::any_of(model.layers.begin(), model.layers.end(),
                      [&](const MoeLayerInfo& layer) { return !layer.mtp && layer.layer == number; });
      if (known) numbers.push_back(number);
    }
    if (numbers.empty()) {
      fail(ErrorCode::kNotFound,
           "{} has inputs of none of the layers of {}; expected tensors like layers.{}.mlp.input",
           options.activations, options.checkpoint, model.layers.empty() ? 0 : model.layers[0].layer);
    }
  }
  check_outputs(model, numbers, options);
  std::vector<Result> results;
  for (const int number : numbers) results.push_back(run_layer(model, activations, number, options));
  write_files(results, options);
  if (options.json) {
    const MoeLayerOptions& made = results[0].options;
    json out = {{"checkpoint", options.checkpoint},
                {"activations", options.activations},
                {"backend", made.backend},
                {"format", options.format},
                {"x_scale", made.x_scale ? json(to_string(*made.x_scale)) : json()},
                {"h_scale", made.h_scale ? json(to_string(*made.h_scale)) : json()},
                {"l1", options.l1},
                {"layers", json::array()}};
    for (const Result& result : results) out["layers"].push_back(to_json(result));
    print_json(out);
  } else {
    print(results_text(results, options));
  }
  return 0;
}

}  // namespace

std::function<int()> add_run(CLI::App& app) {
  const auto options = std::make_shared<RunArguments>();
  app.add_option("CHECKPOINT", options->checkpoint, "a model's directory or one safetensors file")
      ->required();
  app.add_option("--activations", options->activations, "recorded activations, a safetensors file")
      ->required();
  app.add_option("--layer", options->layer, "only this layer; otherwise every one that has an input");
  add_fused_layout(app, options->fused_layout);
  app.add_option("--format", options->format, "activations as bf16 (default), fp8 or nvfp4");
  app.add_option("--x-scale", options->x_scale,
                 "nvfp4: tensor scale of x: static, layer-max, token or tensor");
  app.add_option("--h-scale", options->h_scale, "nvfp4: tensor scale of h: likewise");
  app.add_option("--backend", options->backend, "what to run on (see megamoe backends)");
  app.add_option("--l1", options->l1, "how the first GEMM ends: fused (default), compact or interleaved");
  app.add_option("--tokens", options->tokens, "only the first so many tokens");
  app.add_option("--repeat", options->repeat, "timed passes, of which the median counts (default 5)");
  app.add_option("--dump", options->dump, "write every stage to layer-N.safetensors in this directory");
  app.add_option("--save", options->save, "write the outputs to this safetensors file");
  const auto name = [&](const char* flag, std::string& target, const char* what) {
    app.add_option(flag, target, what)->group("Names in the activations file");
  };
  name("--input", options->names.input, "of x, in place of layers.N.mlp.input");
  name("--logits", options->names.router_logits, "of the router's logits");
  name("--output", options->names.output, "of the output to compare with");
  name("--ids", options->names.expert_ids, "of expert ids, with --weights");
  name("--weights", options->names.expert_weights, "of expert weights, with --ids");
  name("--token-ids", options->names.token_ids, "of token ids, for hash-routed layers");
  add_threads(app);
  add_json(app, options->json);
  return [options] { return run(*options); };
}

}  // namespace megamoe::cli
