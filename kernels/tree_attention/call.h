// What tree attention is called with, and the memory that its threads keep.
#pragma once

#include <stdexcept>

#include "../tensor.h"
#include "seen.h"

namespace specstep::attention {

// Memory of a thread, aligned and kept from call to call.
template <class Value>
Value* scratch(int which, int64_t count) {
  static thread_local std::vector<uint32_t> buffers[6];
  const auto most = static_cast<size_t>(count) + 16;
  if (buffers[which].size() < most) buffers[which].resize(most);
  const auto address = reinterpret_cast<uintptr_t>(buffers[which].data());
  return reinterpret_cast<Value*>((address + 63) / 64 * 64);
}
enum Buffer { QUERIES, PACKED, WEIGHTS, SPAN_RESULT, RESULT, RESULTS };

// A tensor [B, heads, N, size].
struct Heads {
  Tensor held;
  const void* data;
  int64_t strides[3], batch, heads, count, size;

  explicit Heads(const Tensor& given) : held(given) {
    if (given.dim() != 4) throw std::invalid_argument("specstep::tree_attention: expected q, k and v of 4 dimensions");
    if (given.stride(3) != 1) held = dense(given);
    data = held.data_ptr();
    for (int d = 0; d < 3; d++) strides[d] = held.stride(d);
    batch = held.size(0), heads = held.size(1), count = held.size(2), size = held.size(3);
  }
  template <class Element>
  const Element* at(int64_t row, int64_t head, int64_t index) const {
    return static_cast<const Element*>(data) + row * strides[0] + head * strides[1] + index * strides[2];
  }
};

struct Call {
  Heads q, k, v;
  std::vector<Row> rows;
  Scores scores;
  const float* sinks;  // [H], or none
  void* out;
};

}  // namespace specstep::attention
