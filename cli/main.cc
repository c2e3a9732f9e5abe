// main.cc: the command `megamoe`: its verbs, its help, and one way for every error to end.
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <new>
#include <string>
#include <type_traits>
#include <vector>

#include "base/parallel.h"
#include "cli/output.h"
#include "cli/verb.h"
#include "megamoe/error.h"

namespace megamoe::cli {

namespace {

const std::vector<Verb>& verbs() {
  static const std::vector<Verb> kVerbs = {
      {"quantize", "make a model's experts NVFP4", "model/ model-nvfp4/", add_quantize},
      {"convert", "bring an FP4 model into another family's NVFP4",
       "model-nvfp4/ model-ct/ --to compressed-tensors", add_convert},
      {"inspect", "list a checkpoint's layers, formats and sizes, and what is suspicious", "model/",
       add_inspect},
      {"calibrate", "make static activation scales from recorded activations",
       "model/ --activations activations.safetensors -o scales.json", add_calibrate},
      {"run", "run layers on recorded activations: error, time, stages",
       "model-nvfp4/ --activations activations.safetensors --format nvfp4", add_run},
      {"verify", "hold a quantised checkpoint against its source", "model-nvfp4/ model/ --html report.html",
       add_verify},
      {"bench", "time a model's layer with random weights, against what memory allows",
       "--model deepseek-v4-flash --tokens 1,64 --svg times.svg", add_bench},
      {"backends", "list what this build can run on", "--json", add_backends},
  };
  return kVerbs;
}

constexpr int kExitError = 1;
constexpr int kExitUsage = 2;

int report(std::string_view sentence, int exit_code) {
  print_error(fmt::format("megamoe: {}\n", one_line(sentence)));
  return exit_code;
}

std::string overview() {
  std::string text = "megamoe " MEGAMOE_VERSION
                     ": mixture-of-experts layers in NVFP4\n\nusage: megamoe VERB [OPTIONS]\n\nverbs:\n";
  Table table({"", ""});
  for (const Verb& verb : verbs()) table.add({verb.name, verb.summary});
  text += table.text(2).substr(1);
  text += "\n'megamoe VERB --help' lists a verb's options; '--json' makes any verb print one JSON object.\n";
  text += "\nexamples:\n";
  for (const Verb& verb : verbs()) text += fmt::format("  megamoe {} {}\n", verb.name, verb.example);
  return text;
}

// The number that all of `text` is. CLI11 takes more for one: an empty text, so that a variable that was
// never set would turn a check off, 010 for 8, and the largest number of 64 bits for any that has more.
template <class T>
T parse_number(const std::string& option, const std::string& text) {
  T value{};
  const char* end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, value);
  bool valid = error == std::errc() && stop == end;
  if constexpr (std::is_integral_v<T>) {
    valid = valid && text == std::to_string(value);
  } else {
    valid = valid && !std::isnan(value);
  }
  if (!valid) {
    throw CLI::ValidationError(
        option, fmt::format("expected a {}number, got {}", std::is_integral_v<T> ? "whole " : "",
                            text.empty() ? "an empty text" : "'" + text + "'"));
  }
  return value;
}

void check_numbers(const CLI::App& app) {
  for (const CLI::Option* option : app.get_options()) {
    const std::string type = option->get_type_name();
    for (const std::string& text : option->results()) {
      if (type == "INT" || type == "UINT") parse_number<std::int64_t>(option->get_name(), text);
      if (type == "FLOAT") parse_number<double>(option->get_name(), text);
    }
  }
}

// Adds an option of lists, each of whose parts goes through `parse`.
template <class T, class Parse>
void add_list_of(CLI::App& app, const char* option, std::vector<T>& values, const char* description,
                 const Parse& parse) {
  const auto split = [option, parse, &values](const std::vector<std::string>& lists) {
    values.clear();
    for (const std::string& list : lists) {
      for (std::size_t begin = 0, end = 0; end != std::string::npos; begin = end + 1) {
        end = list.find(',', begin);
        const std::string part = list.substr(begin, end - begin);
        if (part.empty())
          throw CLI::ValidationError(option, fmt::format("expected no empty part, got '{}'", list));
        values.push_back(parse(part));
      }
    }
  };
  app.add_option_function<std::vector<std::string>>(option, split, description);
}

int run_verb(const Verb& verb, int argc, char** argv) {
  CLI::App app(verb.summary, fmt::format("megamoe {}", verb.name));
  app.footer(fmt::format("\nexample: megamoe {} {}", verb.name, verb.example));
  app.get_formatter()->column_width(34);
  const std::function<int()> work = verb.add(app);
  try {
    app.parse(argc, argv);
    check_numbers(app);
  } catch (const CLI::CallForHelp&) {
    print(app.help());
    return 0;
  } catch (const CLI::ParseError& error) {
    return report(fmt::format("{} (see megamoe {} --help)", error.what(), verb.name), kExitUsage);
  }
  return work();
}

int run(int argc, char** argv) {
  const std::string first = argc > 1 ? argv[1] : "";
  if (first.empty()) return report("no verb given (see megamoe --help)", kExitUsage);
  if (first == "--help" || first == "-h" || first == "help") {
    print(overview());
    return 0;
  }
  if (first == "--version") {
    print("megamoe " MEGAMOE_VERSION "\n");
    return 0;
  }
  const auto verb =
      std::find_if(verbs().begin(), verbs().end(), [&](const Verb& v) { return v.name == first; });
  if (verb == verbs().end()) {
    return report(fmt::format("there is no {} '{}' (see megamoe --help)",
                              first.starts_with('-') ? "option" : "verb", first),
                  kExitUsage);
  }
  return run_verb(*verb, argc - 1, argv + 1);
}

// A standard stream that is closed would lend its number to the next file that is opened, and what is meant
// for the stream would be written there.
void open_standard_streams() {
  for (const int stream : {STDIN_FILENO, STDOUT_FILENO, STDERR_FILENO}) {
    if (fcntl(stream, F_GETFD) == -1) open("/dev/null", O_RDWR);  // gets the least number that is free
  }
}

}  // namespace

void add_json(CLI::App& app, bool& json) {
  app.add_flag("--json", json, "print one JSON object instead of tables");
}

void add_threads(CLI::App& app) {
  app.add_option_function<int>("--threads", &set_num_threads, "threads to use; 0: all cores (default)");
}

void add_list(CLI::App& app, const char* option, std::vector<std::string>& values, const char* description) {
  add_list_of(app, option, values, description, [](const std::string& part) { return part; });
}

void add_list(CLI::App& app, const char* option, std::vector<std::int64_t>& values, const char* description) {
  add_list_of(app, option, values, description,
              [option](const std::string& part) { return parse_number<std::int64_t>(option, part); });
}

void add_fused_layout(CLI::App& app, std::string& fused_layout) {
  app.add_option("--fused-layout", fused_layout,
                 "order of fused expert tensors that shapes leave open: rows-first or cols-first")
      ->check(CLI::IsMember({"rows-first", "cols-first"}).description(""));
}

}  // namespace megamoe::cli

int main(int argc, char** argv) {
  using namespace megamoe::cli;
  open_standard_streams();
  std::signal(SIGPIPE, SIG_IGN);  // a closed pipe is seen by print()
  try {
    return run(argc, argv);
  } catch (const std::bad_alloc&) {
    return report("out of memory", kExitError);
  } catch (const std::exception& error) {
    return report(error.what(), kExitError);
  }
}
