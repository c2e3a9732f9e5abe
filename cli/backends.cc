// backends.cc: `megamoe backends`: what this build can run on, and which one it would choose.
#include <fmt/format.h>

#include <memory>

#include "cli/output.h"
#include "cli/verb.h"
#include "engine/backends.h"
#include "megamoe/moe_layer.h"

namespace megamoe::cli {
namespace {

int run(bool as_json) {
  const std::string_view chosen = find_backend("").name();
  nlohmann::json list = nlohmann::json::array();
  Table table({"", "name", "here", "needs", "description"});
  for (const BackendInfo& backend : list_backends()) {
    const bool is_default = backend.name == chosen;
    table.add({is_default ? "*" : "", backend.name, backend.supported ? "yes" : "no", backend.needs,
               backend.description});
    list.push_back({{"name", backend.name},
                    {"supported", backend.supported},
                    {"default", is_default},
                    {"needs", backend.needs},
                    {"description", backend.description}});
  }
  if (as_json) {
    print_json({{"backends", list}});
  } else {
    print(table.text() + "\n* is used unless --backend or MEGAMOE_BACKEND names another\n");
  }
  return 0;
}

}  // namespace

std::function<int()> add_backends(CLI::App& app) {
  const auto json = std::make_shared<bool>(false);
  add_json(app, *json);
  return [json] { return run(*json); };
}

}  // namespace megamoe::cli
