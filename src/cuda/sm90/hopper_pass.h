// hopper_pass.h: the whole layer on one stream of a Hopper GPU.
#pragma once

#include "backend/pass.h"
#include "cuda/host_pass.h"
#include "cuda/sm90/hopper_layer.h"

namespace megamoe::sm90 {

class HopperPass final : public DevicePass {
 public:
  // `layer` outlives the pass, and has been prepared for its activations.
  HopperPass(const HopperLayer& layer, const PassOptions& options);

  std::int64_t workspace_bytes(std::int64_t tokens) const override;
  void enqueue(const DeviceCall& call) const override;
  std::int64_t run_from_host(MatrixView<const bf16> x, MatrixView<const std::int32_t> ids,
                             MatrixView<const float> weights, MatrixView<bf16> y) const override;

 private:
  struct Buffers;
  Buffers lay_out(std::int64_t tokens, std::byte* base) const;
  void sort(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const;
  void look_at_x(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const;
  void quantize_x(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const;
  void quantize_h(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const;
  void prepare_shared(const DeviceCall& call, const Buffers& b, cudaStream_t stream) const;
  void shared_expert(const ActivationRows& x, const Buffers& b, cudaStream_t stream) const;
  cuda::CombineParams combine_params(const DeviceCall& call, const Buffers& b) const;

  const HopperLayer& layer_;
  PassOptions options_;
  cuda::DeviceArray<float> x_scales_, h_scales_;  // options_.x_scales and h_scales
  mutable cuda::HostPass host_;                   // locks itself
};

}  // namespace megamoe::sm90
