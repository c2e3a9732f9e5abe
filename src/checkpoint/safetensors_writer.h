// safetensors_writer.h: writes one safetensors file, tensor by tensor, so that it is whole or not there.
//
// The plan (names, dtypes, shapes) comes first, so the header is written first and memory holds one tensor.
// Data goes to `path` + ".partial", with a journal of the tensors that are complete in `path` + ".journal";
// finish() renames. A writer opened again on the same path with the same plan and `recipe` continues behind
// the last complete tensor; any other plan or recipe starts anew.
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
  SafetensorsWriter(const std::filesystem::path& path, std::vector<PlannedTensor> plan,
                    const std::map<std::string, std::string>& metadata, const std::string& recipe);
  ~SafetensorsWriter();  // without finish(): leaves the partial file and journal for the next run
  SafetensorsWriter(SafetensorsWriter&&) noexcept;

  // How many tensors of the plan are already there from an earlier run.
  std::int64_t completed() const;
  // The next tensor of the plan, whole; `data` must have exactly its size.
  void write(std::span<const std::byte> data);
  // All tensors written: flushes, renames to `path`, removes the journal.
  void finish();

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace megamoe
