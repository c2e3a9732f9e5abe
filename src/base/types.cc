#include "megamoe/types.h"

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

}  // namespace megamoe
