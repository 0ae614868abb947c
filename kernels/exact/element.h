// Elements of a tensor as floats, a block at a time.
#pragma once
#include <cstring>

#include "../tensor.h"

namespace specstep {

constexpr int64_t BLOCK = 128;  // floats that one function works on, full or padded: every element meets the same code

struct Bfloat16 {
  uint16_t bits;
};

inline float widened(float value) { return value; }

inline float widened(Bfloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}

inline void rounded(float value, float& out) { out = value; }

inline void rounded(float value, Bfloat16& out) {  // to nearest, ties to even; NaN stays NaN
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const uint32_t nearest = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
  out.bits = static_cast<uint16_t>((word & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : nearest);
}

template <class Element>
inline void load_block(const Element* from, int64_t count, float* block) {
  if (count == BLOCK) {
    for (int64_t i = 0; i < BLOCK; i++) block[i] = widened(from[i]);
    return;
  }
  for (int64_t i = 0; i < BLOCK; i++) block[i] = i < count ? widened(from[i]) : 0.0f;
}

template <class Element>
inline void store_block(const float* block, int64_t count, Element* to) {
  for (int64_t i = 0; i < count; i++) rounded(block[i], to[i]);
}

}  // namespace specstep
