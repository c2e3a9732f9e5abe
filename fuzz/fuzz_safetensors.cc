// fuzz_safetensors.cc: any bytes as a safetensors file; what is accepted must lie inside the file, without
// gap.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "checkpoint/safetensors.h"
#include "fuzz_target.h"

namespace {

using namespace megamoe;
using fuzz::require;

void parse(std::span<const std::byte> file) {
  const std::int64_t file_bytes = std::ssize(file);
  const SafetensorsHeader header = parse_safetensors_header(file, file_bytes, "input");
  std::set<std::string> names;
  std::int64_t place = header.tensors.empty() ? file_bytes : header.tensors.front().begin;
  require(8 <= place);
  for (const TensorInfo& tensor : header.tensors) {
    require(tensor.begin == place && tensor.begin <= tensor.end);
    require(tensor.elements() * bits_of(tensor.dtype) == 8 * tensor.bytes());
    require(names.insert(tensor.name).second);
    place = tensor.end;
  }
  require(place == file_bytes);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::span<const std::byte> file = std::as_bytes(std::span(data, size));
  fuzz::expect_success_or_invalid_file([&] { parse(file); });

  // Few mutations keep the length field right, so the same input is also tried with a field that ends the
  // header behind the last brace.
  std::vector<std::byte> mended(file.begin(), file.end());
  const auto brace = std::find(mended.rbegin(), mended.rend(), std::byte{'}'});
  const std::ptrdiff_t header_bytes = mended.rend() - brace - 8;
  if (header_bytes <= 0) return 0;
  for (int i = 0; i < 8; ++i)
    mended[static_cast<std::size_t>(i)] = static_cast<std::byte>(header_bytes >> (8 * i));
  fuzz::expect_success_or_invalid_file([&] { parse(mended); });
  return 0;
}
