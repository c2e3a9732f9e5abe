#include "megamoe/types.h"

#include <algorithm>
#include <array>
#include <utility>

namespace megamoe {
namespace {

struct DTypeRow {
  std::string_view name;
  int bits;
};

// In the order of the enumeration.
constexpr std::array<DTypeRow, 20> kDTypes = {{
    {"BOOL", 8},    {"U8", 8},   {"I8", 8},    {"U16", 16},    {"I16", 16},    {"U32", 32},    {"I32", 32},
    {"U64", 64},    {"I64", 64}, {"F4", 4},    {"F6_E2M3", 6}, {"F6_E3M2", 6}, {"F8_E4M3", 8}, {"F8_E5M2", 8},
    {"F8_E8M0", 8}, {"F16", 16}, {"BF16", 16}, {"F32", 32},    {"F64", 64},    {"C64", 64},
}};
static_assert(static_cast<std::size_t>(DType::kC64) + 1 == kDTypes.size());

}  // namespace

int bits_of(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].bits; }
std::string_view to_string(DType dtype) { return kDTypes[static_cast<std::size_t>(dtype)].name; }

std::optional<DType> parse_dtype(std::string_view name) {
  const auto row =
      std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeRow& r) { return r.name == name; });
  if (row == kDTypes.end()) return std::nullopt;
  return static_cast<DType>(row - kDTypes.begin());
}

std::optional<std::int64_t> bytes_of(DType dtype, std::span<const std::int64_t> shape) {
  // Zeros are left out at first, so that any product of some dimensions fits as well.
  std::int64_t bits = bits_of(dtype);
  bool empty = false;
  for (const std::int64_t size : shape) {
    if (size < 0 || __builtin_mul_overflow(bits, std::max<std::int64_t>(size, 1), &bits)) return std::nullopt;
    empty = empty || size == 0;
  }
  if (empty) return 0;
  if (bits % 8 != 0) return std::nullopt;
  return bits / 8;
}

}  // namespace megamoe
