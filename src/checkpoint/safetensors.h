// safetensors.h: one safetensors file, memory-mapped and checked before anything is believed.
//
// Layout    8 bytes: N, little-endian; N bytes of JSON: name -> {dtype, shape, data_offsets [begin, end)},
//           and "__metadata__" of strings; then the data. Ranges cover the data exactly: no gap, no overlap.
// Limits    the header is at most kMaxHeaderBytes (a header of 2 million tensors; the format's first reader
//           stops at 100 MB, which real shards exceed); names are unique; an entry has these three keys only.
// Bytes     follow the header at once: a tensor may start at any address, aligned or not. Numbers are
// little-endian
//           and are read as they lie, so the machine must be so too.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/file.h"
#include "megamoe/types.h"

namespace megamoe {

inline constexpr std::int64_t kMaxHeaderBytes = 256LL << 20;
inline constexpr std::string_view kMetadataKey = "__metadata__";  // the one name no tensor can have

struct TensorInfo {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;  // [] is a scalar
  std::int64_t begin = 0;           // bytes from the start of the file
  std::int64_t end = 0;
  std::int64_t bytes() const { return end - begin; }
  std::int64_t elements() const;  // the product of the shape
};

// "BF16 [128, 256]": for messages.
std::string describe(const TensorInfo& tensor);

// What a header says, with every range checked against `file_bytes`. `name` is for messages. This is the
// whole parser, free of files, so that it can be fuzzed. Throws kInvalidFile.
struct SafetensorsHeader {
  std::vector<TensorInfo> tensors;  // in file order
  std::map<std::string, std::string> metadata;
};
SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file_start, std::int64_t file_bytes,
                                           const std::string& name);

class SafetensorsFile {
 public:
  // Throws kNoFile, kIo or kInvalidFile.
  static SafetensorsFile open(const std::filesystem::path& path);

  const std::filesystem::path& path() const { return path_; }
  const std::vector<TensorInfo>& tensors() const { return header_.tensors; }
  const std::map<std::string, std::string>& metadata() const { return header_.metadata; }
  std::span<const std::byte> bytes(const TensorInfo& tensor) const;
  // Keeps the mapping alive.
  std::shared_ptr<const MappedFile> mapping() const { return file_; }

 private:
  std::filesystem::path path_;
  std::shared_ptr<const MappedFile> file_;
  SafetensorsHeader header_;
};

}  // namespace megamoe
