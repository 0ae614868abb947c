// specstep::packed_linear on the CPU: y = x @ weight.T + bias for any number of rows, each output with the same bits
// whatever is computed with it.
//
// The weight is interleaved by 16 outputs (packing.py), so that one register holds a step along K of a whole panel and
// x is broadcast from memory: see multiply.h.
//
// Only PyTorch's stable C interface is used, so that the library outlives the PyTorch version it was built with. The
// threads are those of parallel.h.
#include "linear.h"

#include <torch/csrc/stable/library.h>

#include <stdexcept>

#include "plan.h"

namespace specstep {

Multiply multiplier_of(const Tensor& packed) {
  return with_block(packed, [](auto block) -> Multiply { return multiply<decltype(block)>; });
}

bool is_packed(const Tensor& packed, const std::vector<int64_t>& leading, int64_t columns, int64_t depth) {
  const int64_t inner = static_cast<int64_t>(leading.size());
  return columns >= 0 && depth >= 0 && packed.dim() >= inner + 3 && packed.is_contiguous() &&
         with_block(packed, [&](auto block) {
           using Block = decltype(block);
           int64_t bytes = packed.element_size();
           for (int64_t d = inner + 2; d < packed.dim(); d++) bytes *= packed.size(d);
           return bytes == Block::BYTES && packed.size(inner) == divide_up(columns, OUTPUTS) &&
                  packed.size(inner + 1) == divide_up(depth, Block::STEP) &&
                  std::equal(leading.begin(), leading.end(), packed.sizes().begin());
         });
}

static Tensor packed_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias, int64_t columns) {
  const ScalarType type = x.scalar_type();
  if (x.dim() < 1 || !is_packed(weight, {}, columns, x.size(-1)) || element_type(weight) != type ||
      (bias && (bias->scalar_type() != type || bias->dim() != 1 || bias->size(0) != columns)))
    throw std::invalid_argument(
        "specstep::packed_linear: expected x [..., K], a weight packed from [columns, K] and a bias [columns] or none, "
        "all float32 or all bfloat16 (a weight in groups: x and bias bfloat16)");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = columns;
  int64_t rows = 1;
  for (size_t d = 0; d + 1 < sizes.size(); d++) rows *= sizes[d];
  const Tensor from = dense(x);
  const auto shift = bias ? std::optional<Tensor>(dense(*bias)) : std::nullopt;
  Tensor out = empty(sizes, element_dtype(weight));
  multiplier_of(weight)({weight.data_ptr(), shift ? shift->data_ptr() : nullptr, columns, x.size(-1)}, rows, from.data_ptr(),
                        out.data_ptr());
  return out;
}

}  // namespace specstep

// What compiled models call: the name is AOTInductor's convention for an operator named packed_linear on the CPU.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_packed_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, int64_t columns, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("packed_linear", [&] {
    const auto shift = bias ? std::optional<Tensor>(borrowed(*bias)) : std::nullopt;
    return aoti_torch_new_tensor_handle(packed_linear(borrowed(x), borrowed(weight), shift, columns).get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("packed_linear(Tensor x, Tensor weight, Tensor? bias, int columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("packed_linear", TORCH_BOX(&specstep::packed_linear));
}
