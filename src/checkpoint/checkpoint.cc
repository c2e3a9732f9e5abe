#include "checkpoint/checkpoint.h"

#include <algorithm>
#include <map>
#include <set>
#include <system_error>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "checkpoint/json.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

constexpr std::string_view kIndexName = "model.safetensors.index.json", kConfigName = "config.json",
                           kHfQuantConfigName = "hf_quant_config.json";
constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kExtension = ".safetensors";

// Follows symbolic links: download caches keep a model as a directory of links.
bool is_regular(const fs::path& path) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::none) {
    fail(ErrorCode::kIo, "cannot examine {}: {}", path.string(), error.message());
  }
  return fs::is_regular_file(status);
}

json read_object(const fs::path& path) {
  json value = parse_json(read_text_file(path, kMaxHeaderBytes), path.string());
  if (!value.is_object()) {
    fail(ErrorCode::kInvalidFile, "{}: expected a JSON object, got {}", path.string(), value.type_name());
  }
  return value;
}

json read_object_if_there(const fs::path& path) {
  std::error_code ignored;
  if (!fs::exists(fs::symlink_status(path, ignored))) return nullptr;
  return read_object(path);
}

// Where an index says the tensors are: file name -> tensor names.
using WeightMap = std::map<std::string, std::set<std::string>>;

WeightMap read_index(const fs::path& path) {
  const json index = read_object(path);
  const auto map = index.find("weight_map");
  if (map == index.end() || !map->is_object()) {
    fail(ErrorCode::kInvalidFile, "{}: expected \"weight_map\" to be an object of file names", path.string());
  }
  WeightMap files;
  for (const auto& [tensor, file] : map->items()) {
    if (!file.is_string()) {
      fail(ErrorCode::kInvalidFile, "{}: \"{}\": expected the name of a file, got {}", path.string(),
           printable(tensor), file.type_name());
    }
    const std::string& name = file.get_ref<const std::string&>();
    // Only a plain name can be sure to stay inside the directory.
    if (name.find_first_of("/\\") != std::string::npos || name.find('\0') != std::string::npos ||
        name.size() <= kExtension.size() || !name.ends_with(kExtension)) {
      fail(ErrorCode::kInvalidFile,
           "{}: \"{}\": expected the name of a .safetensors file in the same directory, got \"{}\"",
           path.string(), printable(tensor), printable(name));
    }
    files[name].insert(tensor);
  }
  if (files.empty()) fail(ErrorCode::kInvalidFile, "{}: \"weight_map\" names no tensor", path.string());
  return files;
}

// The listed tensors and the tensors of the file must be the same.
void check_listed(const SafetensorsFile& file, const std::set<std::string>& listed, const fs::path& index) {
  std::set<std::string_view> present;
  for (const TensorInfo& tensor : file.tensors()) {
    present.insert(tensor.name);
    if (!listed.contains(tensor.name)) {
      fail(ErrorCode::kInvalidFile, "{}: the tensor \"{}\" is not in this file's list in {}",
           file.path().string(), printable(tensor.name), index.string());
    }
  }
  for (const std::string& name : listed) {
    if (!present.contains(name)) {
      fail(ErrorCode::kInvalidFile, "{}: the tensor \"{}\", which {} places in this file, is not there",
           file.path().string(), printable(name), index.string());
    }
  }
}

// The number N in "...-N-of-M.safetensors" and the whole name with N taken out, or 0.
struct ShardName {
  std::int64_t number = 0, count = 0;
  std::string prefix;
};
ShardName parse_shard_name(std::string_view name) {
  constexpr std::size_t kDigits = 5;
  constexpr std::string_view kOf = "-of-";
  constexpr std::size_t kTail = 2 * kDigits + kOf.size();  // "00001-of-00003"
  name.remove_suffix(kExtension.size());
  if (name.size() < kTail + 1 || name[name.size() - kTail - 1] != '-') return {};
  const std::string_view tail = name.substr(name.size() - kTail);
  const auto number = [](std::string_view digits) -> std::int64_t {
    std::int64_t value = 0;
    for (const char c : digits) {
      if (c < '0' || c > '9') return 0;
      value = value * 10 + (c - '0');
    }
    return value;
  };
  if (tail.substr(kDigits, kOf.size()) != kOf) return {};
  return {number(tail.substr(0, kDigits)), number(tail.substr(kDigits + kOf.size())),
          std::string(name.substr(0, name.size() - kTail))};
}

// Shards carry their count in their names: without an index that is how a missing one shows.
void check_no_shard_missing(const std::vector<fs::path>& paths, const fs::path& directory) {
  std::map<std::pair<std::string, std::int64_t>, std::set<std::int64_t>> sets;
  for (const fs::path& path : paths) {
    ShardName shard = parse_shard_name(path.filename().string());
    if (shard.number > 0 && shard.count > 0) {
      sets[{std::move(shard.prefix), shard.count}].insert(shard.number);
    }
  }
  for (const auto& [key, numbers] : sets) {
    for (std::int64_t i = 1; i <= key.second; ++i) {
      if (!numbers.contains(i)) {
        fail(ErrorCode::kInvalidFile, "{}: shard {} of {} ({}{:05}-of-{:05}{}) is missing",
             directory.string(), i, key.second, key.first, i, key.second, kExtension);
      }
    }
  }
}

std::vector<fs::path> files_without_index(const fs::path& directory) {
  if (is_regular(directory / kSingleName)) return {directory / kSingleName};
  std::vector<fs::path> paths;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().extension() == kExtension && is_regular(it->path())) paths.push_back(it->path());
  }
  if (error) {
    fail(ErrorCode::kIo, "cannot list the directory {}: {}", directory.string(), error.message());
  }
  if (paths.empty()) {
    fail(ErrorCode::kNoFile, "expected a .safetensors file or {} in {}, found neither", kIndexName,
         directory.string());
  }
  std::sort(paths.begin(), paths.end());
  check_no_shard_missing(paths, directory);
  return paths;
}

}  // namespace

std::shared_ptr<const Checkpoint> Checkpoint::open(const fs::path& path) {
  auto checkpoint = std::make_shared<Checkpoint>();
  checkpoint->path_ = path;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::not_found) {
    fail(ErrorCode::kNoFile, "{} does not exist", path.string());
  }
  if (status.type() == fs::file_type::none) {
    fail(ErrorCode::kIo, "cannot examine {}: {}", path.string(), error.message());
  }
  if (!fs::is_directory(status)) {
    checkpoint->files_.push_back(SafetensorsFile::open(path));
  } else {
    const fs::path index = path / kIndexName;
    std::error_code ignored;
    checkpoint->has_index_ = fs::exists(fs::symlink_status(index, ignored));
    if (checkpoint->has_index_) {
      for (const auto& [name, listed] : read_index(index)) {
        const fs::path file = path / name;
        if (!is_regular(file)) {
          fail(ErrorCode::kInvalidFile, "{}: the file {} (of \"{}\" and {} more tensors) is missing",
               index.string(), printable(name), printable(*listed.begin()), listed.size() - 1);
        }
        checkpoint->files_.push_back(SafetensorsFile::open(file));
        check_listed(checkpoint->files_.back(), listed, index);
      }
    } else {
      for (const fs::path& file : files_without_index(path)) {
        checkpoint->files_.push_back(SafetensorsFile::open(file));
      }
    }
    checkpoint->config_ = read_object_if_there(path / kConfigName);
    checkpoint->hf_quant_config_ = read_object_if_there(path / kHfQuantConfigName);
  }

  // Only now do the files stay where they are.
  std::vector<TensorRef>& tensors = checkpoint->tensors_;
  for (const SafetensorsFile& file : checkpoint->files_) {
    for (const TensorInfo& tensor : file.tensors()) tensors.push_back({&tensor, &file});
  }
  std::sort(tensors.begin(), tensors.end(),
            [](const TensorRef& a, const TensorRef& b) { return a.info->name < b.info->name; });
  const auto twin = std::adjacent_find(tensors.begin(), tensors.end(), [](const auto& a, const auto& b) {
    return a.info->name == b.info->name;
  });
  if (twin != tensors.end()) {
    fail(ErrorCode::kInvalidFile, "the tensor \"{}\" is in two files, {} and {}", printable(twin->info->name),
         twin[0].file->path().string(), twin[1].file->path().string());
  }
  return checkpoint;
}

std::vector<fs::path> Checkpoint::sources() const {
  std::vector<fs::path> paths = {path_};
  for (const SafetensorsFile& file : files_) paths.push_back(file.path());
  for (const std::string_view name : {kConfigName, kHfQuantConfigName, kIndexName}) {
    if (is_regular(path_ / name)) paths.push_back(path_ / name);
  }
  return paths;
}

const TensorRef* Checkpoint::find(std::string_view name) const {
  const auto it = std::lower_bound(tensors_.begin(), tensors_.end(), name,
                                   [](const TensorRef& a, std::string_view b) { return a.info->name < b; });
  return it != tensors_.end() && it->info->name == name ? &*it : nullptr;
}

const TensorRef& Checkpoint::at(std::string_view name) const {
  const TensorRef* tensor = find(name);
  if (tensor == nullptr) {
    fail(ErrorCode::kNotFound, "{} has no tensor \"{}\"", path_.string(), printable(name));
  }
  return *tensor;
}

}  // namespace megamoe
