// e^x, and a product and a sum rounded once: what compilers may neither split nor join, so that an element's bits depend
// on no code around it.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace specstep {

inline float fused(float a, float b, float c) {
#ifdef __FMA__
  return std::fma(a, b, c);
#elif defined(__FP_FAST_FMAF)
  return __builtin_fmaf(a, b, c);
#else
  return a * b + c;
#endif
}

inline float power_of_two(int32_t exponent) {
  const int32_t word = (exponent + 127) << 23;
  float power;
  std::memcpy(&power, &word, sizeof power);
  return power;
}

// e^x, relative error below 2e-7; 0 below -87, infinity above 88.7.
inline float exponential(float x) {
  const float bounded = x < -87.0f ? -87.0f : (x > 89.0f ? 89.0f : x);
  const float n = fused(bounded, 1.44269504f, 12582912.0f) - 12582912.0f;  // to the nearest integer
  const float r = fused(-n, 1.42860677e-6f, fused(-n, 0.693145752f, bounded));
  float p = fused(r, 1.3888e-3f, 8.3335e-3f);
  p = fused(r, fused(r, fused(r, p, 4.1666662e-2f), 1.6666667e-1f), 0.5f);
  p = fused(r, fused(r, p, 1.0f), 1.0f);
  const int32_t half = static_cast<int32_t>(n) >> 1, rest = static_cast<int32_t>(n) - half;  // 2^128 is no float
  const float value = p * power_of_two(half) * power_of_two(rest);
  return x != x ? x : (x <= -87.0f ? 0.0f : value);
}

}  // namespace specstep
