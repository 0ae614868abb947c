// specstep::tree_attention on the CPU: see reference.py. Exact: the bits of one query's result are those that it has
// when it is computed alone, once its ancestors are committed, with any nodes, rows, slots and threads. Nothing of size
// [T, S] is kept.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <string>

#include "parts.h"

namespace specstep {
namespace {

using namespace attention;

void expect(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string("specstep::tree_attention: expected ") + what);
}

template <class Value>
const Value* values(const Tensor& tensor, ScalarType type, const char* what) {
  expect(tensor.scalar_type() == type && tensor.is_contiguous(), what);
  return static_cast<const Value*>(tensor.data_ptr());
}

void run_over_bytes(ScalarType type, const Call& call) {
  if (type == ScalarType::Float) return Attention<WideBytes<float>, WideBytes<float>>(call).run();
  if (type == ScalarType::Half) return Attention<WideBytes<Float16>, WideBytes<Float16>>(call).run();
#ifdef __AVX512BF16__
  Attention<PairsOfBytes, PairsOfBytes>(call).run();
#else
  Attention<WideBytes<Bfloat16>, WideBytes<Bfloat16>>(call).run();
#endif
}

void run(ScalarType type, const Call& call) {
  if (type == ScalarType::Float) return Attention<Wide<float>, Wide<float>>(call).run();
  if (type == ScalarType::Half) return Attention<Wide<Float16>, Wide<Float16>>(call).run();
#ifdef __AVX512BF16__
  // Weights as bfloat16 too, as the reference has them: a fifth faster than floats. The error is half the reference's.
  Attention<Pairs, Pairs>(call).run();
#else
  Attention<Wide<Bfloat16>, Wide<Bfloat16>>(call).run();
#endif
}

// Bytes of k and v that the nodes see.
int64_t bytes_read(const Call& call, const int64_t* lengths, int64_t keys, int64_t element) {
  int64_t slots = 0;
  for (size_t row = 0; row < call.rows.size(); row++) {
    int64_t first = lengths[row];
    for (const Node& node : call.rows[row].nodes) first = std::min(first, std::max<int64_t>(0, node.first));
    slots += std::min(lengths[row] + keys, call.k.count) - first;
  }
  return slots * call.k.heads * (call.k.size + call.v.size) * element;
}

Tensor tree_attention(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& lengths, const Tensor& depths,
    const Tensor& ancestors, const Tensor& key_depths, double scale, int64_t window, double softcap,
    const std::optional<Tensor>& sinks) {
  const ScalarType type = q.scalar_type();
  expect(type == ScalarType::Float || type == ScalarType::BFloat16 || type == ScalarType::Half,
         "float32, bfloat16 or float16");
  const bool bytes = k.scalar_type() == ScalarType::Char;
  expect((bytes || k.scalar_type() == type) && v.scalar_type() == k.scalar_type(),
         "q, k and v of one dtype, or k and v of int8");
  const auto size_of = [&](const Heads& heads) { return bytes ? Bytes::size(heads.size) : heads.size; };
  Call call{Heads(q), Heads(k), Heads(v), {}, Scores(scale, softcap), nullptr, nullptr};
  const int64_t batch = call.q.batch, nodes = call.q.count;
  expect(call.k.batch == batch && call.v.batch == batch && call.k.heads == call.v.heads && call.k.count == call.v.count,
         "k [B, H_kv, S, D] and v [B, H_kv, S, DV]");
  expect(call.k.heads > 0 && call.q.heads % call.k.heads == 0 && call.q.size == size_of(call.k),
         "q [B, G * H_kv, T, D], and k with scales behind its rows if it is int8");
  expect(scale >= 0, "a scale that is not negative");
  const Tensor held[] = {dense(lengths), dense(depths), dense(ancestors), dense(key_depths)};
  expect(held[0].numel() == batch, "lengths [B]");
  expect(held[1].dim() == 2 && held[1].size(0) == batch && held[1].size(1) == nodes, "depths [B, T]");
  expect(held[2].dim() == 3 && held[2].size(0) == batch && held[2].size(1) == nodes, "ancestors [B, T, W]");
  expect(held[3].dim() == 2 && held[3].size(0) == batch, "key_depths [B, M]");
  const int64_t words = held[2].size(2), keys = held[3].size(1);
  expect(words * 32 >= keys, "a bit for each tree key");
  const auto* length = values<int64_t>(held[0], ScalarType::Long, "lengths, int64");
  const auto* depth = values<int64_t>(held[1], ScalarType::Long, "depths, int64");
  const auto* bits = values<int32_t>(held[2], ScalarType::Int, "ancestors, int32");
  const auto* key_depth = values<int64_t>(held[3], ScalarType::Long, "key_depths, int64");
  if (sinks) expect(sinks->numel() == call.q.heads, "sinks [H]");
  if (sinks) call.sinks = values<float>(*sinks, ScalarType::Float, "contiguous sinks, float32");
  for (int64_t row = 0; row < batch; row++)
    call.rows.emplace_back(Where{length[row], depth + row * nodes, key_depth + row * keys, bits + row * nodes * words,
                                 nodes, keys, words, call.k.count, window});

  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(q.get(), &dtype));
  Tensor out = empty({batch, nodes, call.q.heads, size_of(call.v)}, dtype);
  call.out = out.data_ptr();
  bytes ? run_over_bytes(type, call) : run(type, call);
  record_read([&] { return bytes_read(call, length, keys, static_cast<int64_t>(k.element_size())); });
  return out;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_tree_attention_native(
    AtenTensorHandle q, AtenTensorHandle k, AtenTensorHandle v, AtenTensorHandle lengths, AtenTensorHandle depths,
    AtenTensorHandle ancestors, AtenTensorHandle key_depths, double scale, int64_t window, double softcap,
    AtenTensorHandle* sinks, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("tree_attention", [&] {
    const auto optional_sinks = sinks ? std::optional<Tensor>(borrowed(*sinks)) : std::nullopt;
    const Tensor result =
        tree_attention(borrowed(q), borrowed(k), borrowed(v), borrowed(lengths), borrowed(depths), borrowed(ancestors),
                       borrowed(key_depths), scale, window, softcap, optional_sinks);
    return aoti_torch_new_tensor_handle(result.get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "tree_attention_native(Tensor q, Tensor k, Tensor v, Tensor lengths, Tensor depths, Tensor ancestors, "
      "Tensor key_depths, float scale, int window, float softcap, Tensor? sinks) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("tree_attention_native", TORCH_BOX(&specstep::tree_attention));
}
