// specstep::packed_embedding on the CPU: rows of a packed weight [N, K] by their numbers. A model whose embedding
// is also its head holds the weight once, packed.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <stdexcept>
#include <string>

#include "../parallel.h"
#include "linear.h"

namespace specstep {
namespace {

constexpr int64_t TASK_ELEMENTS = 16 * 1024;  // least per thread: each is a line of memory, or half of one

using Gather = void (*)(const void* weight, const int64_t* ids, int64_t count, int64_t depth, void* out);

template <class Block>
void gather(const void* weight, const int64_t* ids, int64_t count, int64_t depth, void* out) {
  using Element = typename Block::Element;
  const int64_t steps = (depth + Block::STEP - 1) / Block::STEP, whole = steps * Block::STEP;
  parallel_for(count, TASK_ELEMENTS / std::max<int64_t>(1, depth) + 1, [&](int64_t begin, int64_t end) {
    std::vector<float> values(whole + LANES);  // whole vectors of them are rounded
    std::vector<Element> row(whole + LANES);
    for (int64_t place = begin; place < end; place++) {
      const int64_t panel = ids[place] / OUTPUTS, lane = ids[place] % OUTPUTS;
      const char* from = static_cast<const char*>(weight) + panel * steps * Block::BYTES;
      for (int64_t step = 0; step < steps; step++)
        Block::elements(from + step * Block::BYTES, static_cast<int>(lane), values.data() + step * Block::STEP);
      for (int64_t k = 0; k < whole; k += LANES) rounded(load<Lanes>(values.data() + k), row.data() + k);
      std::memcpy(static_cast<Element*>(out) + place * depth, row.data(), depth * sizeof(Element));
    }
  });
}

Tensor packed_embedding(const Tensor& weight, const Tensor& ids, int64_t columns, int64_t depth) {
  if (ids.scalar_type() != ScalarType::Long || !is_packed(weight, {}, columns, depth))
    throw std::invalid_argument(
        "specstep::packed_embedding: expected a weight packed from [columns, depth] and ids of int64");
  const Tensor given = dense(ids);
  const auto* id = static_cast<const int64_t*>(given.data_ptr());
  for (int64_t place = 0; place < given.numel(); place++)
    if (id[place] < 0 || id[place] >= columns)
      throw std::out_of_range("specstep::packed_embedding: expected ids below " + std::to_string(columns) + ", got " +
                              std::to_string(id[place]));
  std::vector<int64_t> sizes(ids.sizes().begin(), ids.sizes().end());
  sizes.push_back(depth);
  Tensor out = empty(sizes, element_dtype(weight));
  const auto run = with_block(weight, [](auto block) -> Gather { return gather<decltype(block)>; });
  run(weight.data_ptr(), id, given.numel(), depth, out.data_ptr());
  return out;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_packed_embedding(
    AtenTensorHandle weight, AtenTensorHandle ids, int64_t columns, int64_t depth, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("packed_embedding", [&] {
    const Tensor result = packed_embedding(borrowed(weight), borrowed(ids), columns, depth);
    return aoti_torch_new_tensor_handle(result.get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("packed_embedding(Tensor weight, Tensor ids, int columns, int depth) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("packed_embedding", TORCH_BOX(&specstep::packed_embedding));
}
