// file.h: files that are mapped to read, and written whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>

#include "megamoe/error.h"

namespace megamoe {

// Owns an open file descriptor; -1 is none.
class FileDescriptor {
 public:
  explicit FileDescriptor(int fd = -1) : fd_(fd) {}
  ~FileDescriptor();
  FileDescriptor(FileDescriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileDescriptor& operator=(FileDescriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  int get() const { return fd_; }

 private:
  int fd_;
};

// Throws `code` with "cannot <what> <path>: " and what errno stands for.
[[noreturn]] void fail_errno(const char* what, const std::filesystem::path& path,
                             ErrorCode code = ErrorCode::kIo);

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

// Takes the memory behind the whole pages of a mapping from this process; the next access brings it back. For
// those who go through files larger than the memory.
void release_pages(std::span<const std::byte> mapped);

// Reads a regular file of at most `max_bytes`. Throws kNotFound, kInvalidArgument, kIo or kInvalidFile.
std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes = 64LL << 20);

// Writes all of `data` from byte `offset` on; `path` is for the message. Throws kIo.
void write_at(const FileDescriptor& file, const std::filesystem::path& path, std::span<const std::byte> data,
              std::int64_t offset);
// Makes a rename or removal of `path` durable. Throws kIo.
void sync_directory_of(const std::filesystem::path& path);
// Throws kIo where write_file_atomically could not create its file, or `path` is a directory.
void check_writable(const std::filesystem::path& path);
// Writes `content` to a temporary name beside `path`, flushes it to the disk and renames. Throws kIo.
void write_file_atomically(const std::filesystem::path& path, std::string_view content);

}  // namespace megamoe
