// Rows of a tensor, and their elements as floats, a block at a time.
#pragma once
#include <cstring>

#include "../tensor.h"

namespace specstep {

constexpr int64_t BLOCK = 128;  // floats that one function works on, full or padded: every element meets the same code

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline float widened(float value) { return value; }

inline float widened(Bfloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float wide;
  std::memcpy(&wide, &word, sizeof wide);
  return wide;
}

inline float widened(Float16 value) {
  const uint32_t size = value.bits & 0x7fff, sign = static_cast<uint32_t>(value.bits & 0x8000) << 16;
  float least = static_cast<float>(size) * 0x1p-24f;  // the value below the least exponent; denormals may be flushed
  uint32_t below;
  std::memcpy(&below, &least, sizeof below);
  const uint32_t normal = (size << 13) + (112u << 23), special = 0x7f800000 | (size & 0x3ff) << 13;
  const uint32_t word = (size < 0x400 ? below : size < 0x7c00 ? normal : special) | sign;
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

inline void rounded(float value, Float16& out) {  // likewise
  uint32_t word;
  std::memcpy(&word, &value, sizeof word);
  const uint32_t size = word & 0x7fffffff, sign = (word >> 16) & 0x8000;
  const uint32_t normal = (size + 0xfff + ((size >> 13) & 1) - (112u << 23)) >> 13;
  float small;
  std::memcpy(&small, &size, sizeof small);
  small += 0.5f;  // whose last place is 2 ** -24, that of the least numbers
  uint32_t least;
  std::memcpy(&least, &small, sizeof least);
  const uint32_t large = size > 0x7f800000 ? 0x7e00 : 0x7c00;
  const uint32_t half = size < 0x38800000 ? least - 0x3f000000 : size < 0x47800000 ? normal : large;
  out.bits = static_cast<uint16_t>(half | sign);
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

// The rows of the last dimension, which may lie anywhere; a tensor that has no elements side by side is copied. One
// that is contiguous can be taken as one row.
class Rows {
 public:
  explicit Rows(const Tensor& given, bool flat = false)
      : held_(given.dim() == 0 || given.stride(-1) == 1 || given.size(-1) == 1 ? given : dense(given)),
        data_(static_cast<const char*>(held_.data_ptr())) {
    const int64_t outer = flat ? 0 : std::max<int64_t>(0, held_.dim() - 1);
    for (int64_t d = 0; d < outer; d++) sizes_.push_back(held_.size(d)), strides_.push_back(held_.stride(d));
    columns = flat ? held_.numel() : held_.dim() ? held_.size(-1) : 1;
    count = columns ? held_.numel() / columns : 0;
  }
  int64_t count, columns;

  template <class Element>
  const Element* row(int64_t number) const {
    int64_t offset = 0;
    for (size_t d = sizes_.size(); d-- > 0; number /= sizes_[d]) offset += number % sizes_[d] * strides_[d];
    return reinterpret_cast<const Element*>(data_) + offset;
  }

 private:
  Tensor held_;
  const char* data_;
  std::vector<int64_t> sizes_, strides_;
};

}  // namespace specstep
