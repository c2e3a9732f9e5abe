// fuzz_config.cc: any text as the configuration of a model; its member "hf_quant_config" stands for the
// second file.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/json.h"
#include "checkpoint/model_config.h"
#include "fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace megamoe;
  fuzz::expect_success_or_invalid_file([&] {
    const nlohmann::json config = parse_json({reinterpret_cast<const char*>(data), size}, "config.json");
    fuzz::require(parse_json(config.dump(), "config.json") == config);
    if (!config.is_object()) return;  // the checkpoint refuses it before
    const auto quant = config.find("hf_quant_config");
    const ModelConfig model =
        parse_model_config(config, quant != config.end() && quant->is_object() ? *quant : nlohmann::json());
    // Patterns come from the file as well: none may cost unbounded time.
    model.quantization.allowed("model.layers.0.mlp.experts.1.gate_proj");
    model.quantization.excludes("model.layers.1.mlp.experts.1.gate_proj");
  });
  return 0;
}
