// One step along K of a packed weight: a block of 16 outputs, times one row's elements of that step. For whichever
// instruction set the compiler is told to use (AVX512 with or without bfloat16, AVX2 with FMA, or anything with vectors
// of four floats).
//
// Within an instruction set every sum takes the same operations in the same order, wherever it is inlined: what the
// compiler could fuse or not as it likes is written as one operation.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace specstep {

constexpr int OUTPUTS = 16;  // of a panel: one step of them lies together

#if defined(__AVX512F__)
constexpr int LANES = 16, MAX_ROWS = 16;  // of 32 registers, each of 16 floats
#elif defined(__AVX2__) && defined(__FMA__)
constexpr int LANES = 8, MAX_ROWS = 5;  // of 16 registers, two for 16 floats
#else
constexpr int LANES = 4, MAX_ROWS = 2;  // of 16 registers, four for 16 floats
#endif
constexpr int PARTS = OUTPUTS / LANES;

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t Words __attribute__((vector_size(4 * LANES)));
typedef uint16_t Halves __attribute__((vector_size(2 * LANES)));

struct Floats {  // one for each output of a panel
  Lanes part[PARTS];
};

struct Bfloat16 {
  uint16_t bits;
};

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline float to_float(float value) { return value; }
inline float to_float(Bfloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  return load<float>(&word);
}

inline void rounded(Lanes values, float* out) { std::memcpy(out, &values, sizeof values); }
inline void rounded(Lanes values, Bfloat16* out) {  // to nearest, ties to even; NaN stays NaN
  const Words bits = reinterpret_cast<Words>(values);
  const Words finite = bits + 0x7fff + ((bits >> 16) & 1), nan = reinterpret_cast<Words>(values != values);
  const Halves upper = __builtin_convertvector(((finite & ~nan) | (nan & 0x7fc00000)) >> 16, Halves);
  std::memcpy(out, &upper, sizeof upper);
}

inline void add(float* sums, const Floats& more) {
  const Floats before = load<Floats>(sums);
  Floats after;
  for (int part = 0; part < PARTS; part++) after.part[part] = before.part[part] + more.part[part];
  std::memcpy(sums, &after, sizeof after);
}

inline Lanes all(float value) { return Lanes{} + value; }

// sum + x * w, rounded once where the instruction set can, twice where it cannot at all.
inline Lanes multiply_add(Lanes sum, Lanes x, Lanes w) {
#if defined(__AVX512F__)
  return _mm512_fmadd_ps(x, w, sum);
#elif defined(__AVX2__) && defined(__FMA__)
  return _mm256_fmadd_ps(x, w, sum);
#elif defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
  for (int lane = 0; lane < LANES; lane++) sum[lane] = __builtin_fmaf(x[lane], w[lane], sum[lane]);
  return sum;
#else
  return sum + x * w;
#endif
}

// How far ahead weights are fetched into the first-level cache (bench/LOG.md).
constexpr int64_t PREFETCH_BYTES = 8 * 1024;

inline void fetch_ahead(const char* from, int64_t bytes) {
  for (int64_t line = 0; line < bytes; line += 64) __builtin_prefetch(from + PREFETCH_BYTES + line, 0, 3);
}

// sum[r] += x[r] times what a step of a panel holds, with the weights of it in registers.
template <class Block, int ROWS>
inline void multiply_rows(Floats* sum, const typename Block::Term* x, const char* from) {
  fetch_ahead(from, Block::BYTES);
  const typename Block::Weights w = Block::weights(from);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) Block::multiply_one(sum[r], x[r], w);
}

// A kind of block says what one step takes of x (STEP elements, kept as a Term), how many BYTES of a panel, how some
// rows of the one are multiplied with the other, and which elements of K a step holds for one of its outputs.
struct Float32Block {
  using Element = float;
  using Term = float;
  using Weights = Floats;
  static constexpr int STEP = 1;
  static constexpr int64_t BYTES = OUTPUTS * sizeof(float);
  static Term term(const Element* x, int64_t) { return *x; }
  static Weights weights(const char* from) { return load<Floats>(from); }
  static void multiply_one(Floats& sum, Term x, const Weights& w) {
    for (int part = 0; part < PARTS; part++) sum.part[part] = multiply_add(sum.part[part], all(x), w.part[part]);
  }
  template <int ROWS>
  static void multiply(Floats* sum, const Term* x, const char* from) {
    multiply_rows<Float32Block, ROWS>(sum, x, from);
  }
  static void elements(const char* from, int lane, float* out) { *out = load<float>(from + lane * sizeof(float)); }
};

struct Bfloat16Pairs {
  using Element = Bfloat16;
  static constexpr int STEP = 2;
  static constexpr int64_t BYTES = OUTPUTS * STEP * sizeof(Bfloat16);
  static void elements(const char* from, int lane, float* out) {
    const auto pair = load<std::array<Bfloat16, STEP>>(from + lane * STEP * sizeof(Bfloat16));
    for (int k = 0; k < STEP; k++) out[k] = to_float(pair[k]);
  }
};

#if defined(__AVX512BF16__)
struct Bfloat16Block : Bfloat16Pairs {  // two elements of K in one instruction
  using Term = int32_t;
  using Weights = __m512i;
  static Term term(const Element* x, int64_t count) { return count > 1 ? load<Term>(x) : x->bits; }
  static Weights weights(const char* from) { return _mm512_loadu_si512(from); }
  static void multiply_one(Floats& sum, Term x, const Weights& w) {
    const __m512i both = _mm512_set1_epi32(x);
    sum.part[0] = _mm512_dpbf16_ps(sum.part[0], reinterpret_cast<__m512bh>(w), reinterpret_cast<__m512bh>(both));
  }
  template <int ROWS>
  static void multiply(Floats* sum, const Term* x, const char* from) {
    multiply_rows<Bfloat16Block, ROWS>(sum, x, from);
  }
};
#else
struct Bfloat16Block : Bfloat16Pairs {  // widened in registers: the upper half of a float is its bfloat16
  struct Term {
    float even, odd;
  };
  struct Weights {
    Floats even, odd;
  };
  static Term term(const Element* x, int64_t count) { return {to_float(x[0]), count > 1 ? to_float(x[1]) : 0.0f}; }
  static Weights weights(const char* from) {
    Weights w;
    for (int part = 0; part < PARTS; part++) {
      const Words pairs = load<Words>(from + part * sizeof(Words));
      w.even.part[part] = reinterpret_cast<Lanes>(pairs << 16);
      w.odd.part[part] = reinterpret_cast<Lanes>(pairs & 0xffff0000);
    }
    return w;
  }
  static void multiply_one(Floats& sum, Term x, const Weights& w) {
    for (int part = 0; part < PARTS; part++) {
      sum.part[part] = multiply_add(sum.part[part], all(x.even), w.even.part[part]);
      sum.part[part] = multiply_add(sum.part[part], all(x.odd), w.odd.part[part]);
    }
  }
  template <int ROWS>
  static void multiply(Floats* sum, const Term* x, const char* from) {
    multiply_rows<Bfloat16Block, ROWS>(sum, x, from);
  }
};
#endif

}  // namespace specstep
