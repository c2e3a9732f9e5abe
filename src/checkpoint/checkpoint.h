// checkpoint.h: a model on disk: one safetensors file, or a directory of them with an index and configs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

#include "checkpoint/safetensors.h"

namespace megamoe {

// A tensor of a checkpoint and the file it is in.
struct TensorRef {
  const TensorInfo* info = nullptr;
  const SafetensorsFile* file = nullptr;
  std::span<const std::byte> bytes() const { return file->bytes(*info); }
};

// "lm_head.weight (BF16 [128, 256])": for messages.
inline std::string named(const TensorRef& tensor) {
  return tensor.info->name + " (" + describe(*tensor.info) + ")";
}

class Checkpoint {
 public:
  // `path`: a .safetensors file (then there are no configs), or a directory.
  // With an index (model.safetensors.index.json) the files it names belong, each with exactly the tensors it
  // lists there; other files are ignored. Names are plain file names of this directory; the entry itself may
  // be a symbolic link, as in download caches. A missing file, a tensor that is not where the index says or
  // that it does not list, and a tensor in two files are kInvalidFile.
  // Without an index model.safetensors belongs alone, or else every *.safetensors file; a missing shard
  // "-00002-of-00003" and a tensor in two files are kInvalidFile.
  // config.json and hf_quant_config.json are read where they exist, and must be JSON objects.
  static std::shared_ptr<const Checkpoint> open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<SafetensorsFile>& files() const { return files_; }
  const std::vector<TensorRef>& tensors() const { return tensors_; }  // sorted by name
  const TensorRef* find(std::string_view name) const;                 // null where there is none
  const TensorRef& at(std::string_view name) const;                   // throws kNotFound
  const nlohmann::json& config() const { return config_; }            // config.json, or null
  const nlohmann::json& hf_quant_config() const { return hf_quant_config_; }
  bool has_index() const { return has_index_; }
  // path(), the files of tensors and the configs, which may be links to elsewhere: what must not be written
  // to.
  std::vector<std::filesystem::path> sources() const;

 private:
  std::filesystem::path path_;
  std::vector<SafetensorsFile> files_;
  std::vector<TensorRef> tensors_;
  nlohmann::json config_;
  nlohmann::json hf_quant_config_;
  bool has_index_ = false;
};

}  // namespace megamoe
