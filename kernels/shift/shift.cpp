// specstep::shift on the CPU: see reference.py.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <stdexcept>

#include "../parallel.h"
#include "../tensor.h"

namespace specstep {
namespace {

void shift(const Tensor& window, const Tensor& inputs, const Tensor& path, const Tensor& count) {
  if (!window.is_contiguous()) throw std::invalid_argument("specstep::shift: expected a contiguous window");
  const Tensor held[] = {dense(inputs), dense(path), dense(count)};
  const int64_t size = window.size(1), tokens = inputs.size(1), places = path.size(1);
  const int64_t bytes = window.size(2) * static_cast<int64_t>(window.element_size());
  const auto* given = static_cast<const char*>(held[0].data_ptr());
  const auto *paths = static_cast<const int64_t*>(held[1].data_ptr()), *counts = static_cast<const int64_t*>(held[2].data_ptr());
  auto* windows = static_cast<char*>(window.data_ptr());
  for (int64_t row = 0; row < window.size(0); row++) {
    const int64_t moved = counts[row] < places ? counts[row] : places;
    char* own = windows + row * size * bytes;
    for (int64_t place = 0; place < size; place++) {  // from the oldest on: nothing is written before it is read
      const int64_t from = place + moved;
      const char* source = from < size ? own + from * bytes
                                       : given + (row * tokens + paths[row * places + from - size]) * bytes;
      if (moved > 0) std::memcpy(own + place * bytes, source, bytes);
    }
  }
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_shift_native(
    AtenTensorHandle window, AtenTensorHandle inputs, AtenTensorHandle path, AtenTensorHandle count,
    void* /* in place of an output */) {
  using namespace specstep;
  return guarded("shift", [&] {
    shift(borrowed(window), borrowed(inputs), borrowed(path), borrowed(count));
    return AOTI_TORCH_SUCCESS;
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("shift_native(Tensor(a!) window, Tensor inputs, Tensor path, Tensor count) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) { library.impl("shift_native", TORCH_BOX(&specstep::shift)); }
