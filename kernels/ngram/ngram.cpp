// specstep::ngram on the CPU: see reference.py. A node's whole level in one call: the matches of its last tokens in the
// history, the row of its table, the back-off, and the best of what was found.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <limits>
#include <optional>
#include <stdexcept>
#include <tuple>

#include "../tensor.h"

namespace specstep {
namespace {

constexpr float NONE = -std::numeric_limits<float>::infinity(), STEPS_PER_NAT = 4096;
constexpr int64_t LEVELS = 256, WIDTH = 8;  // as in tables.py
constexpr int64_t WAYS = 16, COUNTS = 256, MOST_TOKENS = 1 << 20, CONTEXTS = 2;  // as in learned.py
constexpr float LEARNED_CONCENTRATIONS[CONTEXTS] = {20, 4};                      // as in reference.py
constexpr int64_t BLOCK = 16;  // tokens of the history that are compared together

int64_t mix(int64_t first, int64_t second) {
  int64_t mixed = first * 2654435761 + second * 2246822519;
  mixed = (mixed + (mixed >> 15)) % (1LL << 31) * 2146121005;
  return (mixed + (mixed >> 29)) % (1LL << 31);
}

struct Tables {
  Tensor bigrams, keys, trigrams, probability;

  // The row of a pair of tokens, the last token's own where the pair is not known.
  const int32_t* row(int64_t previous, int64_t last) const {
    const int64_t buckets = keys.size(0) / WIDTH, before = std::max<int64_t>(previous, 0);
    const int64_t key = previous * bigrams.size(0) + last;
    const auto* known = static_cast<const int64_t*>(keys.data_ptr());
    int64_t found = -1;
    for (const int64_t bucket : {mix(before, last) % buckets, mix(last, before) % buckets})
      for (int64_t slot = bucket * WIDTH; slot < (bucket + 1) * WIDTH; slot++)
        if (known[slot] == key) found = std::max(found, slot);
    const Tensor& table = found < 0 ? bigrams : trigrams;
    return static_cast<const int32_t*>(table.data_ptr()) + (found < 0 ? last : found) * table.size(1);
  }
};

struct Seen {
  int64_t token, count;
};

// What followed the last token of a context, or the last two, in the engine's answers.
std::vector<Seen> remembered(const Tensor& learned, int64_t previous, int64_t last, int64_t kind) {
  std::vector<Seen> seen;
  const int64_t before = kind == 0 ? MOST_TOKENS : std::max<int64_t>(previous, 0), tag = 1 + mix(last, before);
  const bool there = (kind == 0 ? last : previous) >= 0;
  const int64_t row = there ? mix(before, last) % (learned.size(0) - 1) : learned.size(0) - 1;
  const auto* held = static_cast<const int64_t*>(learned.data_ptr()) + row * WAYS;
  for (int64_t way = 0; way < WAYS; way++)
    if (held[way] / COUNTS / MOST_TOKENS == tag && held[way] % COUNTS > 0)
      seen.push_back({held[way] / COUNTS % MOST_TOKENS, held[way] % COUNTS});
  return seen;
}

struct Match {
  int64_t length, follow;
};

// The `most` longest, then latest, places before `end` where the tokens of `context` stand, in that order.
void find_matches(const int64_t* history, int64_t end, const int64_t* context, int64_t longest, int64_t most,
                  std::vector<Match>& found) {
  found.clear();
  const int64_t last = context[longest - 1];
  const auto look_at = [&](int64_t place) {
    int64_t length = 1;
    while (length < longest && place >= length && history[place - length] == context[longest - 1 - length]) length++;
    auto at = found.end();  // a later place of the same length stands already
    while (at != found.begin() && (at - 1)->length < length) --at;
    if (at == found.end() && static_cast<int64_t>(found.size()) >= most) return;
    found.insert(at, {length, history[place + 1]});
    if (static_cast<int64_t>(found.size()) > most) found.pop_back();
  };
  int64_t place = end;
  for (; place >= BLOCK; place -= BLOCK) {
    int64_t equal = 0;
    for (int64_t i = 1; i <= BLOCK; i++) equal += history[place - i] == last;
    for (int64_t i = 1; equal > 0 && i <= BLOCK; i++)
      if (history[place - i] == last) look_at(place - i);
  }
  while (place-- > 0)
    if (history[place] == last) look_at(place);
}

struct Level {
  const float* concentrations;
  int64_t longest, matches, top_k;
  std::optional<Tables> tables;
  std::optional<Tensor> learned;
  std::vector<Match> found;
  std::vector<int64_t> tokens;
  std::vector<float> share;

  void collect(const int64_t* context) {
    const int64_t previous = context[longest - 2], last = context[longest - 1];
    tokens.clear();
    for (const Match& match : found) tokens.push_back(match.follow);
    const int32_t* row = tables ? tables->row(previous, last) : nullptr;
    const int64_t entries = tables ? tables->bigrams.size(1) : 0;
    for (int64_t e = 0; e < entries; e++)
      if (row[e] >= 0) tokens.push_back(row[e] / LEVELS);
    std::vector<Seen> seen[CONTEXTS];
    for (int64_t kind = 0; learned && kind < CONTEXTS; kind++) {
      seen[kind] = remembered(*learned, previous, last, kind);
      for (const Seen& one : seen[kind]) tokens.push_back(one.token);
    }
    share.assign(tokens.size(), 0.0f);
    const auto* probability = tables ? static_cast<const float*>(tables->probability.data_ptr()) : nullptr;
    for (size_t i = 0; i < tokens.size(); i++)
      for (int64_t e = 0; e < entries; e++)
        if (row[e] >= 0 && row[e] / LEVELS == tokens[i]) share[i] += probability[row[e] % LEVELS];
    for (int64_t kind = 0; learned && kind < CONTEXTS; kind++) {
      int64_t total = 0;
      for (const Seen& one : seen[kind]) total += one.count;
      for (size_t i = 0; i < tokens.size(); i++) {
        int64_t count = 0;
        for (const Seen& one : seen[kind]) count += one.token == tokens[i] ? one.count : 0;
        share[i] = estimate(count, total, LEARNED_CONCENTRATIONS[kind], share[i]);
      }
    }
  }

  static float estimate(int64_t count, int64_t total, float concentration, float share) {
    const float known = concentration * share;
    return (static_cast<float>(count) + known) / (static_cast<float>(total) + concentration);
  }

  void back_off() {
    for (int64_t least = 1; least <= longest; least++) {
      const float concentration = concentrations[least - 1];
      if (!(concentration > 0)) continue;
      int64_t total = 0;
      for (const Match& match : found) total += match.length >= least;
      for (size_t i = 0; i < tokens.size(); i++) {
        int64_t count = 0;
        for (const Match& match : found) count += match.length >= least && match.follow == tokens[i];
        share[i] = estimate(count, total, concentration, share[i]);
      }
    }
  }

  void best(int64_t* chosen, float* score) {
    for (size_t i = 0; i < tokens.size(); i++) {
      share[i] = std::log(share[i]);
      for (size_t j = 0; j < i; j++)
        if (tokens[j] == tokens[i]) share[i] = NONE;  // equal tokens have equal shares: the first stands for all
    }
    for (int64_t place = 0; place < top_k; place++) {
      const auto greatest = std::max_element(share.begin(), share.end());  // the first among equals
      const bool is_one = greatest != share.end() && *greatest > NONE;
      chosen[place] = is_one ? tokens[greatest - share.begin()] : 0;
      score[place] = is_one ? std::nearbyint(*greatest * STEPS_PER_NAT) / STEPS_PER_NAT : NONE;
      if (is_one) *greatest = NONE;
    }
  }
};

std::tuple<Tensor, Tensor> ngram(const Tensor& history, const Tensor& lengths, const Tensor& context,
                                 const Tensor& concentrations, const std::optional<Tensor>& bigrams,
                                 const std::optional<Tensor>& keys, const std::optional<Tensor>& trigrams,
                                 const std::optional<Tensor>& probability, const std::optional<Tensor>& learned,
                                 int64_t matches, int64_t top_k) {
  if (history.dim() != 2 || context.dim() != 3 || history.stride(1) != 1 || history.size(1) == 0)
    throw std::invalid_argument("specstep::ngram: expected history [B, S] and context [B, F, n]");
  if (concentrations.scalar_type() != ScalarType::Float || concentrations.numel() != context.size(2))
    throw std::invalid_argument("specstep::ngram: expected concentrations [n], float32");
  if (bigrams && (bigrams->scalar_type() != ScalarType::Int || keys->scalar_type() != ScalarType::Long ||
                  trigrams->scalar_type() != ScalarType::Int || probability->scalar_type() != ScalarType::Float))
    throw std::invalid_argument("specstep::ngram: expected tables of int32, int64, int32 and float32");
  if (learned && (learned->scalar_type() != ScalarType::Long || learned->dim() != 2 || learned->size(1) != WAYS))
    throw std::invalid_argument("specstep::ngram: expected a learned table [R, 16], int64");
  const Tensor contexts = dense(context), ends = dense(lengths);
  const int64_t batch = context.size(0), width = context.size(1);
  Level level{static_cast<const float*>(concentrations.data_ptr()), context.size(2), matches, top_k, {}, learned, {}, {}, {}};
  if (bigrams) level.tables = Tables{*bigrams, *keys, *trigrams, *probability};
  Tensor chosen = empty({batch, width, top_k}, aoti_torch_dtype_int64());
  Tensor scores = empty({batch, width, top_k}, aoti_torch_dtype_float32());
  for (int64_t row = 0; row < batch; row++) {
    const auto* tokens = static_cast<const int64_t*>(history.data_ptr()) + row * history.stride(0);
    const int64_t end = std::min(static_cast<const int64_t*>(ends.data_ptr())[row], history.size(1) - 1);
    for (int64_t node = row * width; node < (row + 1) * width; node++) {
      const auto* own = static_cast<const int64_t*>(contexts.data_ptr()) + node * level.longest;
      find_matches(tokens, end, own, level.longest, matches, level.found);
      level.collect(own);
      level.back_off();
      level.best(static_cast<int64_t*>(chosen.data_ptr()) + node * top_k,
                 static_cast<float*>(scores.data_ptr()) + node * top_k);
    }
  }
  return {chosen, scores};
}

std::optional<Tensor> optional(AtenTensorHandle* handle) {
  return handle ? std::optional<Tensor>(borrowed(*handle)) : std::nullopt;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_ngram_native(
    AtenTensorHandle history, AtenTensorHandle lengths, AtenTensorHandle context, AtenTensorHandle concentrations,
    AtenTensorHandle* bigrams, AtenTensorHandle* keys, AtenTensorHandle* trigrams, AtenTensorHandle* probability,
    AtenTensorHandle* learned, int64_t matches, int64_t top_k, AtenTensorHandle* tokens, AtenTensorHandle* log_probs) {
  using namespace specstep;
  return guarded("ngram", [&] {
    const auto [best, score] =
        ngram(borrowed(history), borrowed(lengths), borrowed(context), borrowed(concentrations), optional(bigrams),
              optional(keys), optional(trigrams), optional(probability), optional(learned), matches, top_k);
    const AOTITorchError error = aoti_torch_new_tensor_handle(best.get(), tokens);
    return error ? error : aoti_torch_new_tensor_handle(score.get(), log_probs);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "ngram_native(Tensor history, Tensor lengths, Tensor context, Tensor concentrations, Tensor? bigrams, "
      "Tensor? keys, Tensor? trigrams, Tensor? probability, Tensor? learned, int matches, int top_k) "
      "-> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("ngram_native", TORCH_BOX(&specstep::ngram));
}
