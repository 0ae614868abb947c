// specstep::small_linear on the CPU: y = x @ weight.T + bias for up to MAX_ROWS rows of x, reading the weight once.
//
// With few rows a linear layer costs what reading its weight costs. So the weight [N, K] stays plain row-major and is
// streamed, with software prefetch; x is packed once per call into the order in which it is read. A tile of
// ROWS x COLUMNS outputs keeps one vector accumulator per output and loads each weight vector once.
//
// Only PyTorch's stable C interface is used, so that the library outlives the PyTorch version it was built with. The
// threads are those of parallel.h. Letters: M rows, N columns, K depth.
#include <torch/csrc/stable/library.h>

#include <cstdlib>
#include <memory>
#include <new>

#include "../parallel.h"
#include "small_linear.h"
#include "tile.h"

namespace specstep {
namespace {

constexpr int64_t MAX_ROWS = 32;             // with 16 or more arithmetic counts; oneDNN is faster from 48 on
constexpr int64_t PACKED_CHUNK = 32 * 1024;  // bytes of x used at a time: they stay in the first-level cache
constexpr int64_t WEIGHT_BLOCK = 64 * 1024;  // bytes of weight per block when K is cut in chunks: second-level cache
constexpr int64_t TASK_BYTES = 32 * 1024;    // least weight per thread: takes about as long as waking the thread
constexpr int64_t PREFETCH_BEYOND = 4 * 1024;  // bytes beyond the next block; the next block alone comes 20% too late
constexpr int64_t MAX_GROUPS = 16;

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// How M, N and K are cut. x is packed as [chunk][tile][step][row of the tile][STEP], zero beyond M and K.
template <class Step, int ROWS>
struct Plan {
  int64_t rows, columns, depth, tiles, steps, chunk, groups;

  Plan(int64_t m, int64_t n, int64_t k) : rows(m), columns(n), depth(k) {
    tiles = divide_up(m, ROWS);
    steps = divide_up(k, Step::STEP);
    const int64_t step_bytes = tiles * ROWS * Step::STEP * sizeof(typename Step::Packed);
    const int64_t chunks = std::max<int64_t>(1, divide_up(steps * step_bytes, PACKED_CHUNK));
    chunk = std::max<int64_t>(1, divide_up(steps, chunks));
    const int64_t fitting = WEIGHT_BLOCK / std::max<int64_t>(1, group_bytes());
    groups = chunk >= steps ? 1 : std::clamp<int64_t>(fitting, 1, MAX_GROUPS);
  }
  int64_t group_bytes() const { return COLUMNS * depth * static_cast<int64_t>(sizeof(typename Step::Element)); }
  int64_t packed_at(int64_t first_step, int64_t tile_index, int64_t steps_here) const {
    return (first_step * tiles + tile_index * steps_here) * ROWS * Step::STEP;
  }
};

template <class Step, int ROWS>
void pack(const Plan<Step, ROWS>& plan, const typename Step::Element* x, typename Step::Packed* packed) {
  for (int64_t first = 0; first < plan.steps; first += plan.chunk) {
    const int64_t steps = std::min(plan.chunk, plan.steps - first);
    for (int64_t row = 0; row < plan.tiles * ROWS; row++) {
      auto* to = packed + plan.packed_at(first, row / ROWS, steps) + row % ROWS * Step::STEP;
      for (int64_t step = first; step < first + steps; step++, to += ROWS * Step::STEP) {
        const int64_t k = step * Step::STEP;
        const int64_t count = row < plan.rows ? std::min<int64_t>(Step::STEP, plan.depth - k) : 0;
        copy_padded<Step>(x + row * plan.depth + k, count, to);
      }
    }
  }
}

// One group of columns times all rows over [step, step + steps) of K.
template <class Step, int ROWS>
void group_of_columns(const Plan<Step, ROWS>& plan, const typename Step::Packed* packed, int64_t step, int64_t steps,
                      const typename Step::Element* const* weight, const char*& ahead, float* sums) {
  using Element = typename Step::Element;
  const int64_t whole = std::min(steps, plan.depth / Step::STEP - step);
  const int64_t stride = COLUMNS * Step::STEP * static_cast<int64_t>(sizeof(Element)) / plan.tiles;
  for (int64_t t = 0; t < plan.tiles; t++, ahead += stride * steps)
    tile<Step, ROWS>(packed + plan.packed_at(step, t, steps), weight, whole,
                     Prefetch{ahead, stride, divide_up(stride, 64)}, sums + t * ROWS * COLUMNS);
  if (whole == steps) return;
  Element last[COLUMNS][Step::STEP] = {};  // K ends within a step
  const Element* from[COLUMNS];
  for (int c = 0; c < COLUMNS; c++) {
    from[c] = last[c];
    std::memcpy(last[c], weight[c] + whole * Step::STEP, plan.depth % Step::STEP * sizeof(Element));
  }
  for (int64_t t = 0; t < plan.tiles; t++)
    tile<Step, ROWS>(packed + plan.packed_at(step, t, steps) + whole * ROWS * Step::STEP, from, 1, Prefetch{},
                     sums + t * ROWS * COLUMNS);
}

// Sums [rows][COLUMNS] plus bias to `count` outputs per row, a vector of whole rows at a time.
template <class Element>
void store(const float* sums, int64_t rows, int64_t count, const Element* bias, Element* out, int64_t stride) {
  constexpr int64_t TOGETHER = LANES / COLUMNS;
  float shift[LANES] = {};
  for (int64_t i = 0; bias && i < LANES; i++) shift[i] = i % COLUMNS < count ? to_float(bias[i % COLUMNS]) : 0.0f;
  for (int64_t row = 0; row < rows; row += TOGETHER) {
    Element results[LANES];
    rounded(load<Floats>(sums + row * COLUMNS) + load<Floats>(shift), results);
    for (int64_t r = 0; r < std::min(TOGETHER, rows - row); r++, out += stride) {
      if (count == COLUMNS)
        std::memcpy(out, results + r * COLUMNS, COLUMNS * sizeof(Element));  // a constant size is one instruction
      else
        std::memcpy(out, results + r * COLUMNS, count * sizeof(Element));
    }
  }
}

// All rows times the columns [first, first + count) with count <= groups * COLUMNS.
template <class Step, int ROWS>
void block(const Plan<Step, ROWS>& plan, const typename Step::Packed* packed, const typename Step::Element* weight,
           const typename Step::Element* bias, typename Step::Element* out, int64_t first, int64_t count) {
  float sums[MAX_GROUPS * COLUMNS * MAX_ROWS + LANES];  // store() may read past the last row
  const int64_t groups = divide_up(count, COLUMNS), group_sums = plan.tiles * ROWS * COLUMNS;
  std::fill_n(sums, groups * group_sums + LANES, 0.0f);
  const char* ahead = reinterpret_cast<const char*>(weight + (first + count) * plan.depth) + PREFETCH_BEYOND;
  for (int64_t step = 0; step < plan.steps; step += plan.chunk) {
    for (int64_t group = 0; group < groups; group++) {
      const typename Step::Element* from[COLUMNS];
      for (int64_t c = 0; c < COLUMNS; c++)  // beyond N: the last column again, its sums unused
        from[c] = weight + (first + std::min(group * COLUMNS + c, count - 1)) * plan.depth + step * Step::STEP;
      group_of_columns(plan, packed, step, std::min(plan.chunk, plan.steps - step), from, ahead,
                       sums + group * group_sums);
    }
  }
  for (int64_t group = 0; group < groups; group++) {
    const int64_t n = first + group * COLUMNS;
    store(sums + group * group_sums, plan.rows, std::min<int64_t>(COLUMNS, first + count - n), bias ? bias + n : nullptr,
          out + n, plan.columns);
  }
}

template <class Step, int ROWS>
void multiply_tiles(const Plan<Step, ROWS>& plan, const void* x, const void* weight, const void* bias, void* out) {
  using Element = typename Step::Element;
  using Packed = typename Step::Packed;
  const size_t bytes = (plan.steps * plan.tiles * ROWS * Step::STEP * sizeof(Packed) + 63) / 64 * 64;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, std::max<size_t>(bytes, 64)), &std::free);
  if (!memory) throw std::bad_alloc();
  auto* packed = static_cast<Packed*>(memory.get());
  pack(plan, static_cast<const Element*>(x), packed);
  const int64_t width = plan.groups * COLUMNS;
  const int64_t grain = divide_up(TASK_BYTES, plan.groups * std::max<int64_t>(1, plan.group_bytes()));
  parallel_for(divide_up(plan.columns, width), grain, [&](int64_t begin, int64_t end) {
    for (int64_t first = begin * width; first < std::min(end * width, plan.columns); first += width)
      block(plan, packed, static_cast<const Element*>(weight), static_cast<const Element*>(bias),
            static_cast<Element*>(out), first, std::min(width, plan.columns - first));
  });
}

template <class Step>
void multiply(int64_t m, int64_t n, int64_t k, const void* x, const void* weight, const void* bias, void* out) {
  if (m == 1) return multiply_tiles(Plan<Step, 1>(m, n, k), x, weight, bias, out);
  if (m == 2) return multiply_tiles(Plan<Step, 2>(m, n, k), x, weight, bias, out);
  multiply_tiles(Plan<Step, 4>(m, n, k), x, weight, bias, out);
}

Tensor aten_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  StableIValue stack[] = {torch::stable::detail::from(x), torch::stable::detail::from(weight),
                          torch::stable::detail::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack, TORCH_ABI_VERSION));
  return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace

static bool streams(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  const ScalarType type = x.scalar_type();
  return (type == ScalarType::Float || type == ScalarType::BFloat16) && weight.scalar_type() == type &&
         weight.dim() == 2 && x.dim() >= 1 && x.size(-1) == weight.size(1) && weight.is_contiguous() &&
         (!bias || (bias->scalar_type() == type && bias->is_contiguous() && bias->dim() == 1 &&
                    bias->size(0) == weight.size(0)));
}

Tensor small_linear(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias) {
  if (!streams(x, weight, bias)) return aten_linear(x, weight, bias);  // which also reports wrong shapes and types
  const int64_t n = weight.size(0), k = weight.size(1);
  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = n;
  int64_t m = 1;
  for (size_t d = 0; d + 1 < sizes.size(); d++) m *= sizes[d];
  if (m > MAX_ROWS) return aten_linear(x, weight, bias);
  const Tensor rows = x.is_contiguous() ? x : torch::stable::contiguous(x);
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  Tensor out = empty(sizes, dtype);
  if (m == 0 || n == 0) return out;
  const auto run = x.scalar_type() == ScalarType::Float ? multiply<FloatStep> : multiply<Bfloat16Step>;
  run(m, n, k, rows.data_ptr(), weight.data_ptr(), bias ? bias->data_ptr() : nullptr, out.data_ptr());
  return out;
}

}  // namespace specstep

// What compiled models call: the name is AOTInductor's convention for an operator named small_linear on the CPU.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_small_linear(
    AtenTensorHandle x, AtenTensorHandle weight, AtenTensorHandle* bias, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("small_linear", [&] {
    const auto optional_bias = bias ? std::optional<Tensor>(borrowed(*bias)) : std::nullopt;
    return aoti_torch_new_tensor_handle(small_linear(borrowed(x), borrowed(weight), optional_bias).get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("small_linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("small_linear", TORCH_BOX(&specstep::small_linear));
}
