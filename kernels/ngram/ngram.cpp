// specstep::ngram on the CPU: see reference.py. A node's whole level in one call: the matches of its last tokens in the
// history, the place in the prediction, the row of its table, the back-off, and the best of what was found.
#include <torch/csrc/stable/library.h>

#include <cmath>
#include <cstdlib>
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

// Calls `look_at` with each place below `end` that holds `token`, the last first.
template <typename LookAt>
void for_each_place(const int64_t* tokens, int64_t end, int64_t token, const LookAt& look_at) {
  int64_t place = end;
  for (; place >= BLOCK; place -= BLOCK) {
    int64_t equal = 0;
    for (int64_t i = 1; i <= BLOCK; i++) equal += tokens[place - i] == token;
    for (int64_t i = 1; equal > 0 && i <= BLOCK; i++)
      if (tokens[place - i] == token) look_at(place - i);
  }
  while (place-- > 0)
    if (tokens[place] == token) look_at(place);
}

// How many of the last tokens of `context` stand at `place` and ahead of it; the last one does.
int64_t match_length(const int64_t* tokens, int64_t place, const int64_t* context, int64_t longest) {
  int64_t length = 1;
  while (length < longest && place >= length && tokens[place - length] == context[longest - 1 - length]) length++;
  return length;
}

// The `most` longest, then latest, places before `end` where the tokens of `context` stand, in that order.
void find_matches(const int64_t* history, int64_t end, const int64_t* context, int64_t longest, int64_t most,
                  std::vector<Match>& found) {
  found.clear();
  for_each_place(history, end, context[longest - 1], [&](int64_t place) {
    const int64_t length = match_length(history, place, context, longest);
    auto at = found.end();  // a later place of the same length stands already
    while (at != found.begin() && (at - 1)->length < length) --at;
    if (at == found.end() && static_cast<int64_t>(found.size()) >= most) return;
    found.insert(at, {length, history[place + 1]});
    if (static_cast<int64_t>(found.size()) > most) found.pop_back();
  });
}

// Where a prediction goes on after a node, and how long the match ahead of that place is.
struct Place {
  int64_t at, length, token;  // -1 for no token
};

Place follow_prediction(const int64_t* prediction, int64_t end, int64_t slots, const int64_t* context, int64_t longest,
                        int64_t expected) {
  const int64_t middle = std::min(expected, slots);
  Place best{expected, 0, 0 <= expected && expected < end ? prediction[expected] : -1};
  for_each_place(prediction, end - 1, context[longest - 1], [&](int64_t last) {
    const int64_t length = match_length(prediction, last, context, longest), at = last + 1;
    const bool nearer = std::abs(at - middle) < std::abs(best.at - middle);  // the later comes first
    if (length > best.length || (length == best.length && nearer)) best = {at, length, prediction[at]};
  });
  return best;
}

struct Level {
  const float *concentrations, *trust;
  int64_t longest, matches, top_k;
  std::optional<Tables> tables;
  std::optional<Tensor> learned;
  std::vector<Match> found;
  Place place;
  std::vector<int64_t> tokens;
  std::vector<float> share;

  void collect(const int64_t* context) {
    const int64_t previous = context[longest - 2], last = context[longest - 1];
    tokens.clear();
    for (const Match& match : found) tokens.push_back(match.follow);
    if (place.token >= 0) tokens.push_back(place.token);
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
    if (place.token < 0) return;
    const float weight = trust[place.length];
    for (size_t i = 0; i < tokens.size(); i++)
      share[i] = weight * static_cast<float>(tokens[i] == place.token) + (1 - weight) * share[i];
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

void check(const Tensor& history, const Tensor& context, const Tensor& prediction, const Tensor& expected,
           const Tensor& concentrations, const Tensor& trust) {
  for (const Tensor* tokens : {&history, &prediction})
    if (tokens->dim() != 2 || tokens->stride(1) != 1 || tokens->size(1) == 0)
      throw std::invalid_argument("specstep::ngram: expected history [B, S] and prediction [B, P]");
  if (context.dim() != 3 || expected.numel() != context.size(0) * context.size(1))
    throw std::invalid_argument("specstep::ngram: expected context [B, F, n] and expected [B, F]");
  if (concentrations.scalar_type() != ScalarType::Float || concentrations.numel() != context.size(2) ||
      trust.scalar_type() != ScalarType::Float || trust.numel() != context.size(2) + 1)
    throw std::invalid_argument("specstep::ngram: expected concentrations [n] and trust [n + 1], float32");
}

std::tuple<Tensor, Tensor, Tensor> ngram(
    const Tensor& history, const Tensor& lengths, const Tensor& context, const Tensor& prediction,
    const Tensor& predicted, const Tensor& expected, const Tensor& concentrations, const Tensor& trust,
    const std::optional<Tensor>& bigrams, const std::optional<Tensor>& keys, const std::optional<Tensor>& trigrams,
    const std::optional<Tensor>& probability, const std::optional<Tensor>& learned, int64_t matches,
    int64_t top_k) {
  check(history, context, prediction, expected, concentrations, trust);
  if (bigrams && (bigrams->scalar_type() != ScalarType::Int || keys->scalar_type() != ScalarType::Long ||
                  trigrams->scalar_type() != ScalarType::Int || probability->scalar_type() != ScalarType::Float))
    throw std::invalid_argument("specstep::ngram: expected tables of int32, int64, int32 and float32");
  if (learned && (learned->scalar_type() != ScalarType::Long || learned->dim() != 2 || learned->size(1) != WAYS))
    throw std::invalid_argument("specstep::ngram: expected a learned table [R, 16], int64");
  const Tensor contexts = dense(context), ends = dense(lengths), counts = dense(predicted), wanted = dense(expected);
  const int64_t batch = context.size(0), width = context.size(1);
  Level level{static_cast<const float*>(concentrations.data_ptr()), static_cast<const float*>(trust.data_ptr()),
              context.size(2), matches, top_k, {}, learned, {}, {}, {}, {}};
  if (bigrams) level.tables = Tables{*bigrams, *keys, *trigrams, *probability};
  Tensor chosen = empty({batch, width, top_k}, aoti_torch_dtype_int64());
  Tensor scores = empty({batch, width, top_k}, aoti_torch_dtype_float32());
  Tensor places = empty({batch, width}, aoti_torch_dtype_int64());
  for (int64_t row = 0; row < batch; row++) {
    const auto* tokens = static_cast<const int64_t*>(history.data_ptr()) + row * history.stride(0);
    const int64_t end = std::min(static_cast<const int64_t*>(ends.data_ptr())[row], history.size(1) - 1);
    const auto* likely = static_cast<const int64_t*>(prediction.data_ptr()) + row * prediction.stride(0);
    const int64_t count = std::min(static_cast<const int64_t*>(counts.data_ptr())[row], prediction.size(1));
    for (int64_t node = row * width; node < (row + 1) * width; node++) {
      const auto* own = static_cast<const int64_t*>(contexts.data_ptr()) + node * level.longest;
      find_matches(tokens, end, own, level.longest, matches, level.found);
      const int64_t next = static_cast<const int64_t*>(wanted.data_ptr())[node];
      level.place = follow_prediction(likely, count, prediction.size(1), own, level.longest, next);
      static_cast<int64_t*>(places.data_ptr())[node] = level.place.at;
      level.collect(own);
      level.back_off();
      level.best(static_cast<int64_t*>(chosen.data_ptr()) + node * top_k,
                 static_cast<float*>(scores.data_ptr()) + node * top_k);
    }
  }
  return {chosen, scores, places};
}

std::optional<Tensor> optional(AtenTensorHandle* handle) {
  return handle ? std::optional<Tensor>(borrowed(*handle)) : std::nullopt;
}

}  // namespace
}  // namespace specstep

// What compiled models call: see linear.cpp.
extern "C" __attribute__((visibility("default"))) AOTITorchError aoti_torch_cpu_ngram_native(
    AtenTensorHandle history, AtenTensorHandle lengths, AtenTensorHandle context, AtenTensorHandle prediction,
    AtenTensorHandle predicted, AtenTensorHandle expected, AtenTensorHandle concentrations, AtenTensorHandle trust,
    AtenTensorHandle* bigrams, AtenTensorHandle* keys, AtenTensorHandle* trigrams, AtenTensorHandle* probability,
    AtenTensorHandle* learned, int64_t matches, int64_t top_k, AtenTensorHandle* tokens, AtenTensorHandle* log_probs,
    AtenTensorHandle* places) {
  using namespace specstep;
  return guarded("ngram", [&] {
    const auto [best, score, at] =
        ngram(borrowed(history), borrowed(lengths), borrowed(context), borrowed(prediction), borrowed(predicted),
              borrowed(expected), borrowed(concentrations), borrowed(trust), optional(bigrams), optional(keys),
              optional(trigrams), optional(probability), optional(learned), matches, top_k);
    AOTITorchError error = aoti_torch_new_tensor_handle(best.get(), tokens);
    if (!error) error = aoti_torch_new_tensor_handle(score.get(), log_probs);
    return error ? error : aoti_torch_new_tensor_handle(at.get(), places);
  });
}

STABLE_TORCH_LIBRARY_FRAGMENT(specstep, library) {
  library.def(
      "ngram_native(Tensor history, Tensor lengths, Tensor context, Tensor prediction, Tensor predicted, "
      "Tensor expected, Tensor concentrations, Tensor trust, Tensor? bigrams, Tensor? keys, Tensor? trigrams, "
      "Tensor? probability, Tensor? learned, int matches, int top_k) -> (Tensor, Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(specstep, CPU, library) {
  library.impl("ngram_native", TORCH_BOX(&specstep::ngram));
}
