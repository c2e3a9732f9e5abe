#include "base/file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>

#include "base/check.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;

constexpr int kMaxLinks = 40;  // as the system follows at most

// A regular file opened to read, and its size.
struct OpenFile {
  FileDescriptor descriptor;
  std::int64_t bytes = 0;
};

OpenFile open_regular(const fs::path& path) {
  // Without O_NONBLOCK a FIFO would block here instead of being refused below.
  OpenFile file{FileDescriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK))};
  if (file.descriptor.get() < 0) {
    const bool absent = errno == ENOENT || errno == ENOTDIR;
    fail_errno("open", path, absent ? ErrorCode::kNoFile : ErrorCode::kIo);
  }
  struct stat status;
  if (::fstat(file.descriptor.get(), &status) != 0) fail_errno("examine", path);
  if (!S_ISREG(status.st_mode)) {
    fail(ErrorCode::kInvalidArgument, "expected {} to be a regular file, got {}", path.string(),
         S_ISDIR(status.st_mode) ? "a directory" : "something else");
  }
  file.bytes = status.st_size;
  return file;
}

// The process id keeps two processes' temporary files apart; the last to rename wins with a whole file.
fs::path temporary_beside(const fs::path& path) { return path.string() + fmt::format(".tmp{}", ::getpid()); }

bool is_standard_output(const struct stat& status) {
  struct stat output;
  return ::fstat(STDOUT_FILENO, &output) == 0 && output.st_dev == status.st_dev &&
         output.st_ino == status.st_ino;
}

// Whether a new file of that name would not reach those for whom `path` is written.
bool is_written_in_place(const fs::path& path) {
  struct stat status;
  if (::stat(path.c_str(), &status) != 0 || S_ISDIR(status.st_mode)) return false;
  return !S_ISREG(status.st_mode) || is_standard_output(status);
}

FileDescriptor open_in_place(const fs::path& path) {
  struct stat status;
  const bool output = ::stat(path.c_str(), &status) == 0 && is_standard_output(status);
  // What is printed later comes behind what is written here only if both move the same position.
  FileDescriptor file(output ? ::dup(STDOUT_FILENO) : ::open(path.c_str(), O_WRONLY | O_CLOEXEC));
  if (file.get() < 0) fail_errno("open", path);
  return file;
}

// Has write(the rest of `data`, how many bytes lie before it) put all of it, a part at a time.
template <class Write>
void write_all(const fs::path& path, std::span<const std::byte> data, const Write& write) {
  for (std::size_t done = 0; done < data.size();) {
    const ssize_t put = write(data.subspan(done), done);
    if (put < 0 && errno == EINTR) continue;
    if (put < 0) fail_errno("write", path);
    done += static_cast<std::size_t>(put);
  }
}

// Writes where the file's position is: pipes have no other place.
void write_on(const FileDescriptor& file, const fs::path& path, std::span<const std::byte> data) {
  write_all(path, data, [&](std::span<const std::byte> rest, std::size_t) {
    return ::write(file.get(), rest.data(), rest.size());
  });
}

fs::path real_path(const fs::path& path) {
  std::error_code error;
  fs::path all = fs::absolute(path, error);
  if (!error) all = fs::weakly_canonical(all, error);
  if (error) fail(ErrorCode::kIo, "cannot examine {}: {}", path.string(), error.message());
  return all.has_filename() ? all : all.parent_path();
}

bool is_link(const fs::path& path) {
  std::error_code ignored;
  return fs::is_symlink(fs::symlink_status(path, ignored));
}

FileDescriptor create(const fs::path& path) {
  FileDescriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  if (file.get() < 0) fail_errno("create", path);
  return file;
}

}  // namespace

void fail_errno(const char* what, const fs::path& path, ErrorCode code) {
  const int error = errno;  // before anything else can change it
  fail(code, "cannot {} {}: {}", what, path.string(), std::generic_category().message(error));
}

FileDescriptor::~FileDescriptor() {
  if (fd_ >= 0) ::close(fd_);
}

MappedFile::MappedFile(const fs::path& path) {
  const OpenFile file = open_regular(path);
  if (file.bytes == 0) return;  // mmap refuses a length of 0
  size_ = static_cast<std::size_t>(file.bytes);
  void* data = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file.descriptor.get(), 0);
  if (data == MAP_FAILED) fail_errno("map", path);
  data_ = static_cast<const std::byte*>(data);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
}

void release_pages(std::span<const std::byte> mapped) {
  const auto page = static_cast<std::uintptr_t>(::sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<std::uintptr_t>(mapped.data());
  const auto begin = (first + page - 1) / page * page, end = (first + mapped.size()) / page * page;
  // Only advice: whether it is taken changes no result.
  if (begin < end)
    ::madvise(const_cast<std::byte*>(mapped.data()) + (begin - first), end - begin, MADV_DONTNEED);
}

std::string read_text_file(const fs::path& path, std::int64_t max_bytes) {
  const OpenFile file = open_regular(path);
  if (file.bytes > max_bytes) {
    fail(ErrorCode::kInvalidFile, "{} has {} bytes, expected at most {}", path.string(), file.bytes,
         max_bytes);
  }
  std::string text(static_cast<std::size_t>(file.bytes), '\0');
  std::size_t done = 0;
  while (done < text.size()) {
    const ssize_t got = ::read(file.descriptor.get(), text.data() + done, text.size() - done);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) fail_errno("read", path);
    if (got == 0) break;  // the file became shorter meanwhile
    done += static_cast<std::size_t>(got);
  }
  text.resize(done);
  return text;
}

fs::path partial_of(const fs::path& path) { return path.string() + ".partial"; }

fs::path renameable(const fs::path& path) {
  fs::path name = path.has_filename() ? path : path.parent_path();
  if (!is_link(name) && name.filename() != "." && name.filename() != "..") return name;
  name = real_path(name);
  // Left is a link whose end is not there.
  for (int links = 0; is_link(name); ++links) {
    std::error_code error;
    const fs::path target = fs::read_symlink(name, error);
    if (error || links == kMaxLinks) fail(ErrorCode::kIo, "cannot follow the link {}", path.string());
    name = real_path(name.parent_path() / target);
  }
  return name;
}

bool lies_in(const fs::path& path, const fs::path& directory) {
  std::error_code ignored;
  if (fs::equivalent(path, directory, ignored)) return true;
  const fs::path outer = real_path(directory), inner = real_path(path);
  return std::mismatch(outer.begin(), outer.end(), inner.begin(), inner.end()).first == outer.end();
}

void write_at(const FileDescriptor& file, const fs::path& path, std::span<const std::byte> data,
              std::int64_t offset) {
  write_all(path, data, [&](std::span<const std::byte> rest, std::size_t done) {
    return ::pwrite(file.get(), rest.data(), rest.size(), offset + static_cast<std::int64_t>(done));
  });
}

void sync_directory_of(const fs::path& path) {
  const fs::path parent = path.parent_path().empty() ? fs::path(".") : path.parent_path();
  const FileDescriptor directory(::open(parent.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  // Some file systems cannot flush a directory (EINVAL): nothing more can be done there.
  if (directory.get() < 0 || (::fsync(directory.get()) != 0 && errno != EINVAL)) {
    fail_errno("flush the directory", parent);
  }
}

void write_file_atomically(const fs::path& path, const std::vector<std::span<const std::byte>>& pieces) {
  if (is_written_in_place(path)) {
    const FileDescriptor file = open_in_place(path);
    for (const std::span<const std::byte> piece : pieces) write_on(file, path, piece);
    return;
  }
  const fs::path name = renameable(path), temporary = temporary_beside(name);
  try {
    {
      const FileDescriptor file = create(temporary);
      for (const std::span<const std::byte> piece : pieces) write_on(file, temporary, piece);
      if (::fsync(file.get()) != 0) fail_errno("flush", temporary);
    }
    if (::rename(temporary.c_str(), name.c_str()) != 0) fail_errno("rename to", name);
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  sync_directory_of(name);
}

void write_file_atomically(const fs::path& path, std::string_view content) {
  write_file_atomically(path, {std::as_bytes(std::span(content))});
}

void check_is_no_input(const fs::path& path, const std::vector<fs::path>& inputs) {
  if (path.empty() || is_written_in_place(path)) return;  // no place among files
  const fs::path place = path.has_parent_path() ? path.parent_path() : ".", target = renameable(path);
  for (const fs::path& input : inputs) {
    if (!lies_in(path, input) && !lies_in(place, input) && !lies_in(target, input)) continue;
    fail(ErrorCode::kInvalidArgument, "{} is not written, since {} is read and must stay as it is",
         path.string(), input.string());
  }
}

void check_writable(const fs::path& path) {
  if (path.empty()) fail(ErrorCode::kInvalidArgument, "the file to write has no name");
  std::error_code ignored;
  if (fs::is_directory(path, ignored))
    fail(ErrorCode::kIo, "cannot write {}: it is a directory", path.string());
  if (is_written_in_place(path)) {
    if (::access(path.c_str(), W_OK) != 0) fail_errno("write", path);
    return;
  }
  const fs::path temporary = temporary_beside(renameable(path));
  create(temporary);
  ::unlink(temporary.c_str());
}

}  // namespace megamoe
