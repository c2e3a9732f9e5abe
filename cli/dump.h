// dump.h: tensors that a run leaves behind: its stages and its outputs, as safetensors files.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "megamoe/moe_layer.h"

namespace megamoe::cli {

struct DumpedTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::vector<std::byte> data;
};

// A copy of what a stage left.
DumpedTensor copy_stage(const Stage& stage);

// One file, whole or not there.
void write_tensors(const std::filesystem::path& path, const std::vector<DumpedTensor>& tensors);

// Name, type, shape, and of float tensors norm, largest magnitude and how many values are not finite.
std::string stages_text(const std::vector<DumpedTensor>& stages);
nlohmann::json stages_json(const std::vector<DumpedTensor>& stages);

}  // namespace megamoe::cli
