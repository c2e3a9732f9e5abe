// staged_output.h: a directory that is built under another name and appears whole.
//
// Files are made in DST + ".partial", which remembers the recipe of what is being made. Whoever asks again
// with the same recipe finds what is already there; another recipe starts anew. commit() renames.
#pragma once

#include <filesystem>
#include <string>

namespace megamoe {

class StagedOutput {
 public:
  // Throws kInvalidArgument where `destination` exists and `overwrite` is false, where it is no checkpoint
  // that may be replaced, or where another run is building it at this moment.
  StagedOutput(const std::filesystem::path& destination, bool overwrite, const std::string& recipe);
  ~StagedOutput();  // without commit(): leaves everything for the next run
  StagedOutput(const StagedOutput&) = delete;
  StagedOutput& operator=(const StagedOutput&) = delete;

  const std::filesystem::path& directory() const { return staging_; }  // where the files are made
  // Moves the directory to its destination, in place of what was there.
  void commit();

 private:
  std::filesystem::path destination_;
  std::filesystem::path staging_;
  int lock_ = -1;  // the open recipe file, locked
};

}  // namespace megamoe
