// What the operators of this library share.
#pragma once
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

namespace specstep {

using torch::stable::Tensor;

// x @ weight.T + bias: see linear.cpp.
Tensor small_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);

// A new contiguous CPU tensor.
Tensor empty(const std::vector<int64_t>& sizes, int32_t dtype);

// A tensor over a handle that stays the caller's.
Tensor borrowed(AtenTensorHandle handle);

}  // namespace specstep
