// test_files.h: synthetic safetensors files and model directories for tests, made without the library's
// writer.
#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "megamoe/error.h"
#include "megamoe/types.h"

namespace megamoe::testing {

// A directory that is removed with everything in it.
class TempDir {
 public:
  TempDir() {
    std::string name = (std::filesystem::temp_directory_path() / "megamoe-test-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot create " + name);
    path_ = name;
  }
  ~TempDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TempDir(const TempDir&) = delete;
  TempDir& operator=(const TempDir&) = delete;
  const std::filesystem::path& path() const { return path_; }
  std::filesystem::path operator/(const std::filesystem::path& name) const { return path_ / name; }

 private:
  std::filesystem::path path_;
};

struct TestTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::string bytes;
};

// A tensor whose content is the memory of `values` (of any trivially copyable type).
template <class T>
TestTensor tensor(const std::string& name, DType dtype, const std::vector<std::int64_t>& shape,
                  const std::vector<T>& values) {
  static_assert(std::is_trivially_copyable_v<T> && !std::is_same_v<T, bool>);
  TestTensor result{name, dtype, shape, std::string(values.size() * sizeof(T), '\0')};
  if (!values.empty()) std::memcpy(result.bytes.data(), values.data(), result.bytes.size());
  return result;
}

// A whole file of a header text, whatever it says, and data bytes.
inline std::string raw_safetensors(std::string_view header, std::string_view data = "") {
  std::string file(8, '\0');
  for (int i = 0; i < 8; ++i) file[static_cast<std::size_t>(i)] = static_cast<char>(header.size() >> (8 * i));
  return file.append(header).append(data);
}

inline std::string safetensors_bytes(const std::vector<TestTensor>& tensors,
                                     const std::map<std::string, std::string>& metadata = {}) {
  nlohmann::json header = nlohmann::json::object();
  if (!metadata.empty()) header["__metadata__"] = metadata;
  std::string data;
  for (const TestTensor& t : tensors) {
    const std::size_t begin = data.size();
    data += t.bytes;
    header[t.name] = {
        {"dtype", to_string(t.dtype)}, {"shape", t.shape}, {"data_offsets", {begin, data.size()}}};
  }
  return raw_safetensors(header.dump(), data);
}

inline void write_bytes(const std::filesystem::path& path, std::string_view bytes) {
  std::ofstream out(path, std::ios::binary | std::ios::trunc);
  out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
  if (!out.flush()) throw std::runtime_error("cannot write " + path.string());
}

inline std::string read_bytes(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error("cannot read " + path.string());
  return {std::istreambuf_iterator<char>(in), {}};
}

inline nlohmann::json read_json(const std::filesystem::path& path) {
  return nlohmann::json::parse(read_bytes(path));
}

inline void write_safetensors(const std::filesystem::path& path, const std::vector<TestTensor>& tensors,
                              const std::map<std::string, std::string>& metadata = {}) {
  write_bytes(path, safetensors_bytes(tensors, metadata));
}

// A directory's model.safetensors.index.json: tensor name -> file name.
inline void write_index(const std::filesystem::path& directory,
                        const std::map<std::string, std::string>& weight_map) {
  const nlohmann::json index = {{"metadata", nlohmann::json::object()}, {"weight_map", weight_map}};
  write_bytes(directory / "model.safetensors.index.json", index.dump());
}

// Expects `action` to throw an Error of that code whose one-line message contains each of `parts`.
template <class Action>
void expect_error(ErrorCode code, const std::vector<std::string>& parts, Action&& action) {
  try {
    action();
    ADD_FAILURE() << "expected an error: " << to_string(code);
  } catch (const Error& error) {
    const std::string message = error.what();
    EXPECT_EQ(to_string(error.code()), to_string(code)) << message;
    EXPECT_EQ(message.find('\n'), std::string::npos) << message;
    for (const std::string& part : parts) {
      EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in: " << message;
    }
  }
}

}  // namespace megamoe::testing
