#include "checkpoint/safetensors.h"

#include <algorithm>
#include <bit>
#include <limits>
#include <numeric>
#include <optional>
#include <string_view>
#include <utility>

#include "base/check.h"
#include "checkpoint/json.h"

namespace megamoe {
namespace {

static_assert(std::endian::native == std::endian::little, "tensors are read as they lie in the file");

constexpr std::int64_t kLengthBytes = 8;

// Takes the header apart while it is being parsed: nothing is stored but tensors and metadata, so memory is
// bounded by the header's own size, and whatever does not belong is refused where it stands.
class HeaderReader final : public JsonEvents {
 public:
  using JsonEvents::JsonEvents;
  SafetensorsHeader take() { return std::move(header_); }

 private:
  enum class Place { kStart, kTop, kEntry, kTensor, kMetadata, kField, kShape, kOffsets, kMetadataValue };

  [[noreturn]] void refuse(std::string_view expected) const {
    if (place_ == Place::kStart || place_ == Place::kTop) {
      fail(ErrorCode::kInvalidFile, "{}: expected the header to be {}", name(), expected);
    }
    fail(ErrorCode::kInvalidFile, "{}: \"{}\": expected {}", name(), printable(entry_), expected);
  }
  // What a value that has come in the wrong place should have been.
  [[noreturn]] void refuse_value() const {
    switch (place_) {
      case Place::kEntry:
        refuse(entry_ == kMetadataKey ? "an object of strings"
                                      : "an object of dtype, shape and data_offsets");
      case Place::kField: refuse(field_ == "dtype" ? "dtype to be a string" : field_ + " to be an array");
      case Place::kShape: refuse("shape to hold whole numbers from 0 to 2^63 - 1");
      case Place::kOffsets: refuse("data_offsets to hold two whole numbers from 0 to 2^63 - 1");
      case Place::kMetadataValue: refuse("an object of strings");
      default: refuse("an object");
    }
  }

  bool null() override { refuse_value(); }
  bool boolean(bool) override { refuse_value(); }
  bool number_integer(number_integer_t) override { refuse_value(); }               // negative ones only
  bool number_float(number_float_t, const string_t&) override { refuse_value(); }  // and huge ones

  bool number_unsigned(number_unsigned_t value) override {
    if (value > static_cast<number_unsigned_t>(std::numeric_limits<std::int64_t>::max())) refuse_value();
    if (place_ == Place::kShape) {
      tensor_.shape.push_back(static_cast<std::int64_t>(value));
    } else if (place_ == Place::kOffsets && num_offsets_ < 2) {
      (num_offsets_ == 0 ? tensor_.begin : tensor_.end) = static_cast<std::int64_t>(value);
      ++num_offsets_;
    } else {
      refuse_value();
    }
    return true;
  }

  bool string(string_t& value) override {
    if (place_ == Place::kMetadataValue) {
      if (!header_.metadata.emplace(field_, std::move(value)).second) {
        fail(ErrorCode::kInvalidFile, "{}: \"{}\": the key \"{}\" occurs twice", name(), entry_,
             printable(field_));
      }
      place_ = Place::kMetadata;
    } else if (place_ == Place::kField && field_ == "dtype") {
      const std::optional<DType> dtype = parse_dtype(value);
      if (!dtype) {
        fail(ErrorCode::kInvalidFile, "{}: \"{}\": the dtype \"{}\" is unknown", name(), printable(entry_),
             printable(value));
      }
      tensor_.dtype = *dtype;
      place_ = Place::kTensor;
    } else {
      refuse_value();
    }
    return true;
  }

  bool start_object(std::size_t) override {
    if (place_ == Place::kStart) {
      place_ = Place::kTop;
    } else if (place_ == Place::kEntry && entry_ == kMetadataKey) {
      place_ = Place::kMetadata;
    } else if (place_ == Place::kEntry) {
      tensor_ = {};
      has_dtype_ = has_shape_ = has_offsets_ = false;
      num_offsets_ = 0;
      place_ = Place::kTensor;
    } else {
      refuse_value();
    }
    return true;
  }

  bool start_array(std::size_t) override {
    if (place_ == Place::kField && field_ == "shape") {
      place_ = Place::kShape;
    } else if (place_ == Place::kField && field_ == "data_offsets") {
      place_ = Place::kOffsets;
    } else {
      refuse_value();
    }
    return true;
  }

  bool end_array() override {
    if (place_ == Place::kOffsets && num_offsets_ != 2) refuse_value();
    place_ = Place::kTensor;
    return true;
  }

  bool key(string_t& key) override {
    if (place_ == Place::kTop) {
      entry_ = std::move(key);
      if (entry_ == kMetadataKey && std::exchange(has_metadata_, true)) {
        fail(ErrorCode::kInvalidFile, "{}: the key \"{}\" occurs twice", name(), entry_);
      }
      place_ = Place::kEntry;
    } else if (place_ == Place::kMetadata) {
      field_ = std::move(key);
      place_ = Place::kMetadataValue;
    } else {
      field_ = std::move(key);
      bool* seen = field_ == "dtype"          ? &has_dtype_
                   : field_ == "shape"        ? &has_shape_
                   : field_ == "data_offsets" ? &has_offsets_
                                              : nullptr;
      if (seen == nullptr || std::exchange(*seen, true)) {
        fail(ErrorCode::kInvalidFile, "{}: \"{}\": the key \"{}\" {}", name(), printable(entry_),
             printable(field_), seen == nullptr ? "is unknown" : "occurs twice");
      }
      place_ = Place::kField;
    }
    return true;
  }

  bool end_object() override {
    if (place_ == Place::kTensor) {
      if (!has_dtype_ || !has_shape_ || !has_offsets_) {
        refuse(!has_dtype_ ? "a dtype" : !has_shape_ ? "a shape" : "data_offsets");
      }
      tensor_.name = entry_;
      header_.tensors.push_back(std::move(tensor_));
    }
    place_ = Place::kTop;
    return true;
  }

  SafetensorsHeader header_;
  Place place_ = Place::kStart;
  std::string entry_;  // the key at the top: a tensor's name or "__metadata__"
  std::string field_;  // the key within it
  TensorInfo tensor_;
  bool has_metadata_ = false, has_dtype_ = false, has_shape_ = false, has_offsets_ = false;
  int num_offsets_ = 0;
};

[[noreturn]] void refuse_tensor(const std::string& file, const TensorInfo& tensor, const std::string& why) {
  fail(ErrorCode::kInvalidFile, "{}: \"{}\" ({}): {}", file, printable(tensor.name), describe(tensor), why);
}

void check_size(const TensorInfo& tensor, const std::string& file) {
  if (tensor.begin > tensor.end) {
    refuse_tensor(file, tensor, fmt::format("data_offsets [{}, {}] run backwards", tensor.begin, tensor.end));
  }
  const std::optional<std::int64_t> bytes = bytes_of(tensor.dtype, tensor.shape);
  if (!bytes) refuse_tensor(file, tensor, "the size is not a whole number of bytes that fits in 64 bits");
  if (*bytes != tensor.bytes()) {
    refuse_tensor(file, tensor,
                  fmt::format("expected {} bytes of data, data_offsets [{}, {}] give {}", *bytes,
                              tensor.begin, tensor.end, tensor.bytes()));
  }
}

void check_names_differ(const std::vector<TensorInfo>& tensors, const std::string& file) {
  std::vector<std::string_view> names;
  names.reserve(tensors.size());
  for (const TensorInfo& tensor : tensors) names.push_back(tensor.name);
  std::sort(names.begin(), names.end());
  const auto twin = std::adjacent_find(names.begin(), names.end());
  if (twin != names.end()) {
    fail(ErrorCode::kInvalidFile, "{}: the tensor \"{}\" occurs twice", file, printable(*twin));
  }
}

// Tensors in file order must follow each other without gap or overlap up to the last byte of the data.
void check_coverage(const std::vector<TensorInfo>& tensors, std::int64_t data_bytes,
                    const std::string& file) {
  std::int64_t covered = 0;
  for (const TensorInfo& tensor : tensors) {
    if (tensor.begin != covered) {
      refuse_tensor(
          file, tensor,
          fmt::format("its data starts at byte {}, {} the tensor before it, which ends at byte {}",
                      tensor.begin, tensor.begin < covered ? "within" : "with a gap behind", covered));
    }
    if (tensor.end > data_bytes) {
      refuse_tensor(file, tensor,
                    fmt::format("its data ends at byte {}, but the file holds only {} bytes of data",
                                tensor.end, data_bytes));
    }
    covered = tensor.end;
  }
  if (covered != data_bytes) {
    fail(ErrorCode::kInvalidFile, "{}: expected {} bytes of data behind the header, got {}", file, covered,
         data_bytes);
  }
}

}  // namespace

std::int64_t TensorInfo::elements() const {
  return std::accumulate(shape.begin(), shape.end(), std::int64_t{1}, std::multiplies<>());
}

std::string describe(const TensorInfo& tensor) {
  std::string shape;
  for (std::size_t i = 0; i < tensor.shape.size(); ++i) {
    if (i == 8) {
      shape += fmt::format(", ... {} dimensions", tensor.shape.size());
      break;
    }
    shape += fmt::format("{}{}", i == 0 ? "" : ", ", tensor.shape[i]);
  }
  return fmt::format("{} [{}]", to_string(tensor.dtype), shape);
}

SafetensorsHeader parse_safetensors_header(std::span<const std::byte> file_start, std::int64_t file_bytes,
                                           const std::string& name) {
  if (file_bytes < kLengthBytes || std::ssize(file_start) < kLengthBytes) {
    fail(ErrorCode::kInvalidFile, "{}: expected at least {} bytes, got {}", name, kLengthBytes, file_bytes);
  }
  std::uint64_t length = 0;
  for (int i = kLengthBytes - 1; i >= 0; --i) {
    length = length << 8 | std::to_integer<std::uint64_t>(file_start[static_cast<std::size_t>(i)]);
  }
  const std::int64_t present = std::min<std::int64_t>(file_bytes, std::ssize(file_start)) - kLengthBytes;
  if (length > static_cast<std::uint64_t>(kMaxHeaderBytes)) {
    fail(ErrorCode::kInvalidFile, "{}: the header claims {} bytes, more than the limit of {}", name, length,
         kMaxHeaderBytes);
  }
  if (length > static_cast<std::uint64_t>(present)) {
    fail(ErrorCode::kInvalidFile, "{}: the header claims {} bytes, but only {} follow", name, length,
         present);
  }
  const auto header_bytes = static_cast<std::size_t>(length);

  HeaderReader reader(name);
  reader.parse({reinterpret_cast<const char*>(file_start.data()) + kLengthBytes, header_bytes});
  SafetensorsHeader header = reader.take();

  for (const TensorInfo& tensor : header.tensors) check_size(tensor, name);
  check_names_differ(header.tensors, name);
  // Empty tensors come before the one that starts where they are.
  std::stable_sort(header.tensors.begin(), header.tensors.end(),
                   [](const TensorInfo& a, const TensorInfo& b) {
                     return std::pair(a.begin, a.end) < std::pair(b.begin, b.end);
                   });
  const std::int64_t data_start = kLengthBytes + static_cast<std::int64_t>(length);
  check_coverage(header.tensors, file_bytes - data_start, name);
  for (TensorInfo& tensor : header.tensors) {
    tensor.begin += data_start;
    tensor.end += data_start;
  }
  return header;
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  SafetensorsFile file;
  file.path_ = path;
  file.file_ = std::make_shared<const MappedFile>(path);
  const std::span<const std::byte> bytes = file.file_->bytes();
  file.header_ = parse_safetensors_header(bytes, std::ssize(bytes), path.string());
  return file;
}

std::span<const std::byte> SafetensorsFile::bytes(const TensorInfo& tensor) const {
  return file_->bytes().subspan(static_cast<std::size_t>(tensor.begin),
                                static_cast<std::size_t>(tensor.bytes()));
}

}  // namespace megamoe
