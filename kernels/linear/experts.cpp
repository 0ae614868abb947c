// specstep::packed_expert_linear on the CPU: each row of x times the packed weight of its own expert. Rows of one
// expert are gathered and multiplied together, so that each weight in use is read once.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "linear.h"

namespace specstep {
namespace {

void check(const Tensor& x, const Tensor& weight, const Tensor& experts, int64_t columns) {
  if (x.dim() != 2 || weight.dim() < 1 || experts.dim() != 1 || experts.size(0) != x.size(0) ||
      x.scalar_type() != weight.scalar_type() || experts.scalar_type() != ScalarType::Long ||
      !is_packed(weight, {weight.size(0)}, columns, x.size(1)))
    throw std::invalid_argument(
        "specstep::packed_expert_linear: expected x [P, K], a weight packed from [E, columns, K], both float32 or both "
        "bfloat16, and experts [P] int64");
}

Tensor packed_expert_linear(const Tensor& x, const Tensor& weight, const Tensor& experts, int64_t columns) {
  check(x, weight, experts, columns);
  const int64_t pairs = x.size(0), depth = x.size(1);
  const Tensor rows = torch::stable::contiguous(x), chosen = torch::stable::contiguous(experts);
  const auto* expert = static_cast<const int64_t*>(chosen.data_ptr());
  std::vector<std::vector<int64_t>> groups(weight.size(0));
  for (int64_t pair = 0; pair < pairs; pair++) {
    if (expert[pair] < 0 || expert[pair] >= weight.size(0))
      throw std::out_of_range("specstep::packed_expert_linear: expected experts below " +
                              std::to_string(weight.size(0)) + ", got " + std::to_string(expert[pair]));
    groups[expert[pair]].push_back(pair);
  }
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  Tensor out = empty({pairs, columns}, dtype);
  const size_t in_bytes = depth * x.element_size(), out_bytes = columns * x.element_size();
  const size_t weight_bytes = weight.size(0) == 0 ? 0 : weight.numel() / weight.size(0) * weight.element_size();
  for (size_t e = 0; e < groups.size(); e++) {
    const auto& group = groups[e];
    if (group.empty()) continue;
    const Tensor gathered = empty({static_cast<int64_t>(group.size()), depth}, dtype);
    auto* to = static_cast<char*>(gathered.data_ptr());
    for (const int64_t pair : group) {
      std::memcpy(to, static_cast<const char*>(rows.data_ptr()) + pair * in_bytes, in_bytes);
      to += in_bytes;
    }
    const Tensor result = empty({static_cast<int64_t>(group.size()), columns}, dtype);
    const char* panels = static_cast<const char*>(weight.data_ptr()) + e * weight_bytes;
    multiply({x.scalar_type(), panels, nullptr, columns, depth}, group.size(), gathered.data_ptr(), result.data_ptr());
    const auto* from = static_cast<const char*>(result.data_ptr());
    for (const int64_t pair : group) {
      std::memcpy(static_cast<char*>(out.data_ptr()) + pair * out_bytes, from, out_bytes);
      from += out_bytes;
    }
  }
  return out;
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

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("packed_expert_linear(Tensor x, Tensor weight, Tensor experts, int columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("packed_expert_linear", TORCH_BOX(&specstep::packed_expert_linear));
}
