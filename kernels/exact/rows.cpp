// Reductions over the last dimension, and sums over any. PyTorch's compiler adds in another order where there is one row, or where rows are
// shared between threads. Here a row is added the same way whatever else is computed: lane by lane, then over the lanes.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <utility>

#include "../parallel.h"
#include "element.h"

namespace specstep {
namespace {

constexpr int64_t LANES = 16;
constexpr int64_t GRAIN = 8192;  // elements per thread at least

// A row as floats, padded with zeros to whole blocks.
struct Row {
  std::vector<float> values;
  int64_t count;

  explicit Row(int64_t size) : values((size + BLOCK - 1) / BLOCK * BLOCK), count(size) {}

  template <class Element>
  void load(const Element* from) {
    for (int64_t i = 0; i < count; i += BLOCK) load_block(from + i, std::min(BLOCK, count - i), values.data() + i);
  }
  template <class Element>
  void store(Element* to) const {
    for (int64_t i = 0; i < count; i += BLOCK) store_block(values.data() + i, std::min(BLOCK, count - i), to + i);
  }
};

__attribute__((noinline)) float sum(const Row& row) {
  float lanes[LANES] = {}, total = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(row.values.size()); i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += row.values[i + lane];
  for (const float lane : lanes) total += lane;
  return total;
}

__attribute__((noinline)) float sum_of_squares(const Row& row) {
  float lanes[LANES] = {}, total = 0;
  for (int64_t i = 0; i < static_cast<int64_t>(row.values.size()); i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += row.values[i + lane] * row.values[i + lane];
  for (const float lane : lanes) total += lane;
  return total;
}

__attribute__((noinline)) float sum_of_squares_around(const Row& row, float center) {
  float lanes[LANES] = {}, total = 0;
  for (int64_t i = 0; i < row.count; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) {
      const float away = i + lane < row.count ? row.values[i + lane] - center : 0.0f;
      lanes[lane] += away * away;
    }
  for (const float lane : lanes) total += lane;
  return total;
}

struct Mean {
  static int64_t columns(int64_t) { return 1; }
  void operator()(Row& row) const { row.values[0] = sum(row) / static_cast<float>(row.count); }
};

struct Sum {
  static int64_t columns(int64_t) { return 1; }
  void operator()(Row& row) const { row.values[0] = sum(row); }
};

struct Softmax {
  static int64_t columns(int64_t count) { return count; }
  void operator()(Row& row) const {
    float greatest = -std::numeric_limits<float>::infinity(), total = 0;
    for (int64_t i = 0; i < row.count; i++) greatest = std::max(greatest, row.values[i]);
    for (int64_t i = 0; i < row.count; i++) row.values[i] = std::exp(row.values[i] - greatest);
    for (int64_t i = 0; i < row.count; i++) total += row.values[i];
    for (int64_t i = 0; i < row.count; i++) row.values[i] /= total;
  }
};

struct LayerNorm {
  std::optional<Row> weight, bias;
  float epsilon;

  static int64_t columns(int64_t count) { return count; }
  __attribute__((noinline)) void operator()(Row& row) const {
    const float size = static_cast<float>(row.count), mean = sum(row) / size;
    const float scale = 1.0f / std::sqrt(sum_of_squares_around(row, mean) / size + epsilon);
    for (int64_t i = 0; i < row.count; i++) {
      const float normed = (row.values[i] - mean) * scale;
      row.values[i] = (weight ? normed * weight->values[i] : normed) + (bias ? bias->values[i] : 0.0f);
    }
  }
};

struct RmsNorm {
  std::optional<Row> weight;
  bool rounds;  // to bfloat16 ahead of the product with the weight
  float epsilon;

  static int64_t columns(int64_t count) { return count; }
  __attribute__((noinline)) void operator()(Row& row) const {
    const float scale = 1.0f / std::sqrt(sum_of_squares(row) / static_cast<float>(row.count) + epsilon);
    const auto size = static_cast<int64_t>(row.values.size());
    float* values = row.values.data();
    for (int64_t i = 0; i < size; i++) values[i] *= scale;
    for (int64_t i = 0; rounds && i < size; i++) {
      Bfloat16 narrow;
      rounded(values[i], narrow);
      values[i] = widened(narrow);
    }
    if (!weight) return;
    const float* __restrict by = weight->values.data();
    for (int64_t i = 0; i < size; i++) values[i] *= by[i];
  }
};

template <class Element, class Function>
void each_row(const Rows& x, Tensor& out, const Function& function) {
  const int64_t count = x.columns, columns = Function::columns(count);
  parallel_for(x.count, std::max<int64_t>(1, GRAIN / std::max<int64_t>(count, 1)), [&](int64_t begin, int64_t end) {
    Row row(count), result(columns);
    for (int64_t i = begin; i < end; i++) {
      row.load(x.row<Element>(i));
      function(row);
      std::copy_n(row.values.begin(), columns, result.values.begin());
      result.store(static_cast<Element*>(out.data_ptr()) + i * columns);
    }
  });
}

template <class Function>
Tensor reduce(const Tensor& x, const Function& function) {
  const ScalarType type = x.scalar_type();
  if ((type != ScalarType::Float && type != ScalarType::BFloat16) || x.dim() == 0 || x.size(-1) == 0)
    throw std::invalid_argument("x: expected float32 or bfloat16 with a last dimension that is not empty");
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = Function::columns(sizes.back());
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  Tensor out = empty(sizes, dtype);
  (type == ScalarType::Float ? each_row<float, Function> : each_row<Bfloat16, Function>)(Rows(x), out, function);
  return out;
}

std::optional<Row> whole(const std::optional<Tensor>& tensor, int64_t count) {
  if (!tensor) return std::nullopt;
  if (tensor->dim() != 1 || tensor->size(0) != count) throw std::invalid_argument("weight, bias: expected a row of x");
  const Tensor plain = dense(*tensor);
  Row row(count);
  if (plain.scalar_type() == ScalarType::Float)
    row.load(static_cast<const float*>(plain.data_ptr()));
  else if (plain.scalar_type() == ScalarType::BFloat16)
    row.load(static_cast<const Bfloat16*>(plain.data_ptr()));
  else
    throw std::invalid_argument("weight, bias: expected float32 or bfloat16");
  return row;
}

// out [outer, 1, inner] = the sum of x [outer, count, inner], element after element along the middle.
template <class Element>
void sum_columns(const Tensor& x, int64_t outer, int64_t count, int64_t inner, Tensor& out) {
  const auto* from = static_cast<const Element*>(x.data_ptr());
  auto* to = static_cast<Element*>(out.data_ptr());
  const int64_t blocks = (inner + BLOCK - 1) / BLOCK;
  const int64_t grain = std::max<int64_t>(1, GRAIN / (BLOCK * std::max<int64_t>(count, 1)));
  parallel_for(outer * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t number = begin; number < end; number++) {
      const int64_t place = number / blocks, first = number % blocks * BLOCK, here = std::min(BLOCK, inner - first);
      float total[BLOCK] = {}, values[BLOCK];
      for (int64_t i = 0; i < count; i++) {
        load_block(from + (place * count + i) * inner + first, here, values);
        for (int64_t lane = 0; lane < BLOCK; lane++) total[lane] += values[lane];
      }
      store_block(total, here, to + place * inner + first);
    }
  });
}

Tensor exact_sum(const Tensor& x, int64_t dim) {
  const int64_t last = x.dim() - 1;
  if (dim < 0 || dim > last) throw std::invalid_argument("dim: expected a dimension of x, counted from its first");
  if (dim == last) return reduce(x, Sum{});
  const ScalarType type = x.scalar_type();
  if ((type != ScalarType::Float && type != ScalarType::BFloat16) || x.size(dim) == 0)
    throw std::invalid_argument("x: expected float32 or bfloat16 with a dimension that is not empty");
  const Tensor plain = dense(x);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  int64_t outer = 1, inner = 1;
  for (int64_t d = 0; d < dim; d++) outer *= sizes[d];
  for (int64_t d = dim + 1; d <= last; d++) inner *= sizes[d];
  const int64_t count = std::exchange(sizes[dim], 1);
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  Tensor out = empty(sizes, dtype);
  (type == ScalarType::Float ? sum_columns<float> : sum_columns<Bfloat16>)(plain, outer, count, inner, out);
  return out;
}

Tensor exact_mean(const Tensor& x) { return reduce(x, Mean{}); }

Tensor exact_softmax(const Tensor& x) { return reduce(x, Softmax{}); }

Tensor exact_layer_norm(const Tensor& x, const std::optional<Tensor>& weight, const std::optional<Tensor>& bias,
                        double epsilon) {
  const int64_t count = x.dim() ? x.size(-1) : 0;
  return reduce(x, LayerNorm{whole(weight, count), whole(bias, count), static_cast<float>(epsilon)});
}

Tensor exact_rms_norm(const Tensor& x, const std::optional<Tensor>& weight, double epsilon) {
  const bool rounds = x.scalar_type() == ScalarType::BFloat16 && weight && weight->scalar_type() == ScalarType::BFloat16;
  return reduce(x, RmsNorm{whole(weight, x.dim() ? x.size(-1) : 0), rounds, static_cast<float>(epsilon)});
}

std::optional<Tensor> borrowed_or_none(AtenTensorHandle* handle) {
  return handle ? std::optional<Tensor>(borrowed(*handle)) : std::nullopt;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_exact_mean(AtenTensorHandle x,
                                                                                           AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("exact_mean", [&] { return aoti_torch_new_tensor_handle(exact_mean(borrowed(x)).get(), out); });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_exact_sum(
    AtenTensorHandle x, int64_t dim, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("exact_sum", [&] { return aoti_torch_new_tensor_handle(exact_sum(borrowed(x), dim).get(), out); });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_exact_softmax(AtenTensorHandle x,
                                                                                              AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("exact_softmax", [&] { return aoti_torch_new_tensor_handle(exact_softmax(borrowed(x)).get(), out); });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_exact_layer_norm(
    AtenTensorHandle x, AtenTensorHandle* weight, AtenTensorHandle* bias, double epsilon, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("exact_layer_norm", [&] {
    const Tensor result = exact_layer_norm(borrowed(x), borrowed_or_none(weight), borrowed_or_none(bias), epsilon);
    return aoti_torch_new_tensor_handle(result.get(), out);
  });
}

extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_exact_rms_norm(
    AtenTensorHandle x, AtenTensorHandle* weight, double epsilon, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("exact_rms_norm", [&] {
    return aoti_torch_new_tensor_handle(exact_rms_norm(borrowed(x), borrowed_or_none(weight), epsilon).get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("exact_rms_norm(Tensor x, Tensor? weight, float epsilon) -> Tensor");
  library.def("exact_mean(Tensor x) -> Tensor");
  library.def("exact_sum(Tensor x, int dim) -> Tensor");
  library.def("exact_softmax(Tensor x) -> Tensor");
  library.def("exact_layer_norm(Tensor x, Tensor? weight, Tensor? bias, float epsilon) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("exact_mean", TORCH_BOX(&specstep::exact_mean));
  library.impl("exact_sum", TORCH_BOX(&specstep::exact_sum));
  library.impl("exact_softmax", TORCH_BOX(&specstep::exact_softmax));
  library.impl("exact_rms_norm", TORCH_BOX(&specstep::exact_rms_norm));
  library.impl("exact_layer_norm", TORCH_BOX(&specstep::exact_layer_norm));
}
