#include "engine/recorded.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "base/check.h"
#include "checkpoint/tensor_names.h"
#include "numerics/bf16.h"
#include "numerics/fp16.h"

namespace megamoe {
namespace {

template <class T>
T load(const std::byte* data, std::int64_t i) {
  T value;
  std::memcpy(&value, data + i * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
  return value;
}

// One tensor of the file, [tokens, cols] (cols 0: [tokens]), of which the first `tokens` are wanted.
class Reader {
 public:
  Reader(const SafetensorsFile& file, const TensorInfo& tensor, std::int64_t cols)
      : tensor_(tensor), file_(file), data_(file.bytes(tensor).data()), cols_(cols) {
    const std::size_t rank = cols > 0 ? 2 : 1;
    if (tensor.shape.size() != rank || (cols > 0 && tensor.shape[1] != cols)) {
      refuse(cols > 0 ? fmt::format("shape [tokens, {}]", cols) : std::string("shape [tokens]"));
    }
  }
  std::int64_t tokens() const { return tensor_.shape[0]; }
  void check_tokens(std::int64_t expected) const {
    if (tokens() != expected) refuse(fmt::format("{} tokens, as many as the input has,", expected));
  }

  std::vector<float> floats(std::int64_t tokens) const {
    std::vector<float> out(static_cast<std::size_t>(tokens * std::max<std::int64_t>(cols_, 1)));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      switch (tensor_.dtype) {
        case DType::kF32: out[i] = load<float>(data_, at); break;
        case DType::kF16: out[i] = to_float(load<fp16>(data_, at)); break;
        case DType::kBF16: out[i] = to_float(load<bf16>(data_, at)); break;
        default: refuse("BF16, F16 or F32");
      }
    }
    return out;
  }

  std::vector<std::int32_t> integers(std::int64_t tokens) const {
    std::vector<std::int32_t> out(static_cast<std::size_t>(tokens * std::max<std::int64_t>(cols_, 1)));
    for (std::size_t i = 0; i < out.size(); ++i) {
      const auto at = static_cast<std::int64_t>(i);
      if (tensor_.dtype == DType::kI32) {
        out[i] = load<std::int32_t>(data_, at);
      } else if (tensor_.dtype == DType::kI64) {
        const auto value = load<std::int64_t>(data_, at);
        out[i] = static_cast<std::int32_t>(value);
        if (out[i] != value) {
          const std::int64_t slots = std::max<std::int64_t>(cols_, 1);
          fail(ErrorCode::kInvalidFile, "{}: expected ids of 32 bits in {}, got {} for token {}{}",
               file_.path().string(), tensor_.name, value, at / slots,
               cols_ > 0 ? fmt::format(", slot {}", at % slots) : "");
        }
      } else {
        refuse("I32 or I64");
      }
    }
    return out;
  }

 private:
  [[noreturn]] void refuse(const std::string& expected) const {
    fail(ErrorCode::kInvalidFile, "{}: expected {} for {}, got {}", file_.path().string(), expected,
         tensor_.name, describe(tensor_));
  }

  const TensorInfo& tensor_;
  const SafetensorsFile& file_;
  const std::byte* data_;
  std::int64_t cols_;
};

}  // namespace

std::vector<int> RecordedActivations::layers() const {
  std::vector<int> out;
  for (const TensorInfo& tensor : file_.tensors()) {
    std::string_view name = tensor.name;
    if (name.starts_with("model.")) name.remove_prefix(6);
    if (!name.starts_with("layers.") || !name.ends_with(".mlp.input")) continue;
    name.remove_prefix(7);
    name.remove_suffix(10);
    if (const auto layer = parse_number(name)) out.push_back(static_cast<int>(*layer));
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

const TensorInfo* RecordedActivations::find(const std::string& given, int layer,
                                            const std::string& usual) const {
  const std::string name = given.empty() ? fmt::format("layers.{}.mlp.{}", layer, usual) : given;
  const TensorInfo* found = nullptr;
  for (const TensorInfo& tensor : file_.tensors()) {
    if (tensor.name != name && !(given.empty() && tensor.name == "model." + name)) continue;
    if (found != nullptr) {
      fail(ErrorCode::kInvalidFile, "{}: expected one of {} and {}, got both", file_.path().string(),
           found->name, tensor.name);
    }
    found = &tensor;
  }
  if (found == nullptr && !given.empty())
    fail(ErrorCode::kNotFound, "{} has no tensor {}", file_.path().string(), given);
  return found;
}

RecordedLayer RecordedActivations::read(int layer, const LayerConfig& config, std::int64_t max_tokens,
                                        const RecordedNames& names) const {
  RecordedLayer out;
  const TensorInfo* input = find(names.input, layer, "input");
  if (input == nullptr) {
    fail(ErrorCode::kNotFound, "{} has no input of layer {}; expected a tensor layers.{}.mlp.input",
         file_.path().string(), layer, layer);
  }
  const Reader x(file_, *input, config.hidden);
  out.tokens = std::min(x.tokens(), max_tokens);
  const std::vector<float> values = x.floats(out.tokens);
  out.x.reserve(values.size());
  for (const float value : values) {
    out.x.push_back(to_bf16(value));
    out.rounded_inputs += !is_nan(value) && to_float(out.x.back()) != value;
  }
  // Each of the others, where it is there, has as many tokens as the input.
  const auto floats = [&](const std::string& given, const char* usual, std::int64_t cols) {
    const TensorInfo* tensor = find(given, layer, usual);
    if (tensor == nullptr) return std::vector<float>();
    const Reader reader(file_, *tensor, cols);
    reader.check_tokens(x.tokens());
    return reader.floats(out.tokens);
  };
  const auto integers = [&](const std::string& given, const char* usual, std::int64_t cols) {
    const TensorInfo* tensor = find(given, layer, usual);
    if (tensor == nullptr) return std::vector<std::int32_t>();
    const Reader reader(file_, *tensor, cols);
    reader.check_tokens(x.tokens());
    return reader.integers(out.tokens);
  };
  out.router_logits = floats(names.router_logits, "router_logits", config.num_experts);
  out.output = floats(names.output, "output", config.hidden);
  out.ids = integers(names.expert_ids, "expert_ids", config.top_k);
  out.weights = floats(names.expert_weights, "expert_weights", config.top_k);
  out.token_ids = integers(names.token_ids, "token_ids", 0);
  if (out.ids.empty() != out.weights.empty()) {
    fail(ErrorCode::kInvalidFile, "{} has {} of layer {}, but no {}", file_.path().string(),
         out.ids.empty() ? "expert weights" : "expert ids", layer,
         out.ids.empty() ? "expert ids" : "expert weights");
  }
  return out;
}

std::string_view to_string(RoutingSource source) {
  switch (source) {
    case RoutingSource::kRecordedIds: return "recorded ids";
    case RoutingSource::kRecordedLogits: return "recorded logits";
    case RoutingSource::kRouter: return "router";
  }
  return "unknown";
}

RoutingSource route_recorded(const MoeLayer& layer, RecordedLayer& recorded) {
  if (!recorded.ids.empty()) return RoutingSource::kRecordedIds;
  const LayerConfig& config = layer.config();
  const std::int64_t tokens = recorded.tokens;
  const bool have_logits = !recorded.router_logits.empty();
  if (!have_logits) {
    recorded.router_logits.resize(static_cast<std::size_t>(tokens * config.num_experts));
    layer.router_logits({recorded.x.data(), tokens, config.hidden},
                        {recorded.router_logits.data(), tokens, config.num_experts});
  }
  recorded.ids.resize(static_cast<std::size_t>(tokens * config.top_k));
  recorded.weights.resize(recorded.ids.size());
  layer.route({recorded.router_logits.data(), tokens, config.num_experts},
              {recorded.ids.data(), tokens, config.top_k}, {recorded.weights.data(), tokens, config.top_k},
              recorded.token_ids);
  return have_logits ? RoutingSource::kRecordedLogits : RoutingSource::kRouter;
}

}  // namespace megamoe
