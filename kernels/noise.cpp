// specstep::gumbel on the CPU: see noise.py.
#include <torch/csrc/stable/library.h>

#include <stdexcept>

#include "noise.h"
#include "tensor.h"

namespace specstep {
namespace {

// An int64 tensor of three dimensions, of which any may be 1 and stand for all.
struct Broadcast {
  const int64_t* data;
  int64_t strides[3], sizes[3];

  explicit Broadcast(const Tensor& tensor) : data(static_cast<const int64_t*>(tensor.data_ptr())) {
    if (tensor.dim() != 3 || tensor.scalar_type() != ScalarType::Long)
      throw std::invalid_argument("specstep::gumbel: expected three int64 tensors of three dimensions");
    for (int d = 0; d < 3; d++) sizes[d] = tensor.size(d), strides[d] = sizes[d] == 1 ? 0 : tensor.stride(d);
  }
  int64_t at(int64_t i, int64_t j, int64_t k) const { return data[i * strides[0] + j * strides[1] + k * strides[2]]; }
};

Tensor gumbel(const Tensor& seeds, const Tensor& positions, const Tensor& tokens) {
  const Broadcast given[] = {Broadcast(seeds), Broadcast(positions), Broadcast(tokens)};
  std::vector<int64_t> sizes(3, 1);
  for (const auto& each : given)
    for (int d = 0; d < 3; d++) {
      if (each.sizes[d] != 1 && sizes[d] != 1 && each.sizes[d] != sizes[d])
        throw std::invalid_argument("specstep::gumbel: expected tensors that broadcast");
      if (each.sizes[d] != 1) sizes[d] = each.sizes[d];
    }
  Tensor out = empty(sizes, aoti_torch_dtype_float32());
  auto* noise = static_cast<float*>(out.data_ptr());
  for (int64_t i = 0; i < sizes[0]; i++)
    for (int64_t j = 0; j < sizes[1]; j++)
      for (int64_t k = 0; k < sizes[2]; k++)
        *noise++ = Noise(given[0].at(i, j, k), given[1].at(i, j, k))(static_cast<uint32_t>(given[2].at(i, j, k)));
  return out;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_gumbel_native(
    AtenTensorHandle seeds, AtenTensorHandle positions, AtenTensorHandle tokens, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("gumbel", [&] {
    return aoti_torch_new_tensor_handle(gumbel(borrowed(seeds), borrowed(positions), borrowed(tokens)).get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("gumbel_native(Tensor seeds, Tensor positions, Tensor tokens) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("gumbel_native", TORCH_BOX(&specstep::gumbel));
}
