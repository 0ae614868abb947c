// What a group of 32 elements takes of a row of x: signed bytes and their scale.
#pragma once

#include "quants.h"

namespace specstep {

#if defined(__AVX512BW__) || defined(__AVX2__)
constexpr int WORDS = REGISTERS;  // of x: four signed bytes each
#else
constexpr int WORDS = 2 * REGISTERS;  // of x: two signed halves each, of even bytes and of odd ones
#endif

template <int SUMS>
struct GroupTerm {  // what a group takes of one row of x; SUMS: parts of the group whose weights have scales of their own
  int32_t words[WORDS];
  int32_t start[SUMS];  // of a sum of integers: takes away what the weights' bytes are more than their values
  float scale;
  float shift[SUMS];  // the sum of x, which the least value of a part is multiplied by
};

// A group of a row of x as signed bytes: the largest becomes 127 or -127.
struct Quantized {
  float range;  // of x; that bytes stand for 127 times what they do
  int32_t sums[2];  // of the first half of the bytes, and of the second
  int8_t bytes[GROUP];
};

inline float quantizing_factor(float range) { return range > 1e-30f ? 127.0f / range : 0.0f; }

#if defined(__AVX2__)
// The greatest of eight bfloat16 without their signs.
inline float greatest(__m128i sizes) {
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(sizes, _mm_set1_epi16(-1)));
  return to_float(Bfloat16{static_cast<uint16_t>(~_mm_cvtsi128_si32(least))});
}
#endif

inline void quantize(const uint16_t* bits, Quantized& to) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const auto both = load<__m512i>(bits);
  const __m512i sizes = _mm512_and_si512(both, _mm512_set1_epi16(0x7fff));
  const __m256i most = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
  to.range = greatest(_mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1)));
  const __m512 factor = _mm512_set1_ps(quantizing_factor(to.range));
  const auto rounded = [&](__m256i half) {
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(wide), factor));
  };
  const __m512i low = rounded(_mm512_castsi512_si256(both)), high = rounded(_mm512_extracti64x4_epi64(both, 1));
  to.sums[0] = _mm512_reduce_add_epi32(low), to.sums[1] = _mm512_reduce_add_epi32(high);
  const __m128i bytes[2] = {_mm512_cvtepi32_epi8(low), _mm512_cvtepi32_epi8(high)};
  std::memcpy(to.bytes, bytes, sizeof bytes);
#elif defined(__AVX2__)
  const auto low = load<__m256i>(bits), high = load<__m256i>(bits + GROUP / 2);
  const __m256i sizes = _mm256_set1_epi16(0x7fff);
  const __m256i most = _mm256_max_epu16(_mm256_and_si256(low, sizes), _mm256_and_si256(high, sizes));
  to.range = greatest(_mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1)));
  const __m256 factor = _mm256_set1_ps(quantizing_factor(to.range));
  const auto rounded = [&](__m128i eight) {
    const __m256i wide = _mm256_slli_epi32(_mm256_cvtepu16_epi32(eight), 16);
    return _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_castsi256_ps(wide), factor));
  };
  // Halves of registers take turns in what is packed: of each, words 0 to 3 and then 4 to 7.
  const auto sixteen = [&](__m256i half) {
    const __m256i first = rounded(_mm256_castsi256_si128(half)), second = rounded(_mm256_extracti128_si256(half, 1));
    return _mm256_packs_epi32(first, second);
  };
  const __m256i pairs[2] = {sixteen(low), sixteen(high)}, ones = _mm256_set1_epi16(1);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  const __m256i bytes = _mm256_permutevar8x32_epi32(_mm256_packs_epi16(pairs[0], pairs[1]), order);
  for (int half = 0; half < 2; half++) {
    const __m256i eight = _mm256_madd_epi16(pairs[half], ones);
    const __m128i four = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    const __m128i two = _mm_add_epi32(four, _mm_unpackhi_epi64(four, four));
    to.sums[half] = _mm_cvtsi128_si32(two) + _mm_extract_epi32(two, 1);
  }
  std::memcpy(to.bytes, &bytes, sizeof bytes);
#else
  uint16_t largest = 0;
  for (int i = 0; i < GROUP; i++) largest = std::max<uint16_t>(largest, bits[i] & 0x7fff);
  to.range = to_float(Bfloat16{largest}), to.sums[0] = to.sums[1] = 0;
  const float factor = quantizing_factor(to.range);
  for (int i = 0; i < GROUP; i++) {
    to.bytes[i] = static_cast<int8_t>(__builtin_rintf(to_float(Bfloat16{bits[i]}) * factor));
    to.sums[i / (GROUP / 2)] += to.bytes[i];
  }
#endif
}

// Quantises up to 32 elements of a row. NaN and infinities make the scale so.
template <int SUMS>
inline void quantize(const Bfloat16* x, int64_t count, int offset, GroupTerm<SUMS>& term) {
  Quantized quantized;
  if (count >= GROUP) {
    quantize(&x->bits, quantized);
  } else {
    uint16_t bits[GROUP] = {};
    std::memcpy(bits, x, count * sizeof *bits);
    quantize(bits, quantized);
  }
  const auto& bytes = quantized.bytes;
  if (WORDS == REGISTERS) std::memcpy(term.words, bytes, sizeof bytes);
  for (int i = 0; WORDS != REGISTERS && i < WORDS; i++) {
    const int8_t* first = bytes + i / 2 * 4 + i % 2;
    const uint32_t low = static_cast<uint16_t>(first[0]), high = static_cast<uint16_t>(first[2]);
    term.words[i] = static_cast<int32_t>(low | high << 16);
  }
  term.scale = quantized.range / 127.0f;
  for (int part = 0; part < SUMS; part++) {
    const int32_t sum = SUMS == 1 ? quantized.sums[0] + quantized.sums[1] : quantized.sums[part];
    term.start[part] = -offset * sum;
    term.shift[part] = term.scale * static_cast<float>(sum);
  }
}

}  // namespace specstep
