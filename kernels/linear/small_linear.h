// What the linear layers share.
#pragma once
#include <optional>

#include "../tensor.h"

namespace specstep {

// x @ weight.T + bias: see linear.cpp.
Tensor small_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias);

}  // namespace specstep
