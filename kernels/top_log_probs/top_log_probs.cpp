// specstep::top_log_probs on the CPU: see reference.py.
#include <torch/csrc/stable/library.h>

#include <optional>
#include <tuple>

#include "../parallel.h"
#include "../row.h"

namespace specstep {
namespace {

struct Best {
  float key;
  int64_t place;
};

// The `top` best so far, the best first, the lowest place first among equals if they are offered in order.
class Ranking {
 public:
  explicit Ranking(int64_t top) : top_(top) { best_.reserve(top + 1); }
  float bar() const { return static_cast<int64_t>(best_.size()) < top_ ? NONE : best_.back().key; }
  bool full() const { return static_cast<int64_t>(best_.size()) == top_; }
  void offer(float key, int64_t place) {
    if (full() && !(key > best_.back().key)) return;
    if (full()) best_.pop_back();
    auto at = best_.end();
    while (at != best_.begin() && key > (at - 1)->key) --at;
    best_.insert(at, {key, place});
  }
  const std::vector<Best>& best() const { return best_; }

 private:
  int64_t top_;
  std::vector<Best> best_;
};

float log_sum(const float* x, int64_t count) {
  const float greatest = maximum(x, count);
  if (!(greatest > NONE)) return NONE;
  return greatest + static_cast<float>(std::log(sum_of_exp(x, count, greatest)));
}

// What may be looked at of a row, with noise or without.
struct Plain {
  static constexpr float MOST = 0;
  float bound(int64_t) const { return 0; }
  float operator()(int64_t) const { return 0; }
};
struct Noisy {
  static constexpr float MOST = MOST_NOISE;
  Noise noise;
  float temperature;
  const int64_t* ids;
  uint32_t token(int64_t place) const { return static_cast<uint32_t>(ids ? ids[place] : place); }
  float bound(int64_t place) const { return temperature * noise.bound(token(place)); }
  float operator()(int64_t place) const { return temperature * noise(token(place)); }
};

template <class Extra>
void rank(const float* x, int64_t count, const Extra& extra, float most, Ranking& ranking) {
  float bound[BLOCK];
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t size = std::min(BLOCK, count - first);
    if (ranking.full() && !(maximum(x + first, size) + most > ranking.bar())) continue;
    for (int64_t i = 0; i < size; i++) bound[i] = x[first + i] + extra.bound(first + i);
    if (ranking.full() && !(maximum(bound, size) > ranking.bar())) continue;
    for (int64_t i = 0; i < size; i++)
      if (!ranking.full() || bound[i] > ranking.bar()) ranking.offer(x[first + i] + extra(first + i), first + i);
  }
}

struct Call {
  Logits logits;
  const int64_t *nodes, *wanted, *seeds, *positions, *ids, *masked;
  const int32_t* allowed;
  const float* temperature;
  int64_t places, top, mask_words;
  int64_t* tokens;
  float *log_probs, *total;

  void one(int64_t index) const {
    const int64_t row = index / places;
    std::fill_n(tokens + index * top, top, 0);
    std::fill_n(log_probs + index * top, top, NONE);
    total[index] = 0;
    if (wanted[row] == 0) return;
    const int64_t node = std::clamp<int64_t>(nodes[index], 0, logits.nodes - 1);
    const float* x = logits.floats(row, node);
    const bool restricted = masked && masked[row] != 0;
    if (restricted || !logits.wide) {
      float* copied = scratch(1, logits.count).data();
      logits.copy(row, node, copied);
      if (restricted) keep_allowed(copied, logits.count, allowed + (row * logits.nodes + node) * mask_words);
      x = copied;
    }
    total[index] = log_sum(x, logits.count);
    Ranking ranking(std::min(top, logits.count));
    if (temperature[row] > 0) {
      const Noisy noisy{Noise(seeds[row], positions[index]), temperature[row], ids};
      rank(x, logits.count, noisy, temperature[row] * Noisy::MOST, ranking);
    } else {
      rank(x, logits.count, Plain(), Plain::MOST, ranking);
    }
    for (size_t i = 0; i < ranking.best().size(); i++) {
      const int64_t place = ranking.best()[i].place;
      tokens[index * top + i] = ids ? ids[place] : place;
      log_probs[index * top + i] = x[place] - total[index];
    }
  }
};

std::tuple<Tensor, Tensor, Tensor> top_log_probs(
    const Tensor& logits, const Tensor& nodes, const Tensor& wanted, const Tensor& temperature, const Tensor& seeds,
    const Tensor& positions, const std::optional<Tensor>& ids, int64_t top, const std::optional<Tensor>& allowed,
    const std::optional<Tensor>& masked) {
  const Tensor held[] = {dense(nodes), dense(wanted), dense(temperature), dense(seeds), dense(positions)};
  const auto given = [](const std::optional<Tensor>& one) { return one ? std::optional<Tensor>(dense(*one)) : std::nullopt; };
  const std::optional<Tensor> names = given(ids), bits = given(allowed), restricted = given(masked);
  int32_t integer, single;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(nodes.get(), &integer));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(temperature.get(), &single));
  Call call{Logits(logits)};
  if (names && names->size(0) != call.logits.count) throw std::invalid_argument("specstep::top_log_probs: expected ids [V]");
  if (bits && !(restricted && bits->size(1) == call.logits.nodes && bits->size(2) * 32 >= call.logits.count))
    throw std::invalid_argument("specstep::top_log_probs: expected allowed [B, N, ceil(V / 32)], and masked");
  const int64_t batch = held[0].size(0), places = held[0].size(1);
  Tensor tokens = empty({batch, places, top}, integer), log_probs = empty({batch, places, top}, single);
  Tensor total = empty({batch, places}, single);
  call.nodes = values<int64_t>(held[0]), call.wanted = values<int64_t>(held[1]);
  call.temperature = values<float>(held[2]), call.seeds = values<int64_t>(held[3]);
  call.positions = values<int64_t>(held[4]), call.ids = names ? values<int64_t>(*names) : nullptr;
  call.masked = bits ? values<int64_t>(*restricted) : nullptr;
  call.allowed = bits ? values<int32_t>(*bits) : nullptr;
  call.places = places, call.top = top, call.mask_words = bits ? bits->size(2) : 0;
  call.tokens = static_cast<int64_t*>(tokens.data_ptr());
  call.log_probs = static_cast<float*>(log_probs.data_ptr());
  call.total = static_cast<float*>(total.data_ptr());
  const bool any = std::any_of(call.wanted, call.wanted + batch, [](int64_t row) { return row != 0; });
  parallel_for(batch * places, any ? 1 : batch * places + 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) call.one(i);
  });
  return {tokens, log_probs, total};
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_top_log_probs_native(
    AtenTensorHandle logits, AtenTensorHandle nodes, AtenTensorHandle wanted, AtenTensorHandle temperature,
    AtenTensorHandle seeds, AtenTensorHandle positions, AtenTensorHandle* ids, int64_t top, AtenTensorHandle* allowed,
    AtenTensorHandle* masked, AtenTensorHandle* tokens, AtenTensorHandle* log_probs, AtenTensorHandle* total) {
  using namespace specstep;
  return guarded("top_log_probs", [&] {
    const auto given = [](AtenTensorHandle* one) { return one ? std::optional<Tensor>(borrowed(*one)) : std::nullopt; };
    const auto [best, own, sum] =
        top_log_probs(borrowed(logits), borrowed(nodes), borrowed(wanted), borrowed(temperature), borrowed(seeds),
                      borrowed(positions), given(ids), top, given(allowed), given(masked));
    AOTITorchError error = aoti_torch_new_tensor_handle(best.get(), tokens);
    if (!error) error = aoti_torch_new_tensor_handle(own.get(), log_probs);
    return error ? error : aoti_torch_new_tensor_handle(sum.get(), total);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "top_log_probs_native(Tensor logits, Tensor nodes, Tensor wanted, Tensor temperature, Tensor seeds, "
      "Tensor positions, Tensor? ids, int top, Tensor? allowed, Tensor? masked) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("top_log_probs_native", TORCH_BOX(&specstep::top_log_probs));
}
