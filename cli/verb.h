// verb.h: what a verb of the command line is: one file each, one row in main.cc.
#pragma once

#include <CLI/CLI.hpp>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <vector>

namespace megamoe::cli {

// Adds the verb's options to `app` and returns what runs once they are parsed. That function prints its
// result whole, at its end, and returns the exit code: 0, or 1 where a check it was asked for did not hold.
using AddVerb = std::function<int()> (*)(CLI::App& app);

struct Verb {
  const char* name;
  const char* summary;  // one line of `megamoe --help`
  const char* example;  // arguments of an example, without "megamoe"
  AddVerb add;
};

// One file each.
std::function<int()> add_backends(CLI::App& app);
std::function<int()> add_bench(CLI::App& app);
std::function<int()> add_calibrate(CLI::App& app);
std::function<int()> add_convert(CLI::App& app);
std::function<int()> add_inspect(CLI::App& app);
std::function<int()> add_quantize(CLI::App& app);
std::function<int()> add_run(CLI::App& app);
std::function<int()> add_verify(CLI::App& app);

// The options that every verb (add_json), or every verb that works for longer (add_threads), has.
void add_json(CLI::App& app, bool& json);
void add_threads(CLI::App& app);
// An option of one or more values between commas, none of them empty.
void add_list(CLI::App& app, const char* option, std::vector<std::string>& values, const char* description);
void add_list(CLI::App& app, const char* option, std::vector<std::int64_t>& values, const char* description);
// The option of every verb that reads a checkpoint whose shapes may leave the order of fused experts open.
void add_fused_layout(CLI::App& app, std::string& fused_layout);

}  // namespace megamoe::cli
