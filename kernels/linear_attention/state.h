// One head's state of linear attention, N rows of P numbers, and what a token does to it: each use must give the same
// bits, so that is written here and nowhere else.
#pragma once
#include <cstdint>

#include "../exact/exponential.h"

namespace specstep {

// What a token's state is multiplied with: one number, N, or, with rates [N, P], the exponentials of these times P
// numbers.
struct Decay {
  const float* numbers;
  int64_t count;
  const float* rates;
};

// Row i of the state: to = decay from.
inline void decay_row(float* to, const float* from, const Decay& decay, int64_t i, int64_t p) {
  if (decay.rates) {
    const float* rates = decay.rates + i * p;
    for (int64_t j = 0; j < p; j++) to[j] = exponential(rates[j] * decay.numbers[j]) * from[j];
  } else {
    const float factor = decay.numbers[decay.count == 1 ? 0 : i];
    for (int64_t j = 0; j < p; j++) to[j] = factor * from[j];
  }
}

// state = decay from, and out = state^T key, summed in the order of the rows.
inline void decay_and_read(float* state, const float* from, const Decay& decay, const float* key,
                           float* __restrict out, int64_t n, int64_t p) {
  for (int64_t j = 0; j < p; j++) out[j] = 0;
  for (int64_t i = 0; i < n; i++, state += p, from += p) {
    decay_row(state, from, decay, i, p);
    for (int64_t j = 0; j < p; j++) out[j] = fused(key[i], state[j], out[j]);
  }
}

// state = decay state + key u^T
inline void decay_and_write(float* state, const Decay& decay, const float* key, const float* __restrict u, int64_t n,
                            int64_t p) {
  for (int64_t i = 0; i < n; i++, state += p) {
    decay_row(state, state, decay, i, p);
    for (int64_t j = 0; j < p; j++) state[j] = fused(key[i], u[j], state[j]);
  }
}

// state += key u^T, and out = state^T query, summed in the order of the rows.
inline void write_and_read(float* state, const float* key, const float* __restrict u, const float* query,
                           float* __restrict out, int64_t n, int64_t p) {
  for (int64_t j = 0; j < p; j++) out[j] = 0;
  for (int64_t i = 0; i < n; i++, state += p) {
    const float x = key[i], y = query[i];
    for (int64_t j = 0; j < p; j++) {
      state[j] = fused(x, u[j], state[j]);
      out[j] = fused(y, state[j], out[j]);
    }
  }
}

}  // namespace specstep
