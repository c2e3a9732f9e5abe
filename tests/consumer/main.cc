// main.cc: includes every public header and quantises one block.
#include <megamoe/error.h>
#include <megamoe/layer.h>
#include <megamoe/layout.h>
#include <megamoe/moe_layer.h>
#include <megamoe/progress.h>
#include <megamoe/quantize.h>
#include <megamoe/types.h>

int main() {
  const float x[16] = {6, -3, 1};
  const megamoe::QuantizeOptions options{.mode = megamoe::QuantizeOptions::TensorScale::kGiven,
                                         .tensor_scale = 1.0f};
  const megamoe::Nvfp4Tensor q = megamoe::quantize(megamoe::MatrixView<const float>(x, 1, 16), options);
  return megamoe::dequantize(q)[0] == 6.0f && !megamoe::list_backends().empty() ? 0 : 1;
}
