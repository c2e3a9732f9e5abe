// staged_output.h: a directory that is built under another name and appears whole.
//
// Files are made in partial_of(DST), which remembers the recipe of what is being made. Whoever asks again
// with the same recipe finds what is already there; another recipe starts anew. commit() renames.
#pragma once

#include <filesystem>
#include <string>

#include "base/file.h"

namespace megamoe {

class StagedOutput {
 public:
  // Throws kInvalidArgument where `destination` exists and `overwrite` is false, where it is no checkpoint
  // that may be replaced, or where another run is building it at this moment.
  StagedOutput(const std::filesystem::path& destination, bool overwrite, const std::string& recipe);

  const std::filesystem::path& directory() const { return staging_; }  // where the files are made
  // Moves the directory to its destination, in place of what was there. Without it or discard() everything
  // stays for the next run.
  void commit();
  // For work that nobody will continue: removes the directory. Nothing may be called after.
  void discard();

 private:
  std::filesystem::path destination_;
  std::filesystem::path staging_;
  FileDescriptor lock_;  // the open recipe file, locked
};

}  // namespace megamoe
