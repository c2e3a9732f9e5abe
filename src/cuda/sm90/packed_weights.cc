#include "cuda/sm90/packed_weights.h"

#include <algorithm>
#include <cstring>

#include "base/check.h"
#include "base/parallel.h"
#include "cuda/sm90/pack.h"

namespace megamoe::sm90 {
namespace {

constexpr std::int64_t kStagingBytes = 32 << 20;  // of each buffer, more only where an expert has more
constexpr std::int64_t kPieces = 16;              // of a matrix, copied by different threads

struct StagingBuffer {
  explicit StagingBuffer(std::int64_t bytes) : host(bytes), device(bytes) {}

  std::byte* on_device() const { return static_cast<std::byte*>(device.data()); }

  cuda::PinnedBuffer host;
  cuda::DeviceBuffer device;
  cuda::Event packed;  // after what it held last
};

// Piece `piece` of `bytes` bytes.
void copy_piece(std::byte* to, const std::uint8_t* from, std::int64_t bytes, std::int64_t piece) {
  const std::int64_t begin = bytes * piece / kPieces, end = bytes * (piece + 1) / kPieces;
  std::memcpy(to + begin, from + begin, static_cast<std::size_t>(end - begin));
}

}  // namespace

PackedWeights load_weights(OperandType type, WeightRole role,
                           const std::vector<const WeightMatrix*>& matrices) {
  const std::int64_t per_expert = role == WeightRole::kGateUp ? 2 : 1;
  const std::int64_t experts = static_cast<std::int64_t>(matrices.size()) / per_expert;
  const std::int64_t rows = matrices[0]->rows, cols = matrices[0]->cols;
  const std::int64_t code_bytes = rows * cols / 2, matrix_bytes = code_bytes + rows * cols / 16;
  const std::int64_t packed_expert = packed_bytes(type, role, rows, cols);
  PackedWeights result;
  result.packed = cuda::DeviceArray<std::uint8_t>(checked_mul(experts, packed_expert));
  std::vector<float> scales;
  for (const WeightMatrix* matrix : matrices) scales.push_back(matrix->tensor_scale);
  result.scales = cuda::DeviceArray<float>(scales);

  // A buffer holds the table that the packing kernel reads, then codes and scales of matrix after matrix.
  constexpr std::int64_t kEntry = sizeof(RawWeights);
  const std::int64_t batch =
      std::clamp<std::int64_t>(kStagingBytes / (per_expert * matrix_bytes + kEntry), 1, experts);
  const std::int64_t table_bytes = batch * kEntry;
  const StagingBuffer buffers[2] = {StagingBuffer(table_bytes + batch * per_expert * matrix_bytes),
                                    StagingBuffer(table_bytes + batch * per_expert * matrix_bytes)};
  const cuda::Stream stream;
  for (std::int64_t first = 0, turn = 0; first < experts; first += batch, ++turn) {
    const StagingBuffer& buffer = buffers[turn % 2];
    const std::int64_t count = std::min(batch, experts - first);
    const auto place = [&](std::int64_t matrix) { return table_bytes + matrix * matrix_bytes; };
    buffer.packed.synchronize();
    for (std::int64_t e = 0; e < count; ++e) {
      RawWeights entry{{nullptr, nullptr}, {nullptr, nullptr}, rows, cols};
      for (std::int64_t m = 0; m < per_expert; ++m) {
        const auto* at =
            reinterpret_cast<const std::uint8_t*>(buffer.on_device() + place(e * per_expert + m));
        entry.codes[m] = at;
        entry.scales[m] = at + code_bytes;
      }
      std::memcpy(buffer.host.data() + e * kEntry, &entry, sizeof(entry));
    }
    parallel_for(count * per_expert * kPieces, 1, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t i = begin; i < end; ++i) {
        const std::int64_t m = i / kPieces;
        const WeightMatrix& matrix = *matrices[static_cast<std::size_t>(first * per_expert + m)];
        copy_piece(buffer.host.data() + place(m), matrix.codes, code_bytes, i % kPieces);
        copy_piece(buffer.host.data() + place(m) + code_bytes, matrix.scales, matrix_bytes - code_bytes,
                   i % kPieces);
      }
    });
    cuda::cuda_check(cudaMemcpyAsync(buffer.device.data(), buffer.host.data(),
                                     static_cast<std::size_t>(place(count * per_expert)),
                                     cudaMemcpyHostToDevice, stream.get()),
                     "copying weights to the GPU");
    cuda::cuda_check(
        pack_layer(type, role, static_cast<const RawWeights*>(buffer.device.data()), static_cast<int>(count),
                   rows, cols, result.packed.data() + first * packed_expert, stream.get()),
        "packing weights");
    buffer.packed.record(stream.get());
  }
  stream.synchronize();
  return result;
}

cuda::DeviceArray<float> load_bias(const std::vector<ExpertWeights>& experts,
                                   const float* ExpertWeights::*bias, std::int64_t rows) {
  if (experts[0].*bias == nullptr) return {};
  std::vector<float> all;
  all.reserve(experts.size() * static_cast<std::size_t>(rows));
  for (const ExpertWeights& expert : experts) all.insert(all.end(), expert.*bias, expert.*bias + rows);
  return cuda::DeviceArray<float>(all);
}

}  // namespace megamoe::sm90
