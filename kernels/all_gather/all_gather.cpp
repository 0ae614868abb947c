// specstep::all_gather on the CPU: see reference.py.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <stdexcept>

#include "../communicator.h"
#include "../tensor.h"

namespace specstep {
namespace {

Tensor all_gather(const Tensor& given, int64_t ranks) {
  const Tensor x = dense(given);
  if (ranks != ranks_here() || x.dim() < 1)
    throw std::invalid_argument("specstep::all_gather: expected x [..., N] and as many ranks as there are");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() *= ranks;
  const Tensor out = empty_like(x, sizes);
  const int64_t width = x.size(-1) * static_cast<int64_t>(x.element_size());
  char* to = static_cast<char*>(out.data_ptr());
  exchange(x.data_ptr(), x.numel() * static_cast<int64_t>(x.element_size()),
           [&](const char* const* parts, int64_t begin, int64_t bytes) {
             for (int64_t at = 0; at < bytes;) {  // row after row, of which the first may have begun before
               const int64_t row = (begin + at) / width, column = (begin + at) % width;
               const int64_t count = std::min(width - column, bytes - at);
               for (int64_t rank = 0; rank < ranks; rank++)
                 std::memcpy(to + (row * ranks + rank) * width + column, parts[rank] + at, count);
               at += count;
             }
           });
  return out;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_all_gather(AtenTensorHandle x,
                                                                                           int64_t ranks,
                                                                                           AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("all_gather", [&] { return aoti_torch_new_tensor_handle(all_gather(borrowed(x), ranks).get(), out); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) { library.def("all_gather(Tensor x, int ranks) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) { library.impl("all_gather", TORCH_BOX(&specstep::all_gather)); }
