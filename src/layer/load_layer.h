// load_layer.h: makes a layer's weights ready to run from its place in a checkpoint.
#pragma once

#include "checkpoint/model_index.h"
#include "megamoe/layer.h"

namespace megamoe {

// The layer's sizes, router and activation, from its tensors and config.json. Throws kInvalidFile where they
// contradict each other, kUnsupported for a router or activation the library does not have.
LayerConfig layer_config(const ModelIndex& model, const MoeLayerInfo& info);

// Reads every expert: NVFP4 as it is; MXFP4 as NVFP4 where the power-of-two cast is exact, else as FP32 with
// a note; BF16 as BF16; F16, F32 and FP8 as FP32. Slots are counted: each is filled exactly once.
LayerWeights load_layer(const ModelIndex& model, const MoeLayerInfo& info);

}  // namespace megamoe
