#include "engine/rewrite.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>

#include "base/check.h"
#include "base/file.h"
#include "base/parallel.h"
#include "checkpoint/safetensors_writer.h"
#include "engine/staged_output.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

// A file of this size is no tokenizer or template: it is weights of another kind.
constexpr std::uintmax_t kLargestCopiedFile = 64u << 20;
constexpr const char* kIndexName = "model.safetensors.index.json";
// Part of every recipe: a program that makes other bytes must not continue this one's work.
constexpr const char* kRecipeVersion = "megamoe rewrite 1";

// A piece of work: one tensor to carry over, or one matrix that becomes several tensors.
struct Job {
  const TensorRef* carried = nullptr;
  const LinearOutput* linear = nullptr;
  std::vector<PlannedTensor> outputs;
  std::int64_t source_bytes = 0;
};

struct Shard {
  const SafetensorsFile* source = nullptr;
  std::string name;
  std::vector<Job> jobs;
  std::vector<PlannedTensor> plan() const {
    std::vector<PlannedTensor> all;
    for (const Job& job : jobs) all.insert(all.end(), job.outputs.begin(), job.outputs.end());
    return all;
  }
};

Job carry(const TensorRef& tensor) {
  Job job;
  job.carried = &tensor;
  job.outputs = {{tensor.info->name, tensor.info->dtype, tensor.info->shape}};
  job.source_bytes = tensor.info->bytes();
  return job;
}

using LinearsByWeight = std::unordered_map<std::string, std::vector<const LinearOutput*>>;

Shard plan_shard(const RewritePlan& plan, const SafetensorsFile& file, const LinearsByWeight& by_weight) {
  const Checkpoint& checkpoint = *plan.model().checkpoint;
  // A lone file may have any name; in a directory it is found by its ending.
  const bool found = checkpoint.has_index() || file.path().extension() == ".safetensors";
  Shard shard{&file, found ? file.path().filename().string() : "model.safetensors", {}};
  for (const TensorInfo& info : file.tensors()) {
    const TensorRef& tensor = checkpoint.at(info.name);
    if (const auto linears = by_weight.find(info.name); linears != by_weight.end()) {
      const auto share = info.bytes() / static_cast<std::int64_t>(linears->second.size());
      for (const LinearOutput* linear : linears->second) {
        shard.jobs.push_back({nullptr, linear, plan_tensors(*linear, plan.format()), share});
      }
    } else if (!plan.consumes(tensor)) {
      shard.jobs.push_back(carry(tensor));
    }
  }
  return shard;
}

std::vector<Shard> plan_shards(const RewritePlan& plan) {
  LinearsByWeight by_weight;
  for (const LinearOutput& linear : plan.linears()) {
    by_weight[linear.matrix->weight->info->name].push_back(&linear);
  }
  std::vector<Shard> shards;
  std::set<std::string> names;
  for (const SafetensorsFile& file : plan.model().checkpoint->files()) {
    Shard shard = plan_shard(plan, file, by_weight);
    for (const PlannedTensor& tensor : shard.plan()) {
      if (!names.insert(tensor.name).second) {
        fail(ErrorCode::kInvalidFile, "two tensors of the new checkpoint would be named {}", tensor.name);
      }
    }
    if (!shard.jobs.empty()) shards.push_back(std::move(shard));
  }
  return shards;
}

// What the source is, so that work on another state of it is not continued.
json source_identity(const Checkpoint& checkpoint) {
  json files = json::array();
  for (const SafetensorsFile& file : checkpoint.files()) {
    std::error_code error;
    const auto changed = fs::last_write_time(file.path(), error).time_since_epoch().count();
    files.push_back({file.path().string(), fs::file_size(file.path(), error), changed});
    if (error) fail(ErrorCode::kIo, "cannot examine {}: {}", file.path().string(), error.message());
  }
  return {
      {"files", files}, {"config", checkpoint.config()}, {"hf_quant_config", checkpoint.hf_quant_config()}};
}

class Reporter {
 public:
  Reporter(const std::vector<Shard>& shards, const ProgressFn& progress) : progress_(progress) {
    for (const Shard& shard : shards) {
      for (const Job& job : shard.jobs) total_ += job.source_bytes;
    }
  }
  void done(std::int64_t bytes, std::string_view item) {
    done_ += bytes;
    if (progress_) progress_({done_, total_, item});
  }

 private:
  const ProgressFn& progress_;
  std::int64_t done_ = 0;
  std::int64_t total_ = 0;
};

// A source larger than the memory must not fill it.
void release_source(const Job& job) {
  if (job.carried != nullptr) return release_pages(job.carried->bytes());
  for (const ExpertMatrix* m : {job.linear->matrix, job.linear->scale_partner}) {
    if (m == nullptr) continue;
    release_pages(m->weight->bytes());
    if (m->block_scale != nullptr) release_pages(m->block_scale->bytes());
  }
}

constexpr std::int64_t kJobsOfThread = 8;          // made at a time,
constexpr std::int64_t kBytesOfThread = 32 << 20;  // fewer where their sources are more than that

// A job of which the first `skip` tensors are written, and what was made for it.
struct MadeJob {
  const Job* job;
  std::int64_t skip;
  LinearBytes bytes;
};

void write_made(const MadeJob& made, SafetensorsWriter& writer) {
  if (made.job->carried != nullptr) return writer.write(made.job->carried->bytes());
  for (auto i = static_cast<std::size_t>(made.skip); i < made.bytes.tensors.size(); ++i) {
    writer.write(std::as_bytes(std::span(made.bytes.tensors[i])));
  }
}

// Calls `work`. An error that lies in the source would come again: nothing is then kept for another run.
template <class Output, class Work>
void write_or_discard(Output& output, const Work& work) {
  try {
    work();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::kInvalidFile || error.code() == ErrorCode::kUnsupported) output.discard();
    throw;
  }
}

// As many jobs at a time as there are threads: one thread writes what was made before, in order, while the
// others make the next tensors.
void write_jobs(const Shard& shard, const LinearFormat& format, SafetensorsWriter& writer, Reporter& reporter,
                RewriteReport& report) {
  std::int64_t there = writer.completed();
  report.resumed_tensors += there;
  auto job = shard.jobs.begin();
  std::vector<MadeJob> made, next;
  do {
    next.clear();
    std::int64_t bytes = 0;
    const std::int64_t threads = num_threads();
    const auto room = [&] {
      const std::int64_t count = std::ssize(next);
      return count < threads || (count < threads * kJobsOfThread && bytes < threads * kBytesOfThread);
    };
    for (; job != shard.jobs.end() && room(); ++job) {
      const std::int64_t skip = std::min(there, std::ssize(job->outputs));
      there -= skip;
      if (skip < std::ssize(job->outputs)) {
        next.push_back({&*job, skip, {}});
        bytes += job->source_bytes;
      } else {
        reporter.done(job->source_bytes, job->outputs.front().name);
      }
    }
    parallel_for(std::ssize(next) + 1, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        if (i == 0) {
          for (const MadeJob& m : made) write_made(m, writer);
        } else if (MadeJob& m = next[static_cast<std::size_t>(i - 1)]; m.job->linear != nullptr) {
          m.bytes = make_tensors(*m.job->linear, format);
        }
      }
    });
    for (const MadeJob& m : made) {
      report.inexact_blocks += m.bytes.inexact_blocks;
      report.saturated_blocks += m.bytes.saturated_blocks;
      release_source(*m.job);
      reporter.done(m.job->source_bytes, m.job->outputs.front().name);
    }
    std::swap(made, next);
  } while (!made.empty());
  writer.finish();
}

void write_shard(const Shard& shard, const fs::path& path, const LinearFormat& format,
                 const std::string& recipe, Reporter& reporter, RewriteReport& report) {
  SafetensorsWriter writer(path, shard.plan(), shard.source->metadata(), recipe);
  write_or_discard(writer, [&] { write_jobs(shard, format, writer, reporter, report); });
}

void write_shards(const std::vector<Shard>& shards, const fs::path& directory, const LinearFormat& format,
                  const std::string& recipe, Reporter& reporter, RewriteReport& report) {
  for (const Shard& shard : shards) {
    const fs::path path = directory / shard.name;
    if (fs::exists(path)) {  // renamed to its name only when whole
      remove_stale_journal(path);
      std::int64_t bytes = 0;
      for (const Job& job : shard.jobs) bytes += job.source_bytes;
      report.resumed_tensors += static_cast<std::int64_t>(shard.plan().size());
      reporter.done(bytes, shard.name);
    } else {
      write_shard(shard, path, format, recipe, reporter, report);
    }
  }
}

void write_json(const fs::path& path, const json& value) {
  write_file_atomically(path, value.dump(2) + "\n");
}

// The tokenizer and whatever else lies beside the weights. Returns notes on what stayed behind.
std::vector<std::string> copy_other_files(const Checkpoint& checkpoint, const fs::path& to) {
  std::vector<std::string> notes;
  std::error_code error;
  for (fs::directory_iterator it(checkpoint.path(), error), end; !error && it != end; it.increment(error)) {
    const fs::path& from = it->path();
    const std::string name = from.filename().string();
    if (name == "config.json" || name == "hf_quant_config.json" || name == kIndexName) continue;
    std::error_code status;
    const bool regular = fs::is_regular_file(from, status);
    if (from.extension() == ".safetensors") {
      const auto& files = checkpoint.files();
      const bool used = std::any_of(files.begin(), files.end(), [&](const SafetensorsFile& file) {
        return file.path().filename() == from.filename();
      });
      if (!used) notes.push_back(fmt::format("{} is not part of the model and was not copied", name));
    } else if (!regular || fs::file_size(from, status) > kLargestCopiedFile) {
      notes.push_back(
          fmt::format("{} was not copied: {}", name, regular ? "larger than 64 MiB" : "not a regular file"));
    } else {
      write_file_atomically(to / name, read_text_file(from, static_cast<std::int64_t>(kLargestCopiedFile)));
    }
  }
  if (error) fail(ErrorCode::kIo, "cannot list {}: {}", checkpoint.path().string(), error.message());
  std::sort(notes.begin(), notes.end());
  return notes;
}

void write_index(const std::vector<Shard>& shards, std::int64_t total_bytes, const fs::path& directory) {
  json map = json::object();
  for (const Shard& shard : shards) {
    for (const PlannedTensor& tensor : shard.plan()) map[tensor.name] = shard.name;
  }
  write_json(directory / kIndexName,
             {{"metadata", {{"total_size", total_bytes}}}, {"weight_map", std::move(map)}});
}

void write_configs(const Checkpoint& checkpoint, const QuantDescription& description, const fs::path& to) {
  json config = checkpoint.config().is_object() ? checkpoint.config() : json::object();
  config["quantization_config"] = quantization_config(description);
  write_json(to / "config.json", config);
  if (description.family == Family::kModelOpt) {
    write_json(to / "hf_quant_config.json", hf_quant_config(description));
  }
}

RewriteReport start_report(const RewritePlan& plan, const std::vector<Shard>& shards) {
  RewriteReport report;
  report.quantized_linears = static_cast<std::int64_t>(plan.linears().size());
  report.consumed_tensors = plan.consumed();
  for (const TensorRef& tensor : plan.model().checkpoint->tensors()) {
    report.source_bytes += tensor.info->bytes();
  }
  for (const Shard& shard : shards) {
    for (const Job& job : shard.jobs) {
      report.carried_tensors += job.carried != nullptr;
      report.written_tensors += static_cast<std::int64_t>(job.outputs.size());
      for (const PlannedTensor& tensor : job.outputs) report.output_bytes += tensor.bytes();
    }
  }
  MEGAMOE_CHECK(report.carried_tensors + report.consumed_tensors ==
                static_cast<std::int64_t>(plan.model().checkpoint->tensors().size()));
  report.notes = plan.model().notes;
  report.notes.insert(report.notes.end(), plan.notes().begin(), plan.notes().end());
  return report;
}

void write_single_file(const std::vector<Shard>& shards, const LinearFormat& format,
                       const fs::path& destination, bool overwrite, const std::string& recipe,
                       Reporter& reporter, RewriteReport& report) {
  std::error_code ignored;
  const fs::file_status there = fs::status(destination, ignored);
  if (fs::exists(there) && !overwrite) {
    remove_stale_journal(destination);
    fail(ErrorCode::kInvalidArgument, "{} exists already; it is replaced only if overwriting is asked for",
         destination.string());
  }
  if (fs::exists(there) && !fs::is_regular_file(there)) {
    fail(ErrorCode::kInvalidArgument, "{} is no regular file, so it is not replaced by one",
         destination.string());
  }
  write_shard(shards.front(), destination, format, recipe, reporter, report);
  report.notes.push_back("a single file has no config that says how it is quantised");
}

void write_directory(const RewritePlan& plan, const std::vector<Shard>& shards,
                     const QuantDescription& description, const fs::path& destination, bool overwrite,
                     const std::string& recipe, Reporter& reporter, RewriteReport& report) {
  const Checkpoint& checkpoint = *plan.model().checkpoint;
  StagedOutput output(destination, overwrite, recipe);
  write_or_discard(
      output, [&] { write_shards(shards, output.directory(), plan.format(), recipe, reporter, report); });
  if (checkpoint.has_index() || checkpoint.files().size() > 1) {
    write_index(shards, report.output_bytes, output.directory());
  }
  write_configs(checkpoint, description, output.directory());
  if (fs::is_directory(checkpoint.path())) {
    const auto notes = copy_other_files(checkpoint, output.directory());
    report.notes.insert(report.notes.end(), notes.begin(), notes.end());
  }
  output.commit();
}

}  // namespace

void check_destination(const fs::path& destination, const std::vector<fs::path>& sources) {
  if (destination.empty()) fail(ErrorCode::kInvalidArgument, "the destination has no name");
  const fs::path name = renameable(destination);
  for (const fs::path& place : {name, partial_of(name)}) {
    for (const fs::path& source : sources) {
      if (!lies_in(source, place)) continue;
      if (lies_in(place, source)) {
        fail(ErrorCode::kInvalidArgument, "{} is the source itself", place.string());
      }
      fail(ErrorCode::kInvalidArgument, "{} holds the source {}, which would be lost with it", place.string(),
           source.string());
    }
  }
}

RewriteReport rewrite_checkpoint(const RewritePlan& plan, ActivationScales activations,
                                 const fs::path& destination, bool overwrite, json recipe,
                                 const ProgressFn& progress) {
  const auto start = std::chrono::steady_clock::now();
  const Checkpoint& checkpoint = *plan.model().checkpoint;
  std::error_code error;
  check_destination(destination, checkpoint.sources());
  const bool single = destination.extension() == ".safetensors";
  if (single && fs::is_directory(checkpoint.path(), error)) {
    fail(ErrorCode::kInvalidArgument, "{} is a directory, so the destination must be one, not {}",
         checkpoint.path().string(), destination.string());
  }
  const QuantDescription description = plan.describe(activations);
  const std::vector<Shard> shards = plan_shards(plan);
  recipe["version"] = kRecipeVersion;
  recipe["source"] = source_identity(checkpoint);
  // Names of files need not be UTF-8.
  const std::string recipe_text = recipe.dump(-1, ' ', false, json::error_handler_t::replace);

  RewriteReport report = start_report(plan, shards);
  Reporter reporter(shards, progress);
  if (single) {
    write_single_file(shards, plan.format(), renameable(destination), overwrite, recipe_text, reporter,
                      report);
  } else {
    write_directory(plan, shards, description, destination, overwrite, recipe_text, reporter, report);
  }
  if (report.resumed_tensors > 0) {
    report.notes.push_back(fmt::format(
        "continued an interrupted run: {} of {} tensors were there, the counts of blocks leave them out",
        report.resumed_tensors, report.written_tensors));
  }
  report.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  return report;
}

}  // namespace megamoe
