// What the operators over packed weights share.
#pragma once
#include <optional>

#include "../tensor.h"

namespace specstep {

// A packed weight of N columns and depth K, and its bias (null: none). See packing.py.
struct Layer {
  ScalarType type;
  const void* weight;
  const void* bias;
  int64_t columns, depth;
};

// out [rows, N] = x [rows, K] @ weight.T + bias, both contiguous: see linear.cpp.
void multiply(const Layer& layer, int64_t rows, const void* x, void* out);

// Whether `packed` is what packing.py makes of [leading..., columns, depth] in the dtype of x.
bool is_packed(const Tensor& packed, const std::vector<int64_t>& leading, int64_t columns, int64_t depth);

}  // namespace specstep
