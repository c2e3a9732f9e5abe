// geometries.h: the sizes and routers of models people run, for benches, tests and the command line.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "megamoe/layer.h"

namespace megamoe {

struct ModelGeometry {
  std::string_view name;                 // "deepseek-v3", ...
  LayerConfig config;                    // of its routed experts
  std::int64_t shared_intermediate = 0;  // of the shared expert; 0 where there is none
  bool shared_gated = false;             // its output is scaled by sigmoid(x . gate)
  bool selection_bias = false;           // the router has a bias for the choice alone
};

// Every row's config passes validate().
const std::vector<ModelGeometry>& model_geometries();
// Throws kNotFound that lists the names.
const ModelGeometry& find_geometry(std::string_view name);

}  // namespace megamoe
