// specstep::linear_attention on the CPU: see reference.py. A head of a row is one thread's. A state that nobody follows
// is kept nowhere; another one takes over its parent's buffer where nobody else needs that, so a chain has one.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <optional>
#include <stdexcept>

#include "../parallel.h"
#include "../tensor.h"
#include "state.h"

namespace specstep {
namespace {

const float* floats(const Tensor& x) { return static_cast<const float*>(x.data_ptr()); }

struct Sizes {
  int64_t batch, tokens, groups, heads, n, p, decays;
};

Sizes sizes_of(const Tensor& key, const Tensor& value, const Tensor& decay) {
  return {value.size(0), value.size(1), key.size(2), value.size(2), key.size(3), value.size(3), decay.size(3)};
}

// What one row's tokens follow: their parents, and the buffers of the states that are followed.
class Tree {
 public:
  Tree(const int64_t* parents, int64_t tokens) : parents_(tokens), last_(tokens + 1, -1), places_(tokens) {
    for (int64_t t = 0; t < tokens; t++) {
      parents_[t] = parents ? parents[t] : t - 1;
      if (parents_[t] < -1 || parents_[t] >= t) throw std::invalid_argument("parents: expected -1 to t - 1 for token t");
      last_[parents_[t] + 1] = t;
    }
    std::vector<int64_t> free;
    for (int64_t t = 0; t < tokens; t++) {
      const int64_t parent = parents_[t];
      if (parent >= 0 && last_[parent + 1] == t) free.push_back(places_[parent]);
      if (last_[t + 1] < 0) continue;  // it has no children
      if (free.empty()) free.push_back(buffers_++);
      places_[t] = free.back();
      free.pop_back();
    }
  }
  int64_t parent(int64_t token) const { return parents_[token]; }
  bool is_followed(int64_t token) const { return last_[token + 1] >= 0; }
  int64_t place(int64_t token) const { return places_[token]; }
  int64_t buffers() const { return buffers_; }

 private:
  std::vector<int64_t> parents_, last_, places_;
  int64_t buffers_ = 0;
};

struct Inputs {
  const float *query, *key, *value, *decay, *rates, *beta, *state;
};

void run_head(const Sizes& s, const Inputs& in, const Tree& tree, int64_t row, int64_t head, float* out, float* update,
              std::vector<float>& buffers) {
  const int64_t size = s.n * s.p, group = head / (s.heads / s.groups);
  buffers.resize(tree.buffers() * size);
  for (int64_t t = 0; t < s.tokens; t++) {
    const int64_t token = row * s.tokens + t, at = token * s.heads + head;
    const float *key = in.key + (token * s.groups + group) * s.n, *query = in.query + (token * s.groups + group) * s.n;
    const int64_t parent = tree.parent(t);
    const float* from = parent < 0 ? in.state + (row * s.heads + head) * size : &buffers[tree.place(parent) * size];
    float *state = tree.is_followed(t) ? &buffers[tree.place(t) * size] : nullptr, *u = update + at * s.p;
    const float* value = in.value + at * s.p;
    const Decay decay = {in.decay + at * s.decays, s.decays, in.rates ? in.rates + head * size : nullptr};
    if (in.beta) {
      read({nullptr, from, decay, nullptr, nullptr, key, s.n, s.p}, u);  // what the state says of the key
      for (int64_t j = 0; j < s.p; j++) u[j] = (value[j] - u[j]) * in.beta[at];
    } else {
      std::memcpy(u, value, s.p * sizeof(float));
    }
    write_and_read({state, from, decay, key, u, query, s.n, s.p}, out + at * s.p);
  }
}

std::tuple<Tensor, Tensor> linear_attention(const Tensor& query, const Tensor& key, const Tensor& value,
                                            const Tensor& decay, const Tensor* rates, const Tensor* beta,
                                            const Tensor& state, const Tensor* parents) {
  const Sizes s = sizes_of(key, value, decay);
  const Tensor held[] = {dense(query), dense(key), dense(value), dense(decay), dense(state)};
  const Tensor scales = beta ? dense(*beta) : held[0], before = parents ? dense(*parents) : held[0];
  const Tensor of_states = rates ? dense(*rates) : held[0];
  const Inputs in = {floats(held[0]), floats(held[1]), floats(held[2]), floats(held[3]),
                     rates ? floats(of_states) : nullptr, beta ? floats(scales) : nullptr, floats(held[4])};
  const std::vector<int64_t> shape = {s.batch, s.tokens, s.heads, s.p};
  Tensor out = empty(shape, aoti_torch_dtype_float32()), update = empty(shape, aoti_torch_dtype_float32());
  std::vector<Tree> trees;
  for (int64_t row = 0; row < s.batch; row++)
    trees.emplace_back(parents ? static_cast<const int64_t*>(before.data_ptr()) + row * s.tokens : nullptr, s.tokens);
  auto *outs = static_cast<float*>(out.data_ptr()), *updates = static_cast<float*>(update.data_ptr());
  parallel_for(s.batch * s.heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> buffers;
    for (int64_t i = begin; i < end; i++) run_head(s, in, trees[i / s.heads], i / s.heads, i % s.heads, outs, updates, buffers);
  });
  return {out, update};
}

const Tensor* pointer(const std::optional<Tensor>& given) { return given ? &*given : nullptr; }

std::tuple<Tensor, Tensor> linear_attention_op(const Tensor& query, const Tensor& key, const Tensor& value,
                                               const Tensor& decay, std::optional<Tensor> rates,
                                               std::optional<Tensor> beta, const Tensor& state,
                                               std::optional<Tensor> parents) {
  return linear_attention(query, key, value, decay, pointer(rates), pointer(beta), state, pointer(parents));
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_linear_attention_native(
    AtenTensorHandle query, AtenTensorHandle key, AtenTensorHandle value, AtenTensorHandle decay,
    AtenTensorHandle* rates, AtenTensorHandle* beta, AtenTensorHandle state, AtenTensorHandle* parents,
    AtenTensorHandle* out0, AtenTensorHandle* out1) {
  using namespace specstep;
  return guarded("linear_attention", [&] {
    std::optional<Tensor> of_states, scales, before;
    if (rates) of_states = borrowed(*rates);
    if (beta) scales = borrowed(*beta);
    if (parents) before = borrowed(*parents);
    const auto [out, update] =
        linear_attention(borrowed(query), borrowed(key), borrowed(value), borrowed(decay), pointer(of_states),
                         pointer(scales), borrowed(state), pointer(before));
    const AOTITorchError error = aoti_torch_new_tensor_handle(out.get(), out0);
    return error ? error : aoti_torch_new_tensor_handle(update.get(), out1);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "linear_attention_native(Tensor query, Tensor key, Tensor value, Tensor decay, Tensor? rates, Tensor? beta, "
      "Tensor state, Tensor? parents) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("linear_attention_native", TORCH_BOX(&specstep::linear_attention_op));
}
