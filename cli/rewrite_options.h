// rewrite_options.h: what `quantize` and `convert` have in common on the command line.
#pragma once

#include <CLI/CLI.hpp>
#include <functional>
#include <initializer_list>
#include <map>
#include <string>

#include "engine/rewrite.h"

namespace megamoe::cli {

struct RewriteOptions {
  std::string source;
  std::string destination;
  Family family = Family::kModelOpt;
  GateUpScale gate_up_scale = GateUpScale::kShared;
  std::string fused_layout;
  bool overwrite = false;
  bool progress = false;
  bool json = false;
};

// An option whose values are the names of `choices`.
template <class T>
CLI::Option* add_choice(CLI::App& app, const char* option, T& value, std::initializer_list<T> choices,
                        const char* description) {
  std::map<std::string, T> by_name;
  for (const T choice : choices) by_name.emplace(to_string(choice), choice);
  const auto set = [&value, by_name](const std::string& name) { value = by_name.at(name); };
  return app.add_option_function<std::string>(option, set, description)
      ->check(CLI::IsMember(by_name).description(""));
}

// `family_option`: how the verb calls the choice of the family to write.
void add_rewrite_options(CLI::App& app, const char* family_option, bool family_required,
                         RewriteOptions& options);

// Runs `work` under a progress bar that is called `what`, and prints its report.
int run_rewrite(const char* what, const RewriteOptions& options,
                const std::function<RewriteReport(const ProgressFn&)>& work);

}  // namespace megamoe::cli
