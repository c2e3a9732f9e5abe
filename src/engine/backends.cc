#include "engine/backends.h"

#include <cstdlib>
#include <string>

#include "base/check.h"
#include "cpu/cpu_backend.h"
#include "megamoe/moe_layer.h"
#include "ref/ref_backend.h"
#ifdef MEGAMOE_HOPPER
#include "cuda/sm90/hopper_backend.h"
#endif

namespace megamoe {

const std::vector<const Backend*>& all_backends() {
  static const std::vector<const Backend*> backends = {
#ifdef MEGAMOE_HOPPER
      &hopper_backend(),
#endif
      &cpu_backend(), &ref_backend()};
  return backends;
}

const Backend& find_backend(std::string_view name, const std::function<bool(const Backend&)>& fits) {
  std::string wanted(name);
  if (wanted.empty() || wanted == "auto") {
    const char* forced = std::getenv("MEGAMOE_BACKEND");
    wanted = forced != nullptr ? forced : "";
  }
  const Backend* best = nullptr;  // of those that are supported
  std::string names;
  for (const Backend* backend : all_backends()) {
    if (!wanted.empty() && backend->name() == wanted) {
      if (!backend->supported()) {
        fail(ErrorCode::kUnsupported, "backend '{}' needs {}, which this machine does not have", wanted,
             backend->needs());
      }
      return *backend;
    }
    if (wanted.empty() && backend->supported()) {
      if (!fits || fits(*backend)) return *backend;
      if (best == nullptr) best = backend;
    }
    names += fmt::format("{}{}", names.empty() ? "" : ", ", backend->name());
  }
  if (best != nullptr) return *best;
  fail(ErrorCode::kNotFound, "there is no backend '{}'; this build has {}", wanted, names);
}

std::vector<BackendInfo> list_backends() {
  std::vector<BackendInfo> infos;
  for (const Backend* backend : all_backends()) {
    infos.push_back({std::string(backend->name()), std::string(backend->description()),
                     std::string(backend->needs()), backend->supported()});
  }
  return infos;
}

}  // namespace megamoe
