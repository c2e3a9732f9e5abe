// file.h: files that are mapped to read, and written whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>

namespace megamoe {

// A regular file mapped read-only. Empty files are fine (no bytes).
class MappedFile {
 public:
  // Throws kNotFound, kInvalidArgument (not a regular file) or kIo.
  explicit MappedFile(const std::filesystem::path& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  std::span<const std::byte> bytes() const { return {data_, size_}; }

 private:
  const std::byte* data_ = nullptr;
  std::size_t size_ = 0;
};

// Reads a text file of at most `max_bytes`. Throws kNotFound, kIo or kInvalidFile.
std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes = 64LL << 20);

// Writes `content` to a temporary name beside `path`, flushes it to the disk and renames. Throws kIo.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

}  // namespace megamoe
