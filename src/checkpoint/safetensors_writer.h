// safetensors_writer.h: writes one safetensors file, tensor by tensor, so that it is whole or not there.
//
// The plan (names, dtypes, shapes) comes first, so the header is written first and memory holds one tensor.
// Data goes to partial_of(path), with a journal of the tensors that are complete in `path` + ".journal";
// finish() renames. A writer opened again on the same path with the same plan and `recipe` continues behind
// the last complete tensor; any other plan or recipe starts anew.
// Layout    the header names the tensors in plan order; the data of the widest element types comes first, in
//           plan order among equals, and starts at a multiple of 8: every tensor is aligned to its elements,
//           which some readers need. The same plan, metadata and data always give the same bytes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "megamoe/types.h"

namespace megamoe {

struct PlannedTensor {
  std::string name;
  DType dtype = DType::kU8;
  std::vector<std::int64_t> shape;
  std::int64_t bytes() const;
};

class SafetensorsWriter {
 public:
  // `recipe`: any text that tells one way of making the content from another; it enters the journal.
  // Data is flushed to the disk, and the journal brought up to date, every `flush_bytes`.
  // Throws kInvalidArgument for a plan that no safetensors file can hold, and kIo: also where another writer
  // is at work on `path` or the disk has no room for the whole file.
  SafetensorsWriter(const std::filesystem::path& path, std::vector<PlannedTensor> plan,
                    const std::map<std::string, std::string>& metadata, const std::string& recipe,
                    std::int64_t flush_bytes = 64LL << 20);
  ~SafetensorsWriter();  // without finish() or discard(): leaves the partial file and journal for the next
                         // run
  SafetensorsWriter(SafetensorsWriter&&) noexcept;

  // How many tensors of the plan are already there from an earlier run.
  std::int64_t completed() const;
  // The next tensor of the plan, whole; `data` must have exactly its size. After an error (kIo: disk full)
  // the same tensor is still the next one.
  void write(std::span<const std::byte> data);
  // All tensors written: flushes, renames to `path` (over what is there), removes the journal.
  void finish();
  // For work that nobody will continue: removes the partial file and its journal. Nothing may be called
  // after.
  void discard();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

// Writes the tensors of `plan`, whose bytes are there already, as write_file_atomically does: the same file
// as a SafetensorsWriter's. Throws as that one.
void write_safetensors(const std::filesystem::path& path, const std::vector<PlannedTensor>& plan,
                       const std::vector<std::span<const std::byte>>& data);

// Removes the journal beside the whole file `path` that a run left which was killed at the end of finish().
void remove_stale_journal(const std::filesystem::path& path);

}  // namespace megamoe
