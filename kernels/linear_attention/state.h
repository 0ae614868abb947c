// One head's state of linear attention, N rows of P numbers, and what a token does to it: each use must give the same
// bits, so that is written here and nowhere else.
#pragma once
#include <cmath>
#include <cstdint>

namespace specstep {

inline float fused(float a, float b, float c) {
#ifdef __FMA__
  return std::fma(a, b, c);
#else
  return a * b + c;
#endif
}

// One of `decays` numbers, N or one, for row i.
inline float decay_of(const float* decay, int64_t decays, int64_t i) { return decay[decays == 1 ? 0 : i]; }

// state = decay from, and out = state^T key, summed in the order of the rows.
inline void decay_and_read(float* state, const float* from, const float* decay, int64_t decays, const float* key,
                           float* __restrict out, int64_t n, int64_t p) {
  for (int64_t j = 0; j < p; j++) out[j] = 0;
  for (int64_t i = 0; i < n; i++, state += p, from += p) {
    const float factor = decay_of(decay, decays, i), x = key[i];
    for (int64_t j = 0; j < p; j++) {
      state[j] = factor * from[j];
      out[j] = fused(x, state[j], out[j]);
    }
  }
}

// state = decay from + key u^T
inline void decay_and_write(float* state, const float* from, const float* decay, int64_t decays, const float* key,
                            const float* __restrict u, int64_t n, int64_t p) {
  for (int64_t i = 0; i < n; i++, state += p, from += p) {
    const float factor = decay_of(decay, decays, i), x = key[i];
    for (int64_t j = 0; j < p; j++) state[j] = fused(x, u[j], factor * from[j]);
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
