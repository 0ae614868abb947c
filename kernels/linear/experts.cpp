// Linear layers of a mixture of experts on the CPU: each row of x times the weight of its own expert, packed or plain.
// Rows of one expert are gathered and multiplied together, so that each weight in use is read once.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "linear.h"

namespace specstep {
namespace {

// The numbers of the rows of each of `count` experts.
std::vector<std::vector<int64_t>> rows_of_experts(const Tensor& experts, int64_t count) {
  const Tensor chosen = dense(experts);
  const auto* expert = static_cast<const int64_t*>(chosen.data_ptr());
  std::vector<std::vector<int64_t>> groups(count);
  for (int64_t row = 0; row < chosen.numel(); row++) {
    if (expert[row] < 0 || expert[row] >= count)
      throw std::out_of_range("specstep::expert_linear: expected experts below " + std::to_string(count) + ", got " +
                              std::to_string(expert[row]));
    groups[expert[row]].push_back(row);
  }
  return groups;
}

// out [P, columns], where multiply(expert, x, out) fills the rows of one expert, gathered and contiguous.
template <class Multiply>
Tensor by_expert(const Tensor& x, const Tensor& experts, int64_t count, int64_t columns, const Multiply& multiply) {
  const Tensor rows = dense(x);
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  Tensor out = empty({x.size(0), columns}, dtype);
  const size_t in_bytes = x.size(1) * x.element_size(), out_bytes = columns * x.element_size();
  const auto groups = rows_of_experts(experts, count);
  for (int64_t expert = 0; expert < count; expert++) {
    const auto& group = groups[expert];
    if (group.empty()) continue;
    const Tensor gathered = empty({static_cast<int64_t>(group.size()), x.size(1)}, dtype);
    auto* to = static_cast<char*>(gathered.data_ptr());
    for (const int64_t row : group) {
      std::memcpy(to, static_cast<const char*>(rows.data_ptr()) + row * in_bytes, in_bytes);
      to += in_bytes;
    }
    const Tensor result = multiply(expert, gathered);
    const auto* from = static_cast<const char*>(result.data_ptr());
    for (const int64_t row : group) {
      std::memcpy(static_cast<char*>(out.data_ptr()) + row * out_bytes, from, out_bytes);
      from += out_bytes;
    }
  }
  return out;
}

bool fits(const Tensor& x, const Tensor& weight, const Tensor& experts) {
  return x.dim() == 2 && weight.dim() >= 1 && experts.dim() == 1 && experts.size(0) == x.size(0) &&
         x.scalar_type() == element_type(weight) && experts.scalar_type() == ScalarType::Long;
}

Tensor packed_expert_linear(const Tensor& x, const Tensor& weight, const Tensor& experts, int64_t columns) {
  if (!fits(x, weight, experts) || !is_packed(weight, {weight.size(0)}, columns, x.size(1)))
    throw std::invalid_argument(
        "specstep::packed_expert_linear: expected x [P, K], a weight packed from [E, columns, K], both float32 or both "
        "bfloat16 (a weight in groups: x bfloat16), and experts [P] int64");
  const int64_t count = weight.size(0);
  const int64_t bytes = count == 0 ? 0 : weight.numel() / count * static_cast<int64_t>(weight.element_size());
  const Multiply run = multiplier_of(weight);
  return by_expert(x, experts, count, columns, [&](int64_t expert, const Tensor& rows) {
    Tensor out = empty({rows.size(0), columns}, element_dtype(weight));
    const char* panels = static_cast<const char*>(weight.data_ptr()) + expert * bytes;
    run({panels, nullptr, columns, x.size(1)}, rows.size(0), rows.data_ptr(), out.data_ptr());
    return out;
  });
}

Tensor expert_linear(const Tensor& x, const Tensor& weight, const Tensor& experts) {
  if (!fits(x, weight, experts) || x.scalar_type() != weight.scalar_type() || weight.dim() != 3 || x.size(1) != weight.size(2))
    throw std::invalid_argument(
        "specstep::expert_linear_native: expected x [P, K], weight [E, N, K] of one dtype, experts [P] int64");
  return by_expert(x, experts, weight.size(0), weight.size(1), [&](int64_t expert, const Tensor& rows) {
    const std::optional<Tensor> no_bias;
    StableIValue stack[] = {torch::stable::detail::from(rows),
                            torch::stable::detail::from(torch::stable::select(weight, 0, expert)),
                            torch::stable::detail::from(no_bias)};
    STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
    return dense(torch::stable::detail::to<Tensor>(stack[0]));
  });
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_packed_expert_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle experts, int64_t columns, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("packed_expert_linear", [&] {
    const Tensor result = packed_expert_linear(borrowed(x), borrowed(weight), borrowed(experts), columns);
    return aoti_torch_new_tensor_handle(result.get(), out);
  });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_expert_linear_native(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle experts, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("expert_linear_native", [&] {
    return aoti_torch_new_tensor_handle(expert_linear(borrowed(x), borrowed(weight), borrowed(experts)).get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("expert_linear_native(Tensor x, Tensor weight, Tensor experts) -> Tensor");
  library.def("packed_expert_linear(Tensor x, Tensor weight, Tensor experts, int columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("expert_linear_native", TORCH_BOX(&specstep::expert_linear));
  library.impl("packed_expert_linear", TORCH_BOX(&specstep::packed_expert_linear));
}
