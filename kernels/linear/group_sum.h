// Sums of a group's products: unsigned bytes of weights times signed bytes of x. Each instruction set has its own way; the
// integers are the same.
#pragma once

#include "group_term.h"
#include "quants.h"

namespace specstep {

typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

// Rows whose sums run side by side: as many as there are registers for.
constexpr int CHAINS = WORDS == REGISTERS ? std::min(MAX_ROWS, 12) : 1;

// The sum of one row of x over COUNT words of weights, in each lane another output. `add` takes the next of them, four
// weights of each output; `start` is what the sum begins with. REGISTERS_OF_SUM: how many a sum takes.
#if defined(__AVX512VNNI__)
template <class Quants, int COUNT>
struct GroupSum {
  static constexpr int REGISTERS_OF_SUM = 1;
  Integers sum;

  void begin(int32_t start) { sum = Integers{} + start; }
  void add(Words w, const int32_t* x, int number) {
    sum = reinterpret_cast<Integers>(_mm512_dpbusd_epi32(
        reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w), _mm512_set1_epi32(x[number])));
  }
  Integers total(int32_t) const { return sum; }
};
#elif defined(__AVX512BW__) || defined(__AVX2__)
#if defined(__AVX512BW__)
typedef __m512i Pairs;
inline Pairs multiply_pairs(Words w, int32_t x) {
  return _mm512_maddubs_epi16(reinterpret_cast<Pairs>(w), _mm512_set1_epi32(x));
}
inline Pairs add_halves(Pairs a, Pairs b) { return _mm512_add_epi16(a, b); }
inline Integers to_words(Pairs sum, int16_t times) {
  return reinterpret_cast<Integers>(_mm512_madd_epi16(sum, _mm512_set1_epi16(times)));
}
#else
typedef __m256i Pairs;
inline Pairs multiply_pairs(Words w, int32_t x) {
  return _mm256_maddubs_epi16(reinterpret_cast<Pairs>(w), _mm256_set1_epi32(x));
}
inline Pairs add_halves(Pairs a, Pairs b) { return _mm256_add_epi16(a, b); }
inline Integers to_words(Pairs sum, int16_t times) {
  return reinterpret_cast<Integers>(_mm256_madd_epi16(sum, _mm256_set1_epi16(times)));
}
#endif
// In halves, two products in each, of which a half holds RUN. Weights above 63 are cut into their lower and upper four
// bits, which have a sum each.
template <class Quants, int COUNT>
struct GroupSum {
  static constexpr bool CUT = Quants::MOST > 63;
  static constexpr int RUN = 32767 / (2 * 127 * (CUT ? 15 : Quants::MOST));
  static constexpr bool WIDENED = RUN < COUNT;
  static constexpr int REGISTERS_OF_SUM = CUT || WIDENED ? 2 : 1;
  Pairs lower, upper;
  Integers whole;

  void begin(int32_t) { lower = upper = Pairs{}, whole = Integers{}; }
  void add(Words w, const int32_t* x, int number) {
    if (WIDENED && number > 0 && number % RUN == 0) whole += to_words(lower, 1), lower = Pairs{};
    add(lower, CUT ? w & 0x0f0f0f0f : w, x[number]);
    if (CUT) add(upper, w >> 4 & 0x0f0f0f0f, x[number]);
  }
  static void add(Pairs& sum, Words w, int32_t x) {
    sum = add_halves(sum, multiply_pairs(w, x));
    asm("" : "+v"(sum));  // now: compilers like to add all products at the end, for which there are no registers
  }
  Integers total(int32_t start) const {
    Integers sum = to_words(lower, 1);
    if (CUT) sum += to_words(upper, 16);
    if (WIDENED) sum += whole;
    return Quants::OFFSET ? sum + start : sum;
  }
};
#else
template <class Quants, int COUNT>
struct GroupSum {
  static constexpr int REGISTERS_OF_SUM = 1;
  Integers sum;

  void begin(int32_t start) { sum = Integers{} + start; }
  void add(Words w, const int32_t* x, int number) {
    sum += multiply_halves(w & 0x00ff00ff, x[2 * number]);
    sum += multiply_halves((w >> 8) & 0x00ff00ff, x[2 * number + 1]);
  }
  Integers total(int32_t) const { return sum; }
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

// The sums of one part of a group, COUNT words long, of each of some rows of x, for P parts of the panel from `first` on.
// x: of a group, in every STRIDE-th of which another row has it. Word by word of the weights, so that the sums of rows,
// each a chain of additions, run side by side.
template <class Quants, int ROWS, int P, int COUNT, int STRIDE, int SUMS>
inline void multiply_words(Integers (*out)[PARTS], const GroupTerm<SUMS>* x, const char* from, int part, int first) {
  GroupSum<Quants, COUNT> sums[ROWS][P];
  constexpr int X_WORDS = COUNT * WORDS / REGISTERS;
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) sums[r][p].begin(x[r * STRIDE].start[part]);
#pragma GCC unroll 8
  for (int number = 0; number < COUNT; number++) {
    Words words[P];
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) words[p] = Quants::word(from, part * COUNT + number, first + p);
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int p = 0; p < P; p++) sums[r][p].add(words[p], x[r * STRIDE].words + part * X_WORDS, number);
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
    for (int p = 0; p < P; p++) out[r][first + p] = sums[r][p].total(x[r * STRIDE].start[part]);
}

}  // namespace specstep
