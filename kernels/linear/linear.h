// What the operators over packed weights share.
#pragma once
#include <optional>

#include "../tensor.h"
#include "groups.h"

namespace specstep {

// A packed weight of N columns and depth K, and its bias (null: none). See packing.py.
struct Layer {
  const void* weight;
  const void* bias;
  int64_t columns, depth;
};

// out [rows, N] = x [rows, K] @ weight.T + bias, both contiguous: see linear.cpp.
using Multiply = void (*)(const Layer& layer, int64_t rows, const void* x, void* out);

// The product for one kind of block, see multiply.h; each kind is compiled once, in a file of its family.
template <class Block>
void multiply(const Layer& layer, int64_t rows, const void* x, void* out);

template <class... Blocks>
struct Kinds {};
using GroupKinds = Kinds<Int8Block, Int4Block, LeastInt4Block, Int5Block, LeastInt5Block, Q2KBlock, Q3KBlock, Q4KBlock,
                         Q5KBlock, Q6KBlock, Iq4Block, Iq4XsBlock, Mxfp4Block, Nvfp4Block>;

template <class Result, class Visitor, class Block, class... Others>
Result with_last(int64_t last, const Visitor& visitor, Kinds<Block, Others...>) {
  if (last == Block::LAST) return visitor(Block{});
  if constexpr (sizeof...(Others) > 0) return with_last<Result>(last, visitor, Kinds<Others...>{});
  return {};
}

// visitor(block) for the kind of block that a packed weight is made of; an empty result for another tensor.
template <class Visitor>
auto with_block(const Tensor& packed, const Visitor& visitor) -> decltype(visitor(Float32Block{})) {
  const ScalarType type = packed.scalar_type();
  if (type == ScalarType::Float) return visitor(Float32Block{});
  if (type == ScalarType::BFloat16) return visitor(Bfloat16Block{});
  const int64_t last = type == ScalarType::Byte && packed.dim() > 0 ? packed.size(-1) : 0;
  return with_last<decltype(visitor(Float32Block{}))>(last, visitor, GroupKinds{});
}

// Whether `packed` is what packing.py makes of [leading..., columns, depth].
bool is_packed(const Tensor& packed, const std::vector<int64_t>& leading, int64_t columns, int64_t depth);

// What multiplies by a packed weight, null for another tensor.
Multiply multiplier_of(const Tensor& packed);

// The dtype of x and of the result beside a packed weight.
inline ScalarType element_type(const Tensor& packed) {
  return packed.scalar_type() == ScalarType::Byte ? ScalarType::BFloat16 : packed.scalar_type();
}

// The same as PyTorch's C interface names it.
inline int32_t element_dtype(const Tensor& packed) {
  return element_type(packed) == ScalarType::Float ? aoti_torch_dtype_float32() : aoti_torch_dtype_bfloat16();
}

}  // namespace specstep
