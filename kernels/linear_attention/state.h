// One head's state of linear attention, N rows of P numbers, and what a token does to it: each use must give the same
// bits, so that is written here and nowhere else.
#pragma once
#include <cstdint>

#include "../exact/exponential.h"
#include "../tree_attention/vector.h"

namespace specstep {

using attention::Floats;

// Vectors of columns whose sums are in registers at a time. Most heads' values have 64 columns or more.
constexpr int COLUMNS = attention::LANES > 8 ? 4 : 8;

// What a token's state is multiplied with: one number, N, or, with rates [N, P], the exponentials of these times P
// numbers.
struct Decay {
  const float* numbers;
  int64_t count;
  const float* rates;
};

inline float add_product(float x, float y, float z) { return fused(x, y, z); }
inline Floats add_product(float x, Floats y, Floats z) { return attention::multiply_add(attention::splat(x), y, z); }

// Numbers of row i, from column j on: decay from. Some: Floats, or float for what is left over.
template <bool RATES, class Some>
inline Some decayed(const float* from, const Decay& decay, float factor, int64_t i, int64_t j, int64_t p) {
  const Some before = attention::load<Some>(from + i * p + j);
  if constexpr (RATES) {
    constexpr int64_t width = sizeof(Some) / sizeof(float);
    float factors[width];
    for (int64_t k = 0; k < width; k++) factors[k] = exponential(decay.rates[i * p + j + k] * decay.numbers[j + k]);
    return attention::load<Some>(factors) * before;
  }
  return factor * before;
}

// One token of a head. state: where its state is to be, null where nobody needs that; `from` may be it.
struct Token {
  float* state;
  const float* from;
  Decay decay;
  const float *key, *u, *query;
  int64_t n, p;
};

// Row i of a token's state, and what is written to it: a vector or a number from column j on.
template <bool RATES, class Some>
inline Some written(const Token& t, float factor, float x, int64_t i, int64_t j) {
  const Some row = decayed<RATES, Some>(t.from, t.decay, factor, i, j, t.p);
  return add_product(x, attention::load<Some>(t.u + j), row);
}

// COUNT times Some columns of a token, from j on. WRITES: whether u is written ahead. The token is a copy: a compiler
// must take it that a store changes what others point to.
template <bool RATES, bool WRITES, class Some, int COUNT>
inline void do_columns(const Token t, float* out, int64_t j) {
  constexpr int64_t width = sizeof(Some) / sizeof(float);
  Some sums[COUNT] = {};
  for (int64_t i = 0; i < t.n; i++) {
    const float factor = RATES ? 0 : t.decay.numbers[t.decay.count == 1 ? 0 : i];
    const float x = WRITES ? t.key[i] : 0, y = t.query[i];
#pragma GCC unroll 8
    for (int k = 0; k < COUNT; k++) {
      const int64_t column = j + k * width;
      Some row;
      if constexpr (WRITES) {
        row = written<RATES, Some>(t, factor, x, i, column);
        if (t.state) attention::store(t.state + i * t.p + column, row);
      } else {
        row = decayed<RATES, Some>(t.from, t.decay, factor, i, column, t.p);
      }
      sums[k] = add_product(y, row, sums[k]);
    }
  }
  for (int k = 0; k < COUNT; k++) attention::store(out + j + k * width, sums[k]);
}

template <bool RATES, bool WRITES>
inline void do_token(const Token& t, float* out) {
  constexpr int64_t lanes = attention::LANES;
  int64_t j = 0;
  for (; j + COLUMNS * lanes <= t.p; j += COLUMNS * lanes)
    do_columns<RATES, WRITES, Floats, COLUMNS>(t, out, j);
  for (; j + lanes <= t.p; j += lanes) do_columns<RATES, WRITES, Floats, 1>(t, out, j);
  for (; j < t.p; j++) do_columns<RATES, WRITES, float, 1>(t, out, j);
}

// Memory is read and written in its order: nothing is summed.
template <bool RATES>
inline void write_rows(const Token t) {
  for (int64_t i = 0; i < t.n; i++) {
    const float factor = RATES ? 0 : t.decay.numbers[t.decay.count == 1 ? 0 : i], x = t.key[i];
    float* row = t.state + i * t.p;
    int64_t j = 0;
    for (; j + attention::LANES <= t.p; j += attention::LANES)
      attention::store(row + j, written<RATES, Floats>(t, factor, x, i, j));
    for (; j < t.p; j++) row[j] = written<RATES, float>(t, factor, x, i, j);
  }
}

// out = (decay from)^T query, summed in the order of the rows.
inline void read(const Token& t, float* out) {
  (t.decay.rates ? do_token<true, false> : do_token<false, false>)(t, out);
}

// state = decay from + key u^T.
inline void write(const Token& t) {
  (t.decay.rates ? write_rows<true> : write_rows<false>)(t);
}

// state = decay from + key u^T, and out = state^T query.
inline void write_and_read(const Token& t, float* out) {
  (t.decay.rates ? do_token<true, true> : do_token<false, true>)(t, out);
}

}  // namespace specstep
