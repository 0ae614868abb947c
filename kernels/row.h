// A row of logits as float32, and what is asked of it. Loops are plain, so that the compiler vectorizes them.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <vector>

#include "noise.h"
#include "tensor.h"

namespace specstep {

constexpr int64_t BLOCK = 128;  // elements that are looked at together, and left again where none can be the best
constexpr int64_t LANES = 16;   // of a vector: the compiler does not reorder sums by itself
constexpr float NONE = -std::numeric_limits<float>::infinity();

inline float widen(float value) { return value; }
inline float widen(uint16_t value) {  // bfloat16
  const uint32_t word = static_cast<uint32_t>(value) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}

// exp(x) for x <= 0 with a relative error below 2e-7; 0 below -87.
inline float exp_below_one(float x) {
  x = x < -87.0f ? -87.0f : x;
  const float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
  const float r = (x - n * 0.693145752f) - n * 1.42860677e-6f;
  const float p =
      1 + r * (1 + r * (0.5f + r * (1.6666667e-1f + r * (4.1666662e-2f + r * (8.3335e-3f + r * 1.3888e-3f)))));
  const int32_t word = (static_cast<int32_t>(n) + 127) << 23;
  float power;
  std::memcpy(&power, &word, sizeof power);
  return x <= -87.0f ? 0.0f : p * power;
}

inline float maximum(const float* x, int64_t count) {
  float lanes[LANES], best = NONE;
  std::fill_n(lanes, LANES, NONE);
  int64_t i = 0;
  for (; i + LANES <= count; i += LANES)
    for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] = x[i + lane] > lanes[lane] ? x[i + lane] : lanes[lane];
  for (; i < count; i++) best = x[i] > best ? x[i] : best;
  for (const float value : lanes) best = value > best ? value : best;
  return best;
}

// The sum of exp(x - greatest).
inline double sum_of_exp(const float* x, int64_t count, float greatest) {
  double total = 0;
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t size = std::min(BLOCK, count - first);
    float lanes[LANES] = {}, each[BLOCK] = {};
    for (int64_t i = 0; i < size; i++) each[i] = exp_below_one(x[first + i] - greatest);
    for (int64_t i = 0; i < BLOCK; i += LANES)
      for (int64_t lane = 0; lane < LANES; lane++) lanes[lane] += each[i + lane];
    for (const float value : lanes) total += value;
  }
  return total;
}

// Copies of logits and what a thread needs besides, kept from call to call.
inline std::vector<float>& scratch(int index, int64_t count) {
  static thread_local std::vector<float> buffers[2];
  if (static_cast<int64_t>(buffers[index].size()) < count) buffers[index].resize(count);
  return buffers[index];
}

// The place of the greatest of `count` logits, the first among equals; 0 where all are -inf.
template <class Element>
int64_t argmax(const Element* logits, int64_t count) {
  float best = NONE, wide[BLOCK];
  int64_t place = 0;
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t size = std::min(BLOCK, count - first);
    for (int64_t i = 0; i < size; i++) wide[i] = widen(logits[first + i]);
    if (!(maximum(wide, size) > best)) continue;
    for (int64_t i = 0; i < size; i++)
      if (wide[i] > best) best = wide[i], place = first + i;
  }
  return place;
}

// x with NONE for what the packed bits do not allow.
inline void keep_allowed(float* x, int64_t count, const int32_t* allowed) {
  for (int64_t first = 0; first < count; first += 32) {
    const auto bits = static_cast<uint32_t>(allowed[first / 32]);
    const int64_t size = std::min<int64_t>(32, count - first);
    for (int64_t bit = 0; bits != ~0u && bit < size; bit++) x[first + bit] = bits >> bit & 1 ? x[first + bit] : NONE;
  }
}

// Logits [B, N, V] whose rows may lie apart.
struct Logits {
  const char* data;
  int64_t batch, nodes, count, batch_stride, node_stride;
  bool wide;  // float32, else bfloat16
  Tensor held;

  explicit Logits(const Tensor& given) : held(given) {
    const ScalarType type = given.scalar_type();
    if (given.dim() != 3 || (type != ScalarType::Float && type != ScalarType::BFloat16))
      throw std::invalid_argument("logits: expected [B, N, V] float32 or bfloat16");
    if (given.size(2) > 1 && given.stride(2) != 1) held = dense(given);
    wide = type == ScalarType::Float;
    data = static_cast<const char*>(held.data_ptr());
    batch = held.size(0), nodes = held.size(1), count = held.size(2);
    batch_stride = held.stride(0), node_stride = held.stride(1);
  }
  const char* at(int64_t row, int64_t node) const {
    return data + (row * batch_stride + node * node_stride) * (wide ? 4 : 2);
  }
  const float* floats(int64_t row, int64_t node) const { return reinterpret_cast<const float*>(at(row, node)); }
  const uint16_t* halves(int64_t row, int64_t node) const { return reinterpret_cast<const uint16_t*>(at(row, node)); }
  void copy(int64_t row, int64_t node, float* to) const {
    if (wide) std::memcpy(to, at(row, node), count * sizeof(float));
    else for (int64_t i = 0; i < count; i++) to[i] = widen(halves(row, node)[i]);
  }
};

template <class Value>
constexpr ScalarType KIND = ScalarType::Float;
template <>
inline constexpr ScalarType KIND<int64_t> = ScalarType::Long;
template <>
inline constexpr ScalarType KIND<int32_t> = ScalarType::Int;

// The elements of a contiguous tensor.
template <class Value>
const Value* values(const Tensor& tensor) {
  if (tensor.scalar_type() != KIND<Value>) throw std::invalid_argument("expected int64, int32 or float32 as documented");
  return static_cast<const Value*>(tensor.data_ptr());
}

}  // namespace specstep
