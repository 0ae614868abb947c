// specstep::choose on the CPU: see reference.py. A row that asks for nothing costs one pass over its logits.
#include <torch/csrc/stable/library.h>

#include <unordered_map>

#include "../parallel.h"
#include "filter.h"

namespace specstep {
namespace {

enum Column { TEMPERATURE, TOP_K, TOP_P, MIN_P, REPETITION, PRESENCE, FREQUENCY, COLUMNS };

struct Count {
  int64_t token;
  float every, output;  // how often it is in the row: in all, and in the output
};

// The operator's arguments, as pointers. Letters: B rows, T nodes, V vocabulary, S slots of the history.
struct Call {
  Logits logits;
  const int64_t *tokens, *depths, *history, *lengths, *prompt_lengths, *seeds, *bias_ids, *banned, *masked;
  const int32_t *ancestors, *allowed;
  const float *sampling, *bias;
  int64_t words, slots, biases, bans, mask_words, history_stride;
};

// What is the same for all nodes of a row.
class Row {
 public:
  Row(const Call& call, int64_t row) : call_(call), row_(row), sampling_(call.sampling + row * COLUMNS) {
    penalized_ = sampling_[REPETITION] > 0 || sampling_[PRESENCE] != 0 || sampling_[FREQUENCY] != 0;
    for (int64_t i = 0; i < call.biases; i++) biased_ = biased_ || call.bias_ids[row * call.biases + i] >= 0;
    if (penalized_) count();
  }

  int64_t choose(int64_t node) const {
    const int64_t count = call_.logits.count;
    if (!edited(node) && !(sampling_[TEMPERATURE] > 0))
      return call_.logits.wide ? argmax(call_.logits.floats(row_, node), count) : argmax(call_.logits.halves(row_, node), count);
    float* x = scratch(0, count).data();
    call_.logits.copy(row_, node, x);
    if (edited(node)) edit(node, x);
    return sampling_[TEMPERATURE] > 0 ? sample(node, x) : argmax(static_cast<const float*>(x), count);
  }

 private:
  const Call& call_;
  int64_t row_;
  const float* sampling_;
  bool penalized_ = false, biased_ = false;
  std::vector<Count> counts_;

  int64_t at(int64_t node) const { return row_ * call_.logits.nodes + node; }
  bool valid(int64_t token) const { return token >= 0 && token < call_.logits.count; }
  bool edited(int64_t node) const {
    if (penalized_ || biased_ || call_.masked[row_] != 0) return true;
    const int64_t* banned = call_.banned + at(node) * call_.bans;
    return std::any_of(banned, banned + call_.bans, [](int64_t token) { return token >= 0; });
  }

  void count() {
    std::unordered_map<int64_t, size_t> places;
    const int64_t* history = call_.history + row_ * call_.history_stride;
    for (int64_t i = 0; i <= std::min(call_.lengths[row_], call_.slots - 1); i++) {
      const int64_t token = std::clamp<int64_t>(history[i], 0, call_.logits.count - 1);
      const auto [place, added] = places.try_emplace(token, counts_.size());
      if (added) counts_.push_back({token, 0, 0});
      counts_[place->second].every++;
      counts_[place->second].output += i >= call_.prompt_lengths[row_];
    }
  }

  void edit(int64_t node, float* x) const {
    const int64_t count = call_.logits.count;
    for (int64_t i = 0; biased_ && i < call_.biases; i++) {
      const int64_t token = call_.bias_ids[row_ * call_.biases + i];
      if (valid(token)) x[token] += call_.bias[row_ * call_.biases + i];
    }
    if (penalized_) penalize(node, x);
    for (int64_t i = 0; i < call_.bans; i++) {
      const int64_t token = call_.banned[at(node) * call_.bans + i];
      if (valid(token)) x[token] = NONE;
    }
    if (call_.masked[row_] != 0) keep_allowed(x, count, call_.allowed + at(node) * call_.mask_words);
  }

  // The row's tokens, and those on the path to the node, which are output.
  void penalize(int64_t node, float* x) const {
    std::vector<Count> path;
    const int32_t* ancestors = call_.ancestors + at(node) * call_.words;
    for (int64_t other = 1; other < call_.logits.nodes; other++) {
      if (!(static_cast<uint32_t>(ancestors[other / 32]) >> other % 32 & 1)) continue;
      const int64_t token = call_.tokens[at(other)];
      const auto same = std::find_if(path.begin(), path.end(), [&](const Count& c) { return c.token == token; });
      if (same == path.end()) path.push_back({token, 1, 1});
      else same->every++, same->output++;
    }
    for (const Count& counted : counts_) {
      Count sum = counted;
      for (Count& drafted : path)
        if (drafted.token == sum.token) sum.every += drafted.every, sum.output += drafted.output, drafted.every = 0;
      penalize(sum, x);
    }
    for (const Count& drafted : path)
      if (drafted.every > 0 && valid(drafted.token)) penalize(drafted, x);
  }
  void penalize(const Count& counted, float* x) const {
    float value = x[counted.token];
    if (sampling_[REPETITION] > 0) value = value > 0 ? value / sampling_[REPETITION] : value * sampling_[REPETITION];
    value -= sampling_[FREQUENCY] * counted.output;
    x[counted.token] = value - sampling_[PRESENCE] * (counted.output > 0);
  }

  int64_t sample(int64_t node, float* x) const {
    const int64_t count = call_.logits.count;
    for (int64_t i = 0; i < count; i++) x[i] = x[i] / sampling_[TEMPERATURE];
    const int64_t likeliest = argmax(static_cast<const float*>(x), count);
    if (!(x[likeliest] > NONE)) return 0;
    const float least = Filter(x, count, x[likeliest]).least(sampling_[TOP_K], sampling_[TOP_P], sampling_[MIN_P]);
    return noisiest(Noise(call_.seeds[row_], call_.lengths[row_] + call_.depths[at(node)] + 1), x, likeliest, least);
  }

  // The token with the greatest sum of logit and noise. Few are looked at: the noise is bounded, cheaply.
  int64_t noisiest(const Noise& noise, const float* x, int64_t likeliest, float least) const {
    const int64_t count = call_.logits.count;
    int64_t place = likeliest;
    float best = x[place] + noise(static_cast<uint32_t>(place)), most[BLOCK];
    for (int64_t first = 0; first < count; first += BLOCK) {
      const int64_t size = std::min(BLOCK, count - first);
      const float greatest = maximum(x + first, size);
      if (!(greatest >= least && greatest + MOST_NOISE >= best)) continue;
      for (int64_t i = 0; i < size; i++) most[i] = x[first + i] + noise.bound(static_cast<uint32_t>(first + i));
      if (!(maximum(most, size) >= best)) continue;
      for (int64_t i = 0; i < size; i++) {
        if (!(most[i] >= best && x[first + i] >= least && x[first + i] > NONE)) continue;
        const float score = x[first + i] + noise(static_cast<uint32_t>(first + i));
        if (score > best || (score == best && first + i < place)) best = score, place = first + i;
      }
    }
    return place;
  }
};

void expect(bool fits, const char* what) {
  if (!fits) throw std::invalid_argument(std::string("specstep::choose: expected ") + what);
}

Tensor choose(
    const Tensor& logits, const Tensor& tokens, const Tensor& ancestors, const Tensor& depths, const Tensor& history,
    const Tensor& lengths, const Tensor& prompt_lengths, const Tensor& sampling, const Tensor& seeds,
    const Tensor& bias_ids, const Tensor& bias, const Tensor& banned, const Tensor& allowed, const Tensor& masked) {
  const Tensor held[] = {
      dense(tokens),   dense(ancestors), dense(depths), dense(lengths), dense(prompt_lengths), dense(sampling), dense(seeds),
      dense(bias_ids), dense(bias),      dense(banned), dense(allowed), dense(masked)};
  const Tensor past = history.dim() == 2 && history.stride(1) == 1 ? history : dense(history);
  Call call{Logits(logits)};
  const int64_t batch = call.logits.batch, nodes = call.logits.nodes;
  expect(past.dim() == 2 && past.size(0) == batch, "history [B, S]");
  expect(held[0].size(0) == batch && held[0].size(1) == nodes, "tokens [B, T]");
  expect(held[5].size(1) == COLUMNS, "sampling [B, 7]");
  expect(held[10].size(2) * 32 >= call.logits.count, "allowed [B, T, ceil(V / 32)]");
  call.tokens = values<int64_t>(held[0]), call.ancestors = values<int32_t>(held[1]);
  call.depths = values<int64_t>(held[2]), call.lengths = values<int64_t>(held[3]);
  call.prompt_lengths = values<int64_t>(held[4]), call.sampling = values<float>(held[5]);
  call.seeds = values<int64_t>(held[6]), call.bias_ids = values<int64_t>(held[7]), call.bias = values<float>(held[8]);
  call.banned = values<int64_t>(held[9]), call.allowed = values<int32_t>(held[10]);
  call.masked = values<int64_t>(held[11]), call.history = values<int64_t>(past);
  call.words = held[1].size(2), call.biases = held[7].size(1), call.bans = held[9].size(2);
  call.mask_words = held[10].size(2), call.slots = past.size(1), call.history_stride = past.stride(0);

  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(tokens.get(), &dtype));
  Tensor out = empty({batch, nodes}, dtype);
  auto* chosen = static_cast<int64_t*>(out.data_ptr());
  std::vector<Row> rows;
  for (int64_t row = 0; row < batch; row++) rows.emplace_back(call, row);
  parallel_for(batch * nodes, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) chosen[i] = rows[i / nodes].choose(i % nodes);
  });
  return out;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_choose_native(
    AtenTensorHandle logits, AtenTensorHandle tokens, AtenTensorHandle ancestors, AtenTensorHandle depths,
    AtenTensorHandle history, AtenTensorHandle lengths, AtenTensorHandle prompt_lengths, AtenTensorHandle sampling,
    AtenTensorHandle seeds, AtenTensorHandle bias_ids, AtenTensorHandle bias, AtenTensorHandle banned,
    AtenTensorHandle allowed, AtenTensorHandle masked, AtenTensorHandle* out) {
  using namespace specstep;
  return guarded("choose", [&] {
    const Tensor result = choose(
        borrowed(logits), borrowed(tokens), borrowed(ancestors), borrowed(depths), borrowed(history), borrowed(lengths),
        borrowed(prompt_lengths), borrowed(sampling), borrowed(seeds), borrowed(bias_ids), borrowed(bias),
        borrowed(banned), borrowed(allowed), borrowed(masked));
    return aoti_torch_new_tensor_handle(result.get(), out);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "choose_native(Tensor logits, Tensor tokens, Tensor ancestors, Tensor depths, Tensor history, Tensor lengths, "
      "Tensor prompt_lengths, Tensor sampling, Tensor seeds, Tensor bias_ids, Tensor bias, Tensor banned, "
      "Tensor allowed, Tensor masked) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("choose_native", TORCH_BOX(&specstep::choose));
}
