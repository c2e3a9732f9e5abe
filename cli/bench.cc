// bench.cc: `megamoe bench`: times whole layers with random weights: table, JSON, plot; and the tiles of
// their GEMMs.
#include "engine/bench.h"

#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>

#include "base/check.h"
#include "base/file.h"
#include "cli/output.h"
#include "cli/plot.h"
#include "cli/verb.h"
#include "engine/tune.h"
#include "layer/geometries.h"

namespace megamoe::cli {
namespace {

using nlohmann::json;

struct BenchArguments {
  std::vector<std::string> models = {"qwen3-30b-a3b"};
  std::vector<std::string> activations = {"bf16", "nvfp4"};
  std::vector<std::int64_t> tokens;
  std::string backend;
  std::optional<std::int64_t> experts;
  std::string routing = "uniform", x_scale = "layer-max";
  std::optional<int> repeat;
  std::string svg, tune;
  bool list = false, json = false, sustained = false;
};

// Of all routed experts in NVFP4.
std::int64_t layer_bytes(const LayerConfig& config) {
  return config.num_experts * matrices_of(config) * nvfp4_bytes(config);
}

int list(bool as_json) {
  json rows = json::array();
  Table table({"model", ">hidden", ">intermediate", ">experts", ">top-k", "activation", ">NVFP4 layer"});
  for (const ModelGeometry& geometry : model_geometries()) {
    const LayerConfig& c = geometry.config;
    table.add({std::string(geometry.name), fmt::format("{}", c.hidden), fmt::format("{}", c.intermediate),
               fmt::format("{}", c.num_experts), fmt::format("{}", c.top_k),
               std::string(to_string(c.activation.kind)), human_bytes(layer_bytes(c))});
    rows.push_back({{"model", geometry.name},
                    {"hidden", c.hidden},
                    {"intermediate", c.intermediate},
                    {"experts", c.num_experts},
                    {"top_k", c.top_k},
                    {"activation", to_string(c.activation.kind)},
                    {"layer_bytes", layer_bytes(c)}});
  }
  if (as_json) {
    print_json({{"models", rows}});
  } else {
    print(table.text());
  }
  return 0;
}

// The name in the table that is `name` in lower case. One that is not there fails with those that begin
// alike.
std::string model_name(std::string name) {
  std::transform(name.begin(), name.end(), name.begin(), [](unsigned char c) { return std::tolower(c); });
  std::vector<std::string_view> near;
  std::size_t longest = 3;  // letters that a near name has in common at least
  for (const ModelGeometry& geometry : model_geometries()) {
    if (geometry.name == name) return name;
    const auto common = static_cast<std::size_t>(
        std::mismatch(name.begin(), name.end(), geometry.name.begin(), geometry.name.end()).first -
        name.begin());
    if (common < longest) continue;
    if (common > longest) near.clear();
    longest = common;
    near.push_back(geometry.name);
  }
  fail(ErrorCode::kNotFound, "there is no model '{}'{}; `megamoe bench --list` shows them all", name,
       near.empty() ? "" : fmt::format("; did you mean {}", fmt::join(near, ", ")));
}

RoutingKind routing_kind(const std::string& name) {
  for (const RoutingKind kind : {RoutingKind::kUniform, RoutingKind::kZipf, RoutingKind::kOne}) {
    if (to_string(kind) == name) return kind;
  }
  fail(ErrorCode::kInvalidArgument, "there is no routing '{}'; expected uniform, zipf or one", name);
}

// In the order in which they came, each once.
template <class T>
void add_once(std::vector<T>& values, T value) {
  if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(std::move(value));
}

BenchOptions bench_options(const BenchArguments& options) {
  BenchOptions out;
  for (const std::string& name : options.models) add_once(out.models, model_name(name));
  for (const std::string& name : options.activations)
    add_once(out.activations, parse_activation_format(name));
  out.tokens = options.tokens;
  std::sort(out.tokens.begin(), out.tokens.end());
  out.tokens.erase(std::unique(out.tokens.begin(), out.tokens.end()), out.tokens.end());
  out.backend = options.backend;
  if (options.experts && *options.experts < 1) {
    fail(ErrorCode::kInvalidArgument, "--experts must be 1 or more, got {}", *options.experts);
  }
  if (options.repeat && *options.repeat < 1) {
    fail(ErrorCode::kInvalidArgument, "--repeat must be 1 or more, got {}", *options.repeat);
  }
  out.experts = options.experts.value_or(0);
  out.repeat = options.repeat.value_or(0);
  out.sustained = options.sustained;
  out.routing = routing_kind(options.routing);
  out.x_scale = parse_scale_source(options.x_scale);
  return out;
}

// Results of one model.
using Group = std::vector<const BenchResult*>;

std::vector<Group> by_model(const BenchReport& report) {
  std::vector<Group> groups;
  for (const BenchResult& result : report.results) {
    if (groups.empty() || groups.back()[0]->model != result.model) groups.emplace_back();
    groups.back().push_back(&result);
  }
  return groups;
}

std::string layer_text(const std::string& model, const LayerConfig& config) {
  const std::int64_t all = find_geometry(model).config.num_experts;
  const std::string experts = config.num_experts == all
                                  ? fmt::format("{} experts", all)
                                  : fmt::format("{} of its {} experts", config.num_experts, all);
  return fmt::format("hidden {}, intermediate {}, {}, top-{}, {}", config.hidden, config.intermediate,
                     experts, config.top_k, to_string(config.activation.kind));
}

// Large machines in tera, small ones in giga.
struct Unit {
  double size = 1e12;
  const char* prefix = "T";
};
Unit unit_of(double largest) { return largest < 1e12 ? Unit{1e9, "G"} : Unit{}; }

std::string rate_text(double rate, const Unit& unit) {
  const double value = rate / unit.size;
  return fmt::format("{:.{}f}", value, value < 9.995 ? 2 : value < 99.95 ? 1 : 0);
}

// Which of the two floors counts.
const char* floor_of(const BenchReport& report, const BenchResult& result) {
  return report.compute_seconds(result) > report.memory_seconds(result) ? "compute" : "memory";
}

std::string to_text(const BenchReport& report, const BenchArguments& options) {
  double flops = 0, payload = 0;
  bool rates = false;  // measured along with the passes
  for (const BenchResult& r : report.results) {
    const BenchRates own = r.median_rates();
    rates = rates || own.bandwidth > 0;
    flops = std::max({flops, r.flops_per_second(), own.flops});
    payload = std::max({payload, r.payload_per_second(), own.bandwidth});
  }
  const Unit flops_unit = unit_of(flops), bytes_unit = unit_of(std::max(payload, report.machine.bandwidth));
  std::string text =
      fmt::format("backend {} on {}\nmemory: {} {}B/s ({}); the last cache holds {}\n", report.backend,
                  one_line(report.machine.device), rate_text(report.machine.bandwidth, bytes_unit),
                  bytes_unit.prefix, report.machine.bandwidth_of, human_bytes(report.machine.cache_bytes));
  if (report.machine.flops > 0) {
    const Unit unit = unit_of(report.machine.flops);
    text += fmt::format("compute: {} {}FLOP/s ({})\n", rate_text(report.machine.flops, unit), unit.prefix,
                        report.machine.flops_of);
    if (report.machine.fp8_flops > 0) {
      text += fmt::format("in fp8:  {} {}FLOP/s\n", rate_text(report.machine.fp8_flops, unit), unit.prefix);
    }
  }
  text += fmt::format("NVFP4 weights, routed experts alone, routing {}", options.routing);
  const bool nvfp4 = std::any_of(report.results.begin(), report.results.end(), [](const BenchResult& r) {
    return r.activations == ActivationFormat::kNvfp4;
  });
  text += nvfp4 ? fmt::format(", nvfp4's scale of x {}\n", options.x_scale) : "\n";
  bool warm = false;
  std::int64_t checked = 0;
  double error = 0;
  for (const Group& group : by_model(report)) {
    text += fmt::format("\n{}: {}\n", group[0]->model, layer_text(group[0]->model, group[0]->config));
    std::vector<std::string> heads = {"activations",
                                      ">tokens",
                                      ">experts used",
                                      ">time us",
                                      fmt::format(">{}FLOP/s", flops_unit.prefix),
                                      fmt::format(">payload {}B/s", bytes_unit.prefix)};
    if (rates) {
      heads.push_back(fmt::format(">peak {}FLOP/s", flops_unit.prefix));
      heads.push_back(fmt::format(">memory {}B/s", bytes_unit.prefix));
    }
    heads.insert(heads.end(), {">floor us", "of", ">reached", ""});
    Table table(heads);
    for (const BenchResult* r : group) {
      const double us = r->median_seconds() * 1e6, floor_us = report.floor_seconds(*r) * 1e6;
      std::vector<std::string> cells = {
          std::string(to_string(r->activations)),       fmt::format("{}", r->tokens),
          fmt::format("{:.4g}", r->experts_used),       fmt::format("{:.1f}", us),
          rate_text(r->flops_per_second(), flops_unit), rate_text(r->payload_per_second(), bytes_unit)};
      if (rates) {
        const BenchRates own = r->median_rates();
        cells.push_back(own.flops > 0 ? rate_text(own.flops, flops_unit) : "");
        cells.push_back(rate_text(own.bandwidth, bytes_unit));
      }
      cells.insert(cells.end(), {fmt::format("{:.1f}", floor_us), floor_of(report, *r),
                                 fmt::format("{:.1f} %", 100 * floor_us / us), r->warm ? "warm" : ""});
      table.add(cells);
      warm = warm || r->warm;
      checked += r->checked_rows;
      error = std::max(error, r->checked_error);
    }
    text += table.text();
  }
  const bool computes = std::any_of(report.results.begin(), report.results.end(),
                                    [&](const BenchResult& r) { return report.compute_seconds(r) > 0; });
  text +=
      computes
          ? "\ntime is the median; the floor is the longer of reading the weights of the experts used and "
            "computing\n"
          : "\ntime is the median; the floor is reading the weights of the experts used; that of computing "
            "was not measured\n";
  if (rates) text += "peak and memory are what products alone and reading reached between the measurements\n";
  if (warm) text += "warm: too few experts to push their weights out of the cache between two uses\n";
  text += fmt::format(
      "checked before timing: finite outputs, equal bits of two passes, {}\n",
      checked == 0
          ? "nothing held against ref, which is what was timed"
          : fmt::format("rows held against ref: {} (largest relative difference {:.2g})", checked, error));
  if (!options.svg.empty()) text += fmt::format("wrote {}\n", one_line(options.svg));
  return text;
}

json to_json(const BenchReport& report, const BenchArguments& options) {
  json out = {
      {"backend", report.backend},
      {"device", report.machine.device},
      {"bandwidth_bytes_per_second", report.machine.bandwidth},
      {"bandwidth_of", report.machine.bandwidth_of},
      {"flops_per_second", report.machine.flops > 0 ? json(report.machine.flops) : json()},
      {"flops_of", report.machine.flops > 0 ? json(report.machine.flops_of) : json()},
      {"fp8_flops_per_second", report.machine.fp8_flops > 0 ? json(report.machine.fp8_flops) : json()},
      {"cache_bytes", report.machine.cache_bytes},
      {"routing", options.routing},
      {"sustained", options.sustained},
      {"x_scale", options.x_scale},
      {"results", json::array()}};
  for (const BenchResult& r : report.results) {
    const double floor = report.floor_seconds(r);
    json bandwidths = json::array(), peaks = json::array();
    for (const BenchRates& rates : r.rates) {
      if (rates.bandwidth > 0) bandwidths.push_back(rates.bandwidth);
      if (rates.flops > 0) peaks.push_back(rates.flops);
    }
    out["results"].push_back({{"model", r.model},
                              {"hidden", r.config.hidden},
                              {"intermediate", r.config.intermediate},
                              {"experts", r.config.num_experts},
                              {"model_experts", find_geometry(r.model).config.num_experts},
                              {"top_k", r.config.top_k},
                              {"activation", to_string(r.config.activation.kind)},
                              {"activations", to_string(r.activations)},
                              {"tokens", r.tokens},
                              {"rows", r.rows},
                              {"experts_used", r.experts_used},
                              {"seconds", r.median_seconds()},
                              {"all_seconds", r.seconds},
                              {"passes", r.passes},
                              {"flops", r.flops},
                              {"flops_per_second", r.flops_per_second()},
                              {"weight_bytes", r.weight_bytes},
                              {"payload_bytes_per_second", r.payload_per_second()},
                              {"all_bandwidths", bandwidths},
                              {"all_peak_flops", peaks},
                              {"floor_seconds", floor},
                              {"floor_of", floor_of(report, r)},
                              {"percent_of_floor", 100 * floor / r.median_seconds()},
                              {"warm", r.warm},
                              {"checked_rows", r.checked_rows},
                              {"checked_error", r.checked_error}});
  }
  return out;
}

std::string to_svg(const BenchReport& report, const BenchArguments& options) {
  std::vector<PlotPanel> panels;
  for (const Group& group : by_model(report)) {
    PlotPanel& panel = panels.emplace_back();
    panel.title = group[0]->model;
    panel.subtitles = {
        layer_text(group[0]->model, group[0]->config),
        fmt::format("{} on {}, routing {}", report.backend, report.machine.device, options.routing)};
    std::map<double, double> floor;
    for (const BenchResult* r : group) {
      const std::string label = fmt::format("{} activations", to_string(r->activations));
      if (panel.lines.empty() || panel.lines.back().label != label)
        panel.lines.push_back({.label = label, .points = {}});
      panel.lines.back().points.emplace_back(r->tokens, r->median_seconds());
      floor[static_cast<double>(r->tokens)] = report.floor_seconds(*r);
    }
    panel.lines.push_back({.label = "floor", .limit = true, .points = {floor.begin(), floor.end()}});
  }
  return plot_svg(panels, "tokens", "time with NVFP4 weights");
}

std::string tile_text(const TileTime& tile) { return fmt::format("{}x{}", tile.tokens, tile.row_tiles); }

std::string to_text(const TuneReport& report, const BenchArguments& options) {
  std::string text =
      fmt::format("tiles on {}, routing {}: tokens x times 64 weight rows, median times of a whole layer\n",
                  one_line(report.device), options.routing);
  const TunedGemm* worst = nullptr;
  for (auto gemm = report.gemms.begin(); gemm != report.gemms.end();) {
    const std::string& model = gemm->model;
    text += fmt::format("\n{}: {}\n", model, layer_text(model, gemm->config));
    Table table({"activations", ">tokens", ">rows", "GEMM", ">usual", ">us", ">fastest", ">us", ">loss"});
    for (; gemm != report.gemms.end() && gemm->model == model; ++gemm) {
      table.add({std::string(to_string(gemm->activations)), fmt::format("{}", gemm->tokens),
                 fmt::format("{}", gemm->rows), gemm->first ? "first" : "second", tile_text(gemm->usual()),
                 fmt::format("{:.1f}", gemm->usual().seconds * 1e6), tile_text(gemm->fastest()),
                 fmt::format("{:.1f}", gemm->fastest().seconds * 1e6),
                 fmt::format("{:.1f} %", 100 * gemm->loss())});
      if (worst == nullptr || gemm->loss() > worst->loss()) worst = &*gemm;
    }
    text += table.text();
  }
  text += fmt::format("\nthe usual tile costs {:.1f} % at most\n", 100 * worst->loss());
  return text +
         fmt::format("wrote {0}; layers use it where MEGAMOE_TILES={0} is set\n", one_line(options.tune));
}

json to_json(const TuneReport& report, const BenchArguments& options) {
  json out = {{"device", report.device},
              {"routing", options.routing},
              {"sustained", options.sustained},
              {"gemms", json::array()}};
  for (const TunedGemm& gemm : report.gemms) {
    json tiles = json::array();
    for (const TileTime& tile : gemm.tiles)
      tiles.push_back({{"tile", tile_text(tile)}, {"seconds", tile.seconds}});
    out["gemms"].push_back({{"model", gemm.model},
                            {"activations", to_string(gemm.activations)},
                            {"tokens", gemm.tokens},
                            {"rows", gemm.rows},
                            {"gemm", gemm.first ? "first" : "second"},
                            {"usual", tile_text(gemm.usual())},
                            {"fastest", tile_text(gemm.fastest())},
                            {"percent_loss", 100 * gemm.loss()},
                            {"tiles", tiles}});
  }
  return out;
}

// What is being measured, on stderr where that is a terminal; gone at the end.
class Status {
 public:
  ~Status() { show(""); }
  void show(const std::string& what) const {
    if (isatty(STDERR_FILENO) == 1) print_error("\r\x1b[K" + what);
  }
};

int run_tune(const BenchArguments& options) {
  if (!options.svg.empty()) fail(ErrorCode::kInvalidArgument, "--tune draws nothing: leave --svg away");
  if (const char* tiles = std::getenv("MEGAMOE_TILES"); tiles != nullptr && *tiles != '\0')
    check_is_no_input(options.tune, {tiles});
  check_writable(options.tune);
  TuneReport report;
  {
    const Status status;
    // Written as it grows, so that what comes to an end early leaves what it has measured.
    report = tune(
        bench_options(options), [&](const std::string& what) { status.show("measuring: " + what); },
        [&](const TuneReport& so_far) { write_file_atomically(options.tune, so_far.text); });
  }
  if (options.json) {
    print_json(to_json(report, options));
  } else {
    print(to_text(report, options));
  }
  return 0;
}

int run(const BenchArguments& options) {
  if (options.list) return list(options.json);
  if (!options.tune.empty()) return run_tune(options);
  const BenchOptions wanted = bench_options(options);
  if (!options.svg.empty()) check_writable(options.svg);  // before minutes are spent
  BenchReport report;
  {
    const Status status;
    report = bench(wanted, [&](const std::string& what) { status.show("measuring: " + what); });
  }
  if (!options.svg.empty()) write_file_atomically(options.svg, to_svg(report, options));
  if (options.json) {
    print_json(to_json(report, options));
  } else {
    print(to_text(report, options));
  }
  return 0;
}

}  // namespace

std::function<int()> add_bench(CLI::App& app) {
  const auto options = std::make_shared<BenchArguments>();
  add_list(app, "--model", options->models, "models by name, see --list (default qwen3-30b-a3b)");
  app.add_flag("--list", options->list, "list the models and stop");
  add_list(app, "--tokens", options->tokens,
           "numbers of tokens (default 1,8,64,512, and on a GPU 4096,16384)");
  add_list(app, "--activations", options->activations, "any of bf16, nvfp4 and fp8 (default bf16,nvfp4)");
  app.add_option("--routing", options->routing,
                 "how tokens spread over experts: uniform (default), zipf, or one: all to the same experts");
  app.add_option("--experts", options->experts, "only so many of each model's experts");
  app.add_option("--x-scale", options->x_scale,
                 "nvfp4: tensor scale of x: layer-max (default), static or token");
  app.add_option("--backend", options->backend, "what to run on (see megamoe backends)");
  app.add_option("--repeat", options->repeat,
                 "measurements, of which the median counts (default: as many as half a second takes)");
  app.add_flag("--sustained", options->sustained,
               "on a GPU: measure without pauses, at the clocks that its power limit leaves in the long run");
  app.add_option("--svg", options->svg, "also draw time against tokens into this file");
  app.add_option(
      "--tune", options->tune,
      "on a GPU: time every tile of both GEMMs, and write the times into this file, for MEGAMOE_TILES");
  add_threads(app);
  add_json(app, options->json);
  return [options] { return run(*options); };
}

}  // namespace megamoe::cli
