// specstep::compact on the CPU: see reference.py. What stays where it is costs nothing: most accepted paths are the
// first nodes of their tree.
#include <torch/csrc/stable/library.h>

#include <cstring>
#include <stdexcept>

#include "../parallel.h"
#include "../tensor.h"

namespace specstep {
namespace {

struct Move {
  int64_t row, source, target;  // slots
};

// What an accepted path moves, in the order of its depths: no source is the target of an earlier move of its row.
std::vector<Move> moves_of(const Tensor& lengths, const Tensor& path, const Tensor& accepted) {
  const Tensor held[] = {dense(lengths), dense(path), dense(accepted)};
  const auto* starts = static_cast<const int64_t*>(held[0].data_ptr());
  const auto* counts = static_cast<const int64_t*>(held[2].data_ptr());
  const int64_t batch = path.size(0), width = path.size(1);
  std::vector<Move> moves;
  for (int64_t row = 0; row < batch; row++) {
    const int64_t* nodes = static_cast<const int64_t*>(held[1].data_ptr()) + row * width;
    for (int64_t depth = 1; depth < width && depth <= counts[row] && starts[row] >= 0; depth++)
      if (nodes[depth] > depth) moves.push_back({row, starts[row] + nodes[depth], starts[row] + depth});
  }
  return moves;
}

void move_rows(const Tensor& cache, const std::vector<Move>& moves) {
  const int64_t heads = cache.size(1), slots = cache.size(2), size = cache.size(3);
  const int64_t bytes = static_cast<int64_t>(cache.element_size()), apart = cache.stride(3) * bytes;
  char* data = static_cast<char*>(cache.data_ptr());
  for (const Move& move : moves) {
    if (move.source >= slots) continue;
    for (int64_t head = 0; head < heads; head++) {
      char* first = data + (move.row * cache.stride(0) + head * cache.stride(1)) * bytes;
      const char* source = first + move.source * cache.stride(2) * bytes;
      char* target = first + move.target * cache.stride(2) * bytes;
      if (apart == bytes) {
        std::memcpy(target, source, size * bytes);
      } else {
        for (int64_t i = 0; i < size; i++) std::memcpy(target + i * apart, source + i * apart, bytes);
      }
    }
  }
}

// `cache(i)` is the i-th of `count` caches.
template <class Cache>
void compact(int64_t count, const Cache& cache, const Tensor& lengths, const Tensor& path, const Tensor& accepted) {
  if (path.dim() != 2 || lengths.numel() != path.size(0) || accepted.numel() != path.size(0))
    throw std::invalid_argument("specstep::compact: expected lengths [B], path [B, P] and accepted [B], int64");
  const std::vector<Move> moves = moves_of(lengths, path, accepted);
  if (moves.empty()) return;
  parallel_for(count, 4, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) move_rows(cache(i), moves);
  });
}

void compact_all(std::vector<Tensor> caches, const Tensor& lengths, const Tensor& path, const Tensor& accepted) {
  const auto cache = [&](int64_t i) -> const Tensor& { return caches[i]; };
  compact(static_cast<int64_t>(caches.size()), cache, lengths, path, accepted);
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_compact_native(
    const AtenTensorHandle* caches, int64_t count, AtenTensorHandle lengths, AtenTensorHandle path,
    AtenTensorHandle accepted, void* /* in place of an output */) {
  using namespace specstep;
  return guarded("compact", [&] {
    const auto cache = [&](int64_t i) {
      AtenTensorHandle reference;
      STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_new_tensor_handle(caches[i], &reference));
      return Tensor(reference);
    };
    compact(count, cache, borrowed(lengths), borrowed(path), borrowed(accepted));
    return AOTI_TORCH_SUCCESS;
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def("compact_native(Tensor(a!)[] caches, Tensor lengths, Tensor path, Tensor accepted) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("compact_native", TORCH_BOX(&specstep::compact_all));
}
