// file.h: files that are mapped to read, and written whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

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
  // Throws kNoFile, kInvalidArgument (not a regular file) or kIo.
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

// Reads a regular file of at most `max_bytes`. Throws kNoFile, kInvalidArgument, kIo or kInvalidFile.
std::string read_text_file(const std::filesystem::path& path, std::int64_t max_bytes = 64LL << 20);

// The name under which what shall stand at `path` grows until it is whole.
std::filesystem::path partial_of(const std::filesystem::path& path);
// The name that a file or directory at `path` can be renamed to: without a slash at the end, the directory
// itself for "." and "..", and for a symbolic link what it leads to, whether that is there or not. Throws
// kIo.
std::filesystem::path renameable(const std::filesystem::path& path);
// Whether `path` is `directory`, by whatever name, or lies in it. Links are followed; neither needs to be
// there.
bool lies_in(const std::filesystem::path& path, const std::filesystem::path& directory);

// Writes all of `data` from byte `offset` on; `path` is for the message. Throws kIo.
void write_at(const FileDescriptor& file, const std::filesystem::path& path, std::span<const std::byte> data,
              std::int64_t offset);
// Makes a rename or removal of `path` durable. Throws kIo.
void sync_directory_of(const std::filesystem::path& path);
// Writes `pieces`, one after the other, to a temporary name beside `path`, flushes it to the disk and renames
// it to what renameable() says. Only what can have no other file in its place (a device, a pipe, the file
// that standard output goes to) is written to where it is. Throws kIo.
void write_file_atomically(const std::filesystem::path& path,
                           const std::vector<std::span<const std::byte>>& pieces);
void write_file_atomically(const std::filesystem::path& path, std::string_view content);
// For before the work whose result goes to `path`. Throws kInvalidArgument where it is one of `inputs`, which
// are read, or lies in one; a link counts where it stands and where it leads.
void check_is_no_input(const std::filesystem::path& path, const std::vector<std::filesystem::path>& inputs);
// Likewise, where write_file_atomically would fail at once: kIo, or kInvalidArgument for a path without a
// name.
void check_writable(const std::filesystem::path& path);

}  // namespace megamoe
