// Sums of a group's products: unsigned bytes of weights times signed bytes of x. Each instruction set has its own way; the
// integers are the same.
#pragma once

#include "group_term.h"

namespace specstep {

typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

// Rows whose sums run side by side: as many as there are registers for.
constexpr int CHAINS = WORDS == REGISTERS ? std::min(MAX_ROWS, 12) : 1;

// The sum of one row of x, in each lane another output. `add` takes the next word of weights: four of each output.
#if defined(__AVX512VNNI__)
template <class Quants>
struct GroupSum {
  Integers sum;

  void start(const GroupTerm& x) { sum = Integers{} + x.start; }
  void add(Words w, const GroupTerm& x, int number) {
    sum = reinterpret_cast<Integers>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w), _mm512_set1_epi32(x.words[number])));
  }
  Integers total(const GroupTerm&) const { return sum; }
};
#elif defined(__AVX512BW__) || defined(__AVX2__)
#if defined(__AVX512BW__)
typedef __m512i Pairs;
inline Pairs multiply_pairs(Words w, int32_t x) {
  return _mm512_maddubs_epi16(reinterpret_cast<Pairs>(w), _mm512_set1_epi32(x));
}
inline Pairs add_halves(Pairs a, Pairs b) { return _mm512_add_epi16(a, b); }
inline Pairs to_words(Pairs sum, int16_t times) { return _mm512_madd_epi16(sum, _mm512_set1_epi16(times)); }
#else
typedef __m256i Pairs;
inline Pairs multiply_pairs(Words w, int32_t x) {
  return _mm256_maddubs_epi16(reinterpret_cast<Pairs>(w), _mm256_set1_epi32(x));
}
inline Pairs add_halves(Pairs a, Pairs b) { return _mm256_add_epi16(a, b); }
inline Pairs to_words(Pairs sum, int16_t times) { return _mm256_madd_epi16(sum, _mm256_set1_epi16(times)); }
#endif
// In halves, two products in each: they hold the sum of a group as long as the bytes of weights are below 16. So the lower
// and the upper four bits have a sum of their own.
template <class Quants>
struct GroupSum {
  Pairs lower, upper;

  void start(const GroupTerm&) { lower = upper = Pairs{}; }
  void add(Words w, const GroupTerm& x, int number) {
    const bool nibbles = Quants::BITS == 4;
    add(lower, nibbles ? w : w & 0x0f0f0f0f, x.words[number]);
    if (!nibbles) add(upper, w >> 4 & 0x0f0f0f0f, x.words[number]);
  }
  static void add(Pairs& sum, Words w, int32_t x) {
    sum = add_halves(sum, multiply_pairs(w, x));
    asm("" : "+v"(sum));  // now: compilers like to add all products at the end, for which there are no registers
  }
  Integers total(const GroupTerm& x) const {
    Integers sum = reinterpret_cast<Integers>(to_words(lower, 1));
    if (Quants::BITS == 8) sum += reinterpret_cast<Integers>(to_words(upper, 16));
    return Quants::OFFSET ? sum + x.start : sum;
  }
};
#else
template <class Quants>
struct GroupSum {
  Integers sum;

  void start(const GroupTerm& x) { sum = Integers{} + x.start; }
  void add(Words w, const GroupTerm& x, int number) {
    sum += multiply_halves(w & 0x00ff00ff, x.words[2 * number]);
    sum += multiply_halves((w >> 8) & 0x00ff00ff, x.words[2 * number + 1]);
  }
  Integers total(const GroupTerm&) const { return sum; }
  static Integers multiply_halves(Words w, int32_t x) {  // two products in each lane, added
#if defined(__SSE2__)
    return reinterpret_cast<Integers>(_mm_madd_epi16(reinterpret_cast<__m128i>(w), _mm_set1_epi32(x)));
#else
    const Integers wide = reinterpret_cast<Integers>(w);
    return (wide << 16 >> 16) * static_cast<int16_t>(x) + (wide >> 16) * (x >> 16);
#endif
  }
};
#endif

// The sums of a group, of each of some rows of x, for P parts of the panel from `first` on. Word by word of the weights, so
// that the sums of rows, each a chain of additions, run side by side.
template <class Quants, int ROWS, int P>
inline void multiply_group(Integers (*out)[PARTS], const GroupTerm* x, const char* from, int first) {
  GroupSum<Quants> sums[ROWS][P];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) sums[r][p].start(x[r]);
#pragma GCC unroll 8
  for (int number = 0; number < REGISTERS; number++) {
    Words words[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) words[p] = Quants::word(from, number, first + p);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sums[r][p].add(words[p], x[r], number);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) out[r][first + p] = sums[r][p].total(x[r]);
}

}  // namespace specstep
