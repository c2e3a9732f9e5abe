// heatmap.h: the page of `megamoe verify --html`: experts by layers, coloured by SNR.
#pragma once

#include <string>

#include "engine/verify.h"

namespace megamoe::cli {

// A page that needs nothing beside itself: markup, style and drawing inline, no script.
std::string verification_page(const Verification& verification, const std::string& quantized,
                              const std::string& source);

}  // namespace megamoe::cli
