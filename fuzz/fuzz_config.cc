// fuzz_config.cc: any text as a configuration file.
#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string_view>

#include "checkpoint/json.h"
#include "fuzz_target.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace megamoe;
  fuzz::expect_success_or_invalid_file([&] {
    const nlohmann::json config = parse_json({reinterpret_cast<const char*>(data), size}, "config.json");
    fuzz::require(parse_json(config.dump(), "config.json") == config);
  });
  return 0;
}
