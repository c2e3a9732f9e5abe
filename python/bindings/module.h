// module.h: the parts of the extension module.
#pragma once

#include <nanobind/nanobind.h>

#include "megamoe/layer.h"

namespace megamoe::python {

void bind_quantize(nanobind::module_& m);    // quantising matrices, and the orders they are stored in
void bind_checkpoint(nanobind::module_& m);  // what is in a checkpoint; making another one
void bind_layer(nanobind::module_& m);       // running a layer

// A layer's sizes, activation and router.
nanobind::dict config_dict(const LayerConfig& config);

}  // namespace megamoe::python
