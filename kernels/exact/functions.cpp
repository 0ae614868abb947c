// Functions of single elements, of which the product with another tensor may be taken. PyTorch and its compiler take one approximation for whole vectors and another for what
// is left at the end of a loop, so that an element's bits depend on how many others there are. Here all elements pass
// through the same code, in blocks that are padded.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <optional>
#include <stdexcept>

#include "../parallel.h"
#include "element.h"
#include "exponential.h"

namespace specstep {
namespace {

constexpr int64_t GRAIN = 64;  // blocks per thread at least: some microseconds

inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

// Relative error below 3e-7. Source of the polynomial: Cephes' tanhf.
inline float hyperbolic_tangent(float x) {
  const float size = x < 0 ? -x : x, square = x * x;
  const float near = x + x * square * (-3.33332819422e-1f + square * (1.33314422036e-1f + square * (-5.37397155531e-2f +
                     square * (2.06390887954e-2f + square * -5.70498872745e-3f))));
  const float far = 1.0f - 2.0f / (exponential(2.0f * size) + 1.0f);
  return size < 0.625f ? near : (x < 0 ? -far : far);
}

struct Exp {
  static float value(float x) { return exponential(x); }
};
struct Expm1 {  // not exponential(x) - 1, which has no digits left near zero
  static float value(float x) { return std::expm1(x); }
};
struct Log {
  static float value(float x) { return std::log(x); }
};
struct Log1p {  // not log(1 + x), which has no digits left near zero
  static float value(float x) { return std::log1p(x); }
};
struct Softplus {  // as torch has it with beta 1 and threshold 20
  static float value(float x) { return x > 20.0f ? x : std::log1p(std::exp(x)); }
};
struct Silu {
  static float value(float x) { return x / (1.0f + exponential(-x)); }
};
struct Sigmoid {
  static float value(float x) { return sigmoid(x); }
};
struct Tanh {
  static float value(float x) { return hyperbolic_tangent(x); }
};
struct GeluTanh {
  static float value(float x) {
    return 0.5f * x * (1.0f + hyperbolic_tangent(0.7978845608f * (x + 0.044715f * x * x * x)));
  }
};
struct Gelu {
  static float value(float x) { return 0.5f * x * (1.0f + std::erf(x * 0.7071067812f)); }
};
struct Cos {
  static float value(float x) { return std::cos(x); }
};
struct Sin {
  static float value(float x) { return std::sin(x); }
};

template <class Function>
__attribute__((noinline)) void apply_to_block(const float* __restrict x, float* __restrict out) {
  for (int64_t i = 0; i < BLOCK; i++) out[i] = Function::value(x[i]);
}

// out [count, columns] = the function of x, times y where there is one.
template <class Function, class Element>
void apply_to_all(const Rows& x, const Rows* y, void* out) {
  const int64_t blocks = (x.columns + BLOCK - 1) / BLOCK;
  parallel_for(x.count * blocks, GRAIN, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; number++) {
      const int64_t row = number / blocks, first = number % blocks * BLOCK, here = std::min(BLOCK, x.columns - first);
      float values[BLOCK], results[BLOCK];
      load_block(x.row<Element>(row) + first, here, values);
      apply_to_block<Function>(values, results);
      auto* to = static_cast<Element*>(out) + row * x.columns + first;
      store_block(results, here, to);
      if (!y) continue;
      load_block(to, here, results);  // rounded, as if the product were an operation of its own
      load_block(y->row<Element>(row) + first, here, values);
      for (int64_t i = 0; i < BLOCK; i++) results[i] *= values[i];
      store_block(results, here, to);
    }
  });
}

template <class Function>
Tensor apply(const Tensor& x, const std::optional<Tensor>& y) {
  const ScalarType type = x.scalar_type();
  const std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  if (type != ScalarType::Float && type != ScalarType::BFloat16)
    throw std::invalid_argument("x: expected float32 or bfloat16");
  if (y && (y->scalar_type() != type || !std::equal(sizes.begin(), sizes.end(), y->sizes().begin(), y->sizes().end())))
    throw std::invalid_argument("y: expected the shape and the dtype of x");
  const bool flat = x.is_contiguous() && (!y || y->is_contiguous());
  const Rows first(x, flat);
  const std::optional<Rows> second = y ? std::optional<Rows>(Rows(*y, flat)) : std::nullopt;
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  Tensor out = empty(sizes, dtype);
  const auto run = type == ScalarType::Float ? apply_to_all<Function, float> : apply_to_all<Function, Bfloat16>;
  run(first, second ? &*second : nullptr, out.data_ptr());
  return out;
}

}  // namespace
}  // namespace specstep

// What compiled models call, and what torch calls: see linear.cpp.
#define SPECSTEP_FUNCTION(NAME, FUNCTION)                                                                          \
  extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_##NAME(                          \
      AtenTensorHandle x, AtenTensorHandle* y, AtenTensorHandle* out) {                                            \
    using namespace specstep;                                                                                      \
    return guarded(#NAME, [&] {                                                                                    \
      const auto factor = y ? std::optional<Tensor>(borrowed(*y)) : std::nullopt;                                  \
      return aoti_torch_new_tensor_handle(apply<FUNCTION>(borrowed(x), factor).get(), out);                        \
    });                                                                                                            \
  }                                                                                                                \
  STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) { library.def(#NAME "(Tensor x, Tensor? y=None) -> Tensor"); }  \
  STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) { library.impl(#NAME, TORCH_BOX(&specstep::apply<specstep::FUNCTION>)); }

SPECSTEP_FUNCTION(exact_exp, Exp)
SPECSTEP_FUNCTION(exact_expm1, Expm1)
SPECSTEP_FUNCTION(exact_log, Log)
SPECSTEP_FUNCTION(exact_log1p, Log1p)
SPECSTEP_FUNCTION(exact_softplus, Softplus)
SPECSTEP_FUNCTION(exact_silu, Silu)
SPECSTEP_FUNCTION(exact_sigmoid, Sigmoid)
SPECSTEP_FUNCTION(exact_tanh, Tanh)
SPECSTEP_FUNCTION(exact_gelu, Gelu)
SPECSTEP_FUNCTION(exact_gelu_tanh, GeluTanh)
SPECSTEP_FUNCTION(exact_cos, Cos)
SPECSTEP_FUNCTION(exact_sin, Sin)
