#include "cli/dump.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>
#include <span>

#include "checkpoint/safetensors_writer.h"
#include "cli/output.h"
#include "engine/stored_part.h"

namespace megamoe::cli {
namespace {

struct Figures {
  double norm = 0, largest = 0;
  std::int64_t nonfinite = 0;
};

// Of the types that hold plain floats; codes and indices have none.
std::optional<Figures> figures_of(const DumpedTensor& tensor) {
  switch (tensor.dtype) {
    case DType::kF32:
    case DType::kBF16:
    case DType::kE4M3: break;
    default: return {};
  }
  Figures out;
  const auto width = static_cast<std::size_t>(bits_of(tensor.dtype) / 8);
  double sum = 0;
  for (std::size_t at = 0; at + width <= tensor.data.size(); at += width) {
    const double value = stored_value(tensor.dtype, tensor.data.data() + at);
    if (!std::isfinite(value)) {
      ++out.nonfinite;
      continue;
    }
    sum += value * value;
    out.largest = std::max(out.largest, std::abs(value));
  }
  out.norm = std::sqrt(sum);
  return out;
}

}  // namespace

DumpedTensor copy_stage(const Stage& stage) {
  DumpedTensor out{stage.name, stage.dtype, stage.shape, {}};
  std::int64_t bits = bits_of(stage.dtype);
  for (const std::int64_t size : stage.shape) bits *= size;
  out.data.resize(static_cast<std::size_t>(bits / 8));
  if (!out.data.empty()) std::memcpy(out.data.data(), stage.data, out.data.size());
  return out;
}

void write_tensors(const std::filesystem::path& path, const std::vector<DumpedTensor>& tensors) {
  std::vector<PlannedTensor> plan;
  std::vector<std::span<const std::byte>> data;
  for (const DumpedTensor& tensor : tensors) {
    plan.push_back({tensor.name, tensor.dtype, tensor.shape});
    data.emplace_back(tensor.data);
  }
  write_safetensors(path, plan, data);
}

std::string stages_text(const std::vector<DumpedTensor>& stages) {
  Table table({"stage", "type", "shape", ">norm", ">largest", ">not finite"});
  for (const DumpedTensor& stage : stages) {
    const auto figures = figures_of(stage);
    table.add({stage.name, std::string(to_string(stage.dtype)),
               fmt::format("[{}]", fmt::join(stage.shape, ", ")),
               figures ? fmt::format("{:.6g}", figures->norm) : "-",
               figures ? fmt::format("{:.6g}", figures->largest) : "-",
               figures ? fmt::format("{}", figures->nonfinite) : "-"});
  }
  return table.text();
}

nlohmann::json stages_json(const std::vector<DumpedTensor>& stages) {
  nlohmann::json out = nlohmann::json::array();
  for (const DumpedTensor& stage : stages) {
    nlohmann::json row = {{"name", stage.name}, {"dtype", to_string(stage.dtype)}, {"shape", stage.shape}};
    if (const auto figures = figures_of(stage)) {
      row["norm"] = figures->norm;
      row["largest"] = figures->largest;
      row["nonfinite"] = figures->nonfinite;
    }
    out.push_back(row);
  }
  return out;
}

}  // namespace megamoe::cli
