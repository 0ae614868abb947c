// specstep::wkv on the CPU: see reference.py. Channels know nothing of each other: a block of those of a row is one
// thread's.
#include <torch/csrc/stable/library.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "../exact/exponential.h"
#include "../parallel.h"
#include "../tensor.h"

namespace specstep {
namespace {

constexpr int64_t CHANNELS = 256;  // of a block
constexpr float LEAST = -1e38f;    // the exponent of sums that hold nothing

struct Inputs {
  const float *key, *value, *decay, *first, *state;
  const int64_t* parents;
  int64_t tokens, channels;
};

// One token's channels [begin, end): its key and value, its parent's state, its own and its output.
void run_token(const Inputs& in, const float* key, const float* value, const float* from, float* __restrict to,
               float* __restrict out, int64_t begin, int64_t end) {
  const float *a = from, *b = from + in.channels, *p = from + 2 * in.channels;
  for (int64_t c = begin; c < end; c++) {
    const float before = b[c] == 0.0f ? LEAST : p[c], own = in.first[c] + key[c], later = before + in.decay[c];
    const float now = before > own ? before : own, next = later > key[c] ? later : key[c];
    float kept = exponential(before - now), added = exponential(own - now);
    out[c] = fused(kept, a[c], added * value[c]) / fused(kept, b[c], added);
    kept = exponential(later - next), added = exponential(key[c] - next);
    to[c] = fused(kept, a[c], added * value[c]);
    to[in.channels + c] = fused(kept, b[c], added);
    to[2 * in.channels + c] = next;
  }
}

std::tuple<Tensor, Tensor> wkv(const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& first,
                               const Tensor& state, const std::optional<Tensor>& parents) {
  const Tensor held[] = {dense(key), dense(value), dense(decay), dense(first), dense(state)};
  const Tensor before = parents ? dense(*parents) : held[0];
  const auto floats = [&](int index) { return static_cast<const float*>(held[index].data_ptr()); };
  const int64_t batch = key.size(0), tokens = key.size(1), channels = key.size(2);
  const Inputs in = {floats(0), floats(1), floats(2), floats(3), floats(4),
                     parents ? static_cast<const int64_t*>(before.data_ptr()) : nullptr, tokens, channels};
  for (int64_t i = 0; in.parents && i < batch * tokens; i++)
    if (in.parents[i] < -1 || in.parents[i] >= i % tokens)
      throw std::invalid_argument("parents: expected -1 to t - 1 for token t");
  Tensor out = empty({batch, tokens, channels}, aoti_torch_dtype_float32());
  Tensor states = empty({batch, tokens, 3, channels}, aoti_torch_dtype_float32());
  auto *outs = static_cast<float*>(out.data_ptr()), *left = static_cast<float*>(states.data_ptr());
  const int64_t blocks = (channels + CHANNELS - 1) / CHANNELS;
  parallel_for(batch * blocks, 1, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t row = i / blocks, begin = i % blocks * CHANNELS, end = std::min(begin + CHANNELS, channels);
      for (int64_t t = 0; t < tokens; t++) {
        const int64_t token = row * tokens + t, parent = in.parents ? in.parents[token] : t - 1;
        const float* taken = parent < 0 ? in.state + row * 3 * channels : left + (row * tokens + parent) * 3 * channels;
        run_token(in, in.key + token * channels, in.value + token * channels, taken, left + token * 3 * channels,
                  outs + token * channels, begin, end);
      }
    }
  });
  return {out, states};
}

std::tuple<Tensor, Tensor> wkv_op(const Tensor& key, const Tensor& value, const Tensor& decay, const Tensor& first,
                                  const Tensor& state, std::optional<Tensor> parents) {
  return wkv(key, value, decay, first, state, parents);
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_wkv_native(
    AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle decay, AtenTensorHandle first,
    AtenTensorHandle state, AtenTensorHandle* parents, AtenTensorHandle* out0, AtenTensorHandle* out1) {
  using namespace specstep;
  return guarded("wkv", [&] {
    std::optional<Tensor> before;
    if (parents) before = borrowed(*parents);
    const auto [out, states] =
        wkv(borrowed(key), borrowed(value), borrowed(decay), borrowed(first), borrowed(state), before);
    const AOTITorchError error = aoti_torch_new_tensor_handle(out.get(), out0);
    return error ? error : aoti_torch_new_tensor_handle(states.get(), out1);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "wkv_native(Tensor key, Tensor value, Tensor decay, Tensor first, Tensor state, Tensor? parents) -> "
      "(Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) { library.impl("wkv_native", TORCH_BOX(&specstep::wkv_op)); }
