// quant_config.h: the quantisation part of config.json and hf_quant_config.json.
#pragma once

#include "checkpoint/model_config.h"

namespace megamoe {

// Where both files speak, hf_quant_config.json holds.
QuantConfig parse_quant_config(const nlohmann::json& config, const nlohmann::json& hf_quant_config,
                               std::string_view model_type);

}  // namespace megamoe
