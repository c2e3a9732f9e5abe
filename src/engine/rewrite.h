// rewrite.h: makes one checkpoint out of another: chosen matrices become NVFP4, every other tensor stays.
//
// `quantize` and `convert` choose the matrices; this is what they share. Shards keep their names, and what a
// tensor becomes goes where it was. Memory holds a few matrices at a time.
#pragma once

#include <cstdint>
#include <deque>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/model_index.h"
#include "checkpoint/quant_config_writer.h"
#include "engine/linear_output.h"
#include "megamoe/progress.h"

namespace megamoe {

enum class GateUpScale {
  kShared,    // one tensor scale for an expert's gate and up: what most readers assume
  kSeparate,  // each its own
};

std::string_view to_string(GateUpScale scale);  // "shared", "separate"

// What was done; the CLI prints it.
struct RewriteReport {
  std::int64_t quantized_linears = 0;  // matrices that became NVFP4
  std::int64_t consumed_tensors = 0;   // tensors of the source that went into them
  std::int64_t carried_tensors = 0;    // tensors that were carried over untouched
  std::int64_t written_tensors = 0;    // tensors of the new checkpoint
  std::int64_t resumed_tensors = 0;    // of these, found complete from an interrupted run
  std::int64_t source_bytes = 0;
  std::int64_t output_bytes = 0;
  std::int64_t inexact_blocks = 0;    // MXFP4 blocks that had to be quantised anew
  std::int64_t saturated_blocks = 0;  // blocks whose scale was cut to 448
  double seconds = 0.0;
  std::vector<std::string> notes;
};

// The matrices of `model` that shall become NVFP4; a view of it, so the model must outlive this.
class RewritePlan {
 public:
  RewritePlan(const ModelIndex& model, LinearFormat format) : model_(&model), format_(format) {}

  void add(const MoeLayerInfo& layer, std::int64_t expert, Projection projection, GateUpScale gate_up,
           std::optional<float> input_scale);
  void add_shared(const MoeLayerInfo& layer, Projection projection, GateUpScale gate_up,
                  std::optional<float> input_scale);
  // A linear outside the experts, of the name `module`.
  void add_other(const ExpertMatrix& matrix, const std::string& module, std::optional<float> input_scale);
  void note(std::string text) { notes_.push_back(std::move(text)); }

  const ModelIndex& model() const { return *model_; }
  const LinearFormat& format() const { return format_; }
  const std::vector<LinearOutput>& linears() const { return linears_; }
  const std::vector<std::string>& notes() const { return notes_; }
  bool consumes(const TensorRef& tensor) const { return consumed_.contains(tensor.info->name); }
  std::int64_t consumed() const { return static_cast<std::int64_t>(consumed_.size()); }

  // What the new config has to say. Throws kUnsupported if the family has no words for what stays behind.
  QuantDescription describe(ActivationScales activations) const;

 private:
  void add_linear(LinearOutput linear);

  const ModelIndex* model_;
  LinearFormat format_;
  std::vector<LinearOutput> linears_;
  std::deque<ExpertMatrix> other_matrices_;
  std::set<std::string> consumed_;  // tensors of the source that are not carried over
  std::vector<std::string> notes_;
};

// Throws kInvalidArgument where `destination` has no name, or one of `sources` lies where the new checkpoint
// goes or is made.
void check_destination(const std::filesystem::path& destination,
                       const std::vector<std::filesystem::path>& sources);

// `destination`: a directory, or, for a source that is a single file, a name that ends in ".safetensors".
// `recipe`: all that decides the content beside the source itself.
RewriteReport rewrite_checkpoint(const RewritePlan& plan, ActivationScales activations,
                                 const std::filesystem::path& destination, bool overwrite,
                                 nlohmann::json recipe, const ProgressFn& progress);

}  // namespace megamoe
