#include "checkpoint/safetensors_writer.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <numeric>
#include <optional>
#include <set>
#include <string_view>
#include <utility>

#include <nlohmann/json.hpp>

#include "base/check.h"
#include "base/file.h"
#include "checkpoint/json.h"
#include "checkpoint/safetensors.h"

namespace megamoe {
namespace {

namespace fs = std::filesystem;

constexpr std::int64_t kAlignment = 8;
constexpr std::string_view kJournalTitle = "megamoe journal 1, recipe ";

void flush(const FileDescriptor& file, const fs::path& path) {
  if (::fdatasync(file.get()) != 0) fail_errno("flush", path);
}

fs::path journal_of(const fs::path& path) { return path.string() + ".journal"; }

// FNV-1a, 64 bits: tells recipes apart, not adversaries.
std::uint64_t hash(std::string_view text, std::uint64_t state = 0xCBF29CE484222325u) {
  for (const char c : text) state = (state ^ static_cast<unsigned char>(c)) * 0x100000001B3u;
  return state;
}

std::string quote(const std::string& text) {
  try {
    return nlohmann::json(text).dump();
  } catch (const nlohmann::json::exception&) {
    fail(ErrorCode::kInvalidArgument, "expected a name or metadata in UTF-8, got \"{}\"", printable(text));
  }
}

void check_plan(const std::vector<PlannedTensor>& plan) {
  std::set<std::string_view> names;
  for (const PlannedTensor& tensor : plan) {
    if (tensor.name == kMetadataKey || !names.insert(tensor.name).second) {
      fail(ErrorCode::kInvalidArgument, "the plan of a safetensors file {} \"{}\"",
           tensor.name == kMetadataKey ? "cannot have a tensor" : "names twice the tensor",
           printable(tensor.name));
    }
  }
}

// Where each tensor of the plan goes, from the start of the data; `total` is the size of the data.
struct Placement {
  std::vector<std::size_t> order;  // of the tensors in the file
  std::vector<std::int64_t> offsets;
  std::int64_t total = 0;
};
Placement place(const std::vector<PlannedTensor>& plan) {
  Placement result{std::vector<std::size_t>(plan.size()), std::vector<std::int64_t>(plan.size()), 0};
  std::iota(result.order.begin(), result.order.end(), std::size_t{0});
  const auto element_bytes = [&](std::size_t i) { return std::max(bits_of(plan[i].dtype) / 8, 1); };
  std::stable_sort(result.order.begin(), result.order.end(),
                   [&](std::size_t a, std::size_t b) { return element_bytes(a) > element_bytes(b); });
  for (const std::size_t i : result.order) {
    result.offsets[i] = result.total;
    result.total = checked_add(result.total, plan[i].bytes());
  }
  return result;
}

// The length field and the header.
std::string file_start(const std::vector<PlannedTensor>& plan, const Placement& placement,
                       const std::map<std::string, std::string>& metadata) {
  std::string header = "{";
  if (!metadata.empty()) {
    header += quote(std::string(kMetadataKey)) + ":{";
    for (const auto& [key, value] : metadata) header += quote(key) + ":" + quote(value) + ",";
    header.back() = '}';
    header += ',';
  }
  for (std::size_t i = 0; i < plan.size(); ++i) {
    const std::int64_t begin = placement.offsets[i];
    header +=
        fmt::format(R"({}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}},)", quote(plan[i].name),
                    to_string(plan[i].dtype), fmt::join(plan[i].shape, ","), begin, begin + plan[i].bytes());
  }
  if (header.back() == ',') header.pop_back();
  header += '}';
  while (header.size() % kAlignment != 0) header += ' ';
  if (header.size() > static_cast<std::size_t>(kMaxHeaderBytes)) {
    fail(ErrorCode::kInvalidArgument, "the header would have {} bytes, expected at most {}", header.size(),
         kMaxHeaderBytes);
  }
  std::string start;
  for (int i = 0; i < 8; ++i) start += static_cast<char>(header.size() >> (8 * i) & 0xFF);
  return start + header;
}

// Opens or creates `path`, alone: a second writer is refused, also one in this process.
FileDescriptor open_alone(const fs::path& path) {
  for (;;) {
    FileDescriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666));
    if (file.get() < 0) fail_errno("create", path);
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0) {
      if (errno == EWOULDBLOCK) fail(ErrorCode::kIo, "another writer is at work on {}", path.string());
      fail_errno("lock", path);
    }
    // Between open and lock another writer may have finished and renamed this very file.
    struct stat held, named;
    if (::fstat(file.get(), &held) != 0) fail_errno("examine", path);
    if (::stat(path.c_str(), &named) == 0 && held.st_dev == named.st_dev && held.st_ino == named.st_ino) {
      return file;
    }
  }
}

}  // namespace

std::int64_t PlannedTensor::bytes() const {
  const std::optional<std::int64_t> bytes = bytes_of(dtype, shape);
  if (!bytes) {
    fail(ErrorCode::kInvalidArgument,
         "\"{}\" ({} [{}]): the size is not a whole number of bytes that fits in 64 bits", printable(name),
         to_string(dtype), fmt::join(shape, ", "));
  }
  return *bytes;
}

struct SafetensorsWriter::State {
  fs::path path, partial_path, journal_path;
  std::vector<PlannedTensor> plan;
  std::vector<std::int64_t> offsets;  // from the start of the file
  std::string start;                  // the length field and the header
  std::string journal_title;          // the journal's first line
  std::int64_t total = 0;             // bytes of the file
  std::int64_t flush_bytes = 0;
  FileDescriptor partial, journal;
  std::int64_t journal_bytes = 0;
  std::int64_t completed = 0;
  std::int64_t journaled = 0;  // of those, how many the journal knows of
  std::int64_t unflushed = 0;  // bytes
  bool finished = false;

  bool resume();
  void start_anew();
  void bring_up_to_date();
  void append_to_journal(std::string_view line);
};

// Takes over what an earlier run has left, if it is of the same plan and recipe.
bool SafetensorsWriter::State::resume() {
  std::error_code ignored;
  if (!fs::is_regular_file(journal_path, ignored)) return false;
  const std::string text = read_text_file(journal_path);
  if (!text.starts_with(journal_title)) return false;
  std::size_t good = journal_title.size();
  std::int64_t count = 0;
  for (std::size_t end; (end = text.find('\n', good)) != std::string::npos; good = end + 1) {
    std::int64_t number = 0;
    for (const char c : std::string_view(text).substr(good, end - good)) {
      if (c < '0' || c > '9' || number > std::ssize(plan)) return false;
      number = number * 10 + (c - '0');
    }
    if (number < count || number > std::ssize(plan)) return false;
    count = number;
  }

  struct stat status;
  if (::fstat(partial.get(), &status) != 0 || status.st_size != total) return false;
  std::string found(start.size(), '\0');
  if (::pread(partial.get(), found.data(), found.size(), 0) != std::ssize(found) || found != start)
    return false;

  journal = FileDescriptor(::open(journal_path.c_str(), O_WRONLY | O_CLOEXEC | O_NOFOLLOW));
  // A line that was cut off must not become the beginning of the next one.
  if (journal.get() < 0 || ::ftruncate(journal.get(), static_cast<off_t>(good)) != 0) {
    fail_errno("write", journal_path);
  }
  journal_bytes = static_cast<std::int64_t>(good);
  completed = journaled = count;
  return true;
}

// Nothing of the old journal may be left when the data changes, and the new one comes last.
void SafetensorsWriter::State::start_anew() {
  if (::unlink(journal_path.c_str()) != 0 && errno != ENOENT) fail_errno("remove", journal_path);
  sync_directory_of(journal_path);
  if (::ftruncate(partial.get(), 0) != 0) fail_errno("truncate", partial_path);
  // Asks for the whole room at once: better to fail now than after hours.
  if (::fallocate(partial.get(), 0, 0, total) != 0) {
    if (errno != EOPNOTSUPP) {
      fail(ErrorCode::kIo, "cannot reserve {} bytes for {}: {}", total, partial_path.string(),
           std::strerror(errno));
    }
    if (::ftruncate(partial.get(), total) != 0) fail_errno("extend", partial_path);
  }
  write_at(partial, partial_path, std::as_bytes(std::span(start)), 0);
  flush(partial, partial_path);
  journal = FileDescriptor(
      ::open(journal_path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC | O_NOFOLLOW, 0666));
  if (journal.get() < 0) fail_errno("create", journal_path);
  append_to_journal(journal_title);
  sync_directory_of(journal_path);
}

void SafetensorsWriter::State::append_to_journal(std::string_view line) {
  write_at(journal, journal_path, std::as_bytes(std::span(line)), journal_bytes);
  journal_bytes += std::ssize(line);
  flush(journal, journal_path);
}

void SafetensorsWriter::State::bring_up_to_date() {
  if (journaled == completed) return;
  flush(partial, partial_path);
  append_to_journal(fmt::format("{}\n", completed));
  journaled = completed;
  unflushed = 0;
}

SafetensorsWriter::SafetensorsWriter(const fs::path& path, std::vector<PlannedTensor> plan,
                                     const std::map<std::string, std::string>& metadata,
                                     const std::string& recipe, std::int64_t flush_bytes)
    : state_(std::make_unique<State>()) {
  State& s = *state_;
  check_plan(plan);
  Placement placement = place(plan);
  s.start = file_start(plan, placement, metadata);
  s.total = checked_add(placement.total, std::ssize(s.start));
  s.offsets = std::move(placement.offsets);
  for (std::int64_t& offset : s.offsets) offset += std::ssize(s.start);
  s.plan = std::move(plan);
  s.path = path;
  s.partial_path = partial_of(path);
  s.journal_path = journal_of(path);
  s.journal_title = fmt::format("{}{:016x}\n", kJournalTitle, hash(recipe, hash(s.start)));
  s.flush_bytes = flush_bytes;
  s.partial = open_alone(s.partial_path);
  if (s.resume()) return;
  try {
    s.start_anew();
  } catch (...) {
    discard();
    throw;
  }
}

SafetensorsWriter::SafetensorsWriter(SafetensorsWriter&&) noexcept = default;

SafetensorsWriter::~SafetensorsWriter() {
  if (!state_ || state_->finished) return;
  try {
    state_->bring_up_to_date();
  } catch (const Error&) {
    // The next run then repeats the tensors since the last flush.
  }
}

std::int64_t SafetensorsWriter::completed() const { return state_->completed; }

void SafetensorsWriter::write(std::span<const std::byte> data) {
  State& s = *state_;
  if (s.completed == std::ssize(s.plan)) {
    fail(ErrorCode::kInvalidArgument, "{}: all {} tensors of the plan are already written", s.path.string(),
         s.plan.size());
  }
  const auto next = static_cast<std::size_t>(s.completed);
  const PlannedTensor& tensor = s.plan[next];
  if (std::ssize(data) != tensor.bytes()) {
    fail(ErrorCode::kInvalidArgument, "{}: \"{}\": expected {} bytes, got {}", s.path.string(),
         printable(tensor.name), tensor.bytes(), data.size());
  }
  write_at(s.partial, s.partial_path, data, s.offsets[next]);
  ++s.completed;
  s.unflushed += std::ssize(data);
  if (s.unflushed >= s.flush_bytes) s.bring_up_to_date();
}

void SafetensorsWriter::finish() {
  State& s = *state_;
  if (s.finished) fail(ErrorCode::kInvalidArgument, "{} is already finished", s.path.string());
  if (s.completed != std::ssize(s.plan)) {
    fail(ErrorCode::kInvalidArgument, "{}: {} of {} tensors are written, the next is \"{}\"", s.path.string(),
         s.completed, s.plan.size(), printable(s.plan[static_cast<std::size_t>(s.completed)].name));
  }
  s.bring_up_to_date();
  if (::fsync(s.partial.get()) != 0) fail_errno("flush", s.partial_path);
  if (::rename(s.partial_path.c_str(), s.path.c_str()) != 0) fail_errno("rename to", s.path);
  s.finished = true;
  sync_directory_of(s.path);
  if (::unlink(s.journal_path.c_str()) != 0 && errno != ENOENT) fail_errno("remove", s.journal_path);
}

void SafetensorsWriter::discard() {
  if (!state_->finished) {
    ::unlink(state_->journal_path.c_str());
    ::unlink(state_->partial_path.c_str());
  }
  state_.reset();
}

void write_safetensors(const fs::path& path, const std::vector<PlannedTensor>& plan,
                       const std::vector<std::span<const std::byte>>& data) {
  check_plan(plan);
  const Placement placement = place(plan);
  const std::string start = file_start(plan, placement, {});
  std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(start))};
  for (const std::size_t i : placement.order) {
    MEGAMOE_CHECK(std::ssize(data.at(i)) == plan[i].bytes());
    pieces.push_back(data[i]);
  }
  write_file_atomically(path, pieces);
}

void remove_stale_journal(const fs::path& path) {
  const fs::path journal = journal_of(path);
  std::error_code ignored;
  // A journal beside a partial file belongs to that.
  if (!fs::is_regular_file(journal, ignored) || fs::exists(partial_of(path), ignored)) return;
  if (!read_text_file(journal).starts_with(kJournalTitle)) return;
  if (::unlink(journal.c_str()) != 0 && errno != ENOENT) fail_errno("remove", journal);
}

}  // namespace megamoe
