// specstep::all_reduce on the CPU: see reference.py. Every rank adds all parts, in the same order: all have the same bits.
#include <torch/csrc/stable/library.h>

#include <stdexcept>

#include "../communicator.h"
#include "../exact/element.h"
#include "../parallel.h"

namespace specstep {
namespace {

constexpr int64_t GRAIN = 16 * 1024;  // elements, least per thread

template <class Element>
void add(const char* const* parts, int64_t ranks, int64_t begin, int64_t end, Element* out) {
  float block[BLOCK], more[BLOCK];
  for (int64_t at = begin; at < end; at += BLOCK) {
    const int64_t count = std::min(BLOCK, end - at);
    load_block(reinterpret_cast<const Element*>(parts[0]) + at, count, block);
    for (int64_t rank = 1; rank < ranks; rank++) {
      load_block(reinterpret_cast<const Element*>(parts[rank]) + at, count, more);
      for (int64_t i = 0; i < BLOCK; i++) block[i] += more[i];
    }
    store_block(block, count, out + at);
  }
}

template <class Element>
void reduce(const Tensor& x, int64_t ranks, const Tensor& out) {
  constexpr int64_t size = sizeof(Element);
  auto* to = static_cast<Element*>(out.data_ptr());
  exchange(x.data_ptr(), x.numel() * size, [&](const char* const* parts, int64_t begin, int64_t bytes) {
    parallel_for(bytes / size, GRAIN, [&](int64_t first, int64_t end) {
      add(parts, ranks, first, end, to + begin / size);
    });
  });
}

Tensor all_reduce(const Tensor& given, int64_t ranks) {
  const Tensor x = dense(given);
  if (ranks != ranks_here() || x.dim() < 1)
    throw std::invalid_argument("specstep::all_reduce: expected x [...] and as many ranks as there are");
  const Tensor out = empty_like(x, std::vector<int64_t>(x.sizes().begin(), x.sizes().end()));
  if (x.scalar_type() == ScalarType::Float)
    reduce<float>(x, ranks, out);
  else if (x.scalar_type() == ScalarType::BFloat16)
    reduce<Bfloat16>(x, ranks, out);
  else if (x.scalar_type() == ScalarType::Half)
    reduce<Float16>(x, ranks, out);
  else
    throw std::invalid_argument("specstep::all_reduce: expected float32, bfloat16 or float16");
  return out;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_all_reduce(AtenTensorHandle x,
                                                                                           int64_t ranks,
                                                                                           AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("all_reduce", [&] { return aoti_torch_new_tensor_handle(all_reduce(borrowed(x), ranks).get(), out); });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) { library.def("all_reduce(Tensor x, int ranks) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) { library.impl("all_reduce", TORCH_BOX(&specstep::all_reduce)); }
