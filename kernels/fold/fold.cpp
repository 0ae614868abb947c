// specstep::fold on the CPU: see reference.py.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <stdexcept>

#include "../linear_attention/state.h"
#include "../parallel.h"
#include "../tensor.h"

namespace specstep {
namespace {

void fold(const Tensor& state, const Tensor& key, const Tensor& decay, const std::optional<Tensor>& rates,
          const Tensor& update, const Tensor& path, const Tensor& count) {
  if (!state.is_contiguous()) throw std::invalid_argument("specstep::fold: expected a contiguous state");
  const Tensor held[] = {dense(key), dense(decay), dense(update), dense(path), dense(count)};
  const int64_t batch = update.size(0), tokens = update.size(1), heads = update.size(2), p = update.size(3);
  const int64_t groups = key.size(2), n = key.size(3), decays = decay.size(3), places = path.size(1);
  const auto *keys = static_cast<const float*>(held[0].data_ptr()), *factors = static_cast<const float*>(held[1].data_ptr());
  const Tensor of_states = rates ? dense(*rates) : held[0];
  const auto* exponents = rates ? static_cast<const float*>(of_states.data_ptr()) : nullptr;
  const auto* updates = static_cast<const float*>(held[2].data_ptr());
  const auto *paths = static_cast<const int64_t*>(held[3].data_ptr()), *counts = static_cast<const int64_t*>(held[4].data_ptr());
  auto* states = static_cast<float*>(state.data_ptr());
  parallel_for(batch * heads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
      const int64_t row = i / heads, head = i % heads, group = head / (heads / groups);
      for (int64_t place = 0; place < counts[row] && place < places; place++) {
        const int64_t token = row * tokens + paths[row * places + place], at = token * heads + head;
        const Decay by = {factors + at * decays, decays, exponents ? exponents + head * n * p : nullptr};
        float* own = states + i * n * p;
        write({own, own, by, keys + (token * groups + group) * n, updates + at * p, nullptr, n, p});
      }
    }
  });
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_fold_native(
    AtenTensorHandle state, AtenTensorHandle key, AtenTensorHandle decay, AtenTensorHandle* rates,
    AtenTensorHandle update, AtenTensorHandle path, AtenTensorHandle count, void* /* in place of an output */) {
  using namespace specstep;
  return guarded("fold", [&] {
    const auto of_states = rates ? std::optional<Tensor>(borrowed(*rates)) : std::nullopt;
    fold(borrowed(state), borrowed(key), borrowed(decay), of_states, borrowed(update), borrowed(path),
         borrowed(count));
    return AOTI_TORCH_SUCCESS;
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "fold_native(Tensor(a!) state, Tensor key, Tensor decay, Tensor? rates, Tensor update, Tensor path, "
      "Tensor count) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) { library.impl("fold_native", TORCH_BOX(&specstep::fold)); }
