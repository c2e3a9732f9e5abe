#include "engine/staged_output.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "base/check.h"
#include "base/file.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;

constexpr const char* kRecipeName = ".megamoe-recipe";

void check(const std::error_code& error, const char* what, const fs::path& path) {
  if (error) fail(ErrorCode::kIo, "cannot {} {}: {}", what, path.string(), error.message());
}

bool is_there(const fs::path& path) {
  std::error_code error;
  const bool there = fs::exists(path, error);
  check(error, "examine", path);
  return there;
}

// --overwrite must not delete a directory that was given by mistake. What a run writes is files alone, so a
// folder inside (another model, say) was put there by someone else.
void check_replaceable(const fs::path& directory) {
  bool has_weights = false, empty = true;
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    empty = false;
    std::error_code unknown;
    if (fs::is_directory(it->symlink_status(unknown))) {
      fail(ErrorCode::kInvalidArgument,
           "{} holds the folder {}, which no run has written, so it is not replaced", directory.string(),
           it->path().filename().string());
    }
    has_weights = has_weights || it->path().extension() == ".safetensors";
  }
  check(error, "list", directory);
  if (!empty && !has_weights) {
    fail(ErrorCode::kInvalidArgument, "{} holds no .safetensors file, so it is not replaced",
         directory.string());
  }
}

// Whether commit() will be let replace `directory`: better to know now than after hours.
void check_may_replace(const fs::path& directory) {
  struct statx status;
  if (statx(AT_FDCWD, directory.c_str(), 0, 0, &status) != 0) fail_errno("examine", directory);
  if ((status.stx_attributes & STATX_ATTR_MOUNT_ROOT) != 0) {
    fail(ErrorCode::kInvalidArgument, "{} is where a file system is mounted, so it cannot be replaced",
         directory.string());
  }
  if (access(directory.c_str(), W_OK) != 0) fail_errno("replace", directory);
}

void clear_except_recipe(const fs::path& directory) {
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    if (it->path().filename() == kRecipeName) continue;
    std::error_code removal;
    fs::remove_all(it->path(), removal);
    check(removal, "remove", it->path());
  }
  check(error, "list", directory);
}

void write_recipe(const FileDescriptor& file, const std::string& recipe, const fs::path& path) {
  if (ftruncate(file.get(), 0) != 0) fail_errno("write", path);
  write_at(file, path, std::as_bytes(std::span(recipe)), 0);
}

// Opens (makes, if `create`) and locks the recipe file.
FileDescriptor lock_recipe(const fs::path& path, bool create) {
  FileDescriptor file(open(path.c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0644));
  if (file.get() < 0) fail_errno("open", path);
  if (flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
    fail(ErrorCode::kInvalidArgument, "{} is being written by another run", path.parent_path().string());
  }
  return file;
}

}  // namespace

StagedOutput::StagedOutput(const fs::path& destination, bool overwrite, const std::string& recipe)
    : destination_(renameable(destination)), staging_(partial_of(destination_)) {
  std::error_code error;
  if (is_there(destination_)) {
    if (!overwrite) {
      fail(ErrorCode::kInvalidArgument, "{} exists already; it is replaced only if overwriting is asked for",
           destination_.string());
    }
    if (!fs::is_directory(destination_, error)) {
      fail(ErrorCode::kInvalidArgument, "{} is not a directory", destination_.string());
    }
    check_may_replace(destination_);
    check_replaceable(destination_);
  }
  const fs::path recipe_path = staging_ / kRecipeName;
  const bool resumes = is_there(recipe_path);
  if (!resumes && is_there(staging_) && !fs::is_empty(staging_, error)) {
    fail(ErrorCode::kInvalidArgument, "{} is in the way and was not left by an interrupted run",
         staging_.string());
  }
  check(error, "list", staging_);
  fs::create_directories(staging_, error);
  check(error, "create", staging_);
  lock_ = lock_recipe(recipe_path, !resumes);
  if (read_text_file(recipe_path) != recipe) {
    clear_except_recipe(staging_);
    write_recipe(lock_, recipe, recipe_path);
  }
}

void StagedOutput::commit() {
  std::error_code error;
  // What the renames leave under the staging name still counts as left by a run, so a kill here harms
  // nothing.
  bool replaced = false;
  if (is_there(destination_)) {
    lock_recipe(destination_ / kRecipeName, true);
    replaced = renameat2(AT_FDCWD, staging_.c_str(), AT_FDCWD, destination_.c_str(), RENAME_EXCHANGE) == 0;
    // Two steps on a file system without exchange; any other refusal must not cost what is there.
    if (!replaced && errno != EINVAL && errno != ENOSYS) fail_errno("replace", destination_);
    if (!replaced) {
      fs::remove_all(destination_, error);
      check(error, "remove", destination_);
    }
  }
  if (!replaced) fs::rename(staging_, destination_, error);
  check(error, "rename", staging_);
  sync_directory_of(destination_);
  if (replaced) fs::remove_all(staging_, error);
  check(error, "remove", staging_);
  fs::remove(destination_ / kRecipeName, error);
  check(error, "remove", destination_ / kRecipeName);
}

void StagedOutput::discard() {
  std::error_code ignored;  // what led here is what the user should read
  fs::remove_all(staging_, ignored);
}

}  // namespace megamoe
