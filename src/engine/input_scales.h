// input_scales.h: the file of static activation scales that `calibrate` writes and `quantize` reads.
//
// JSON      {"format": "megamoe-input-scales", "version": 1,
//            "layers": {"0": [{"rows": 12, "x": {"amax": 3.5, "scale": 0.0013}, "h": {...}}, ...], ...}}
//           One entry per expert, in order; `scale` is the NVFP4 tensor scale (the multiplier), `amax` what
//           it was made from. An expert that saw no token has rows 0 and still carries a usable scale.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace megamoe {

struct InputScale {
  float amax = 0.0f;   // the largest magnitude seen
  float scale = 0.0f;  // finite, greater than 0
};

struct ExpertInputScales {
  std::int64_t rows = 0;  // routed rows that were seen
  InputScale x;           // what meets gate and up
  InputScale h;           // what meets down
};

struct InputScales {
  std::map<int, std::vector<ExpertInputScales>> layers;  // by the layer's number; [E] each

  // Throws kInvalidArgument that names what is missing.
  const ExpertInputScales& at(int layer, std::int64_t expert) const;
};

// The file's content; numbers survive a round trip bit for bit.
std::string format_input_scales(const InputScales& scales);
// `name` is the file, for messages. Throws kInvalidFile that names layer, expert and field.
InputScales parse_input_scales(const std::string& text, const std::string& name);

InputScales read_input_scales(const std::filesystem::path& path);
void write_input_scales(const std::filesystem::path& path, const InputScales& scales);

}  // namespace megamoe
