// One tile of a linear layer: ROWS x COLUMNS outputs along a stretch of K, for whichever instruction set the compiler is
// told to use (AVX512 with or without bfloat16, AVX2 with FMA, or anything with vectors of four floats).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace specstep {

#if defined(__AVX512F__)
constexpr int LANES = 16, COLUMNS = 4;  // 32 registers: 4 x 4 accumulators, 4 weights, 1 x
#elif defined(__AVX2__)
constexpr int LANES = 8, COLUMNS = 2;  // 16 registers
#else
constexpr int LANES = 4, COLUMNS = 2;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));

struct Bfloat16 {
  uint16_t bits;
};

inline float to_float(float value) { return value; }
inline float to_float(Bfloat16 value) {
  const uint32_t word = static_cast<uint32_t>(value.bits) << 16;
  float result;
  std::memcpy(&result, &word, sizeof result);
  return result;
}

template <class Packed>
inline Packed converted(Packed value) {
  return value;
}
template <class Packed>
inline std::enable_if_t<std::is_same_v<Packed, float>, float> converted(Bfloat16 value) {
  return to_float(value);
}

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void rounded(Floats values, float* out) { std::memcpy(out, &values, sizeof values); }
inline void rounded(Floats values, Bfloat16* out) {  // to nearest, ties to even; NaN stays NaN
  const Words bits = reinterpret_cast<Words>(values);
  const Words finite = bits + 0x7fff + ((bits >> 16) & 1), nan = reinterpret_cast<Words>(values != values);
  const Halves upper = __builtin_convertvector(((finite & ~nan) | (nan & 0x7fc00000)) >> 16, Halves);
  std::memcpy(out, &upper, sizeof upper);
}

// How one step along K is multiplied: STEP elements, one weight vector with one packed x vector.
struct FloatStep {
  using Element = float;
  using Packed = float;
  using Vector = Floats;
  static constexpr int STEP = LANES;
  static Vector weight(const Element* from) { return load<Floats>(from); }
  static Floats multiply_add(Floats sum, Vector x, Vector w) { return sum + x * w; }
};

#ifdef __AVX512BF16__
struct Bfloat16Step {
  using Element = Bfloat16;
  using Packed = Bfloat16;
  using Vector = __m512bh;
  static constexpr int STEP = 2 * LANES;
  static Vector weight(const Element* from) { return load<__m512bh>(from); }
  static Floats multiply_add(Floats sum, Vector x, Vector w) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), x, w));
  }
};
#else
struct Bfloat16Step {  // widened in registers: the upper half of a float is its bfloat16
  using Element = Bfloat16;
  using Packed = float;
  using Vector = Floats;
  static constexpr int STEP = LANES;
  static Vector weight(const Element* from) {
    return reinterpret_cast<Floats>(__builtin_convertvector(load<Halves>(from), Words) << 16);
  }
  static Floats multiply_add(Floats sum, Vector x, Vector w) { return sum + x * w; }
};
#endif

// One step of a row of x into its packed place: `count` elements (none for a row or a step that does not exist), zeros.
template <class Step>
inline void copy_padded(const typename Step::Element* from, int64_t count, typename Step::Packed* to) {
  using Packed = typename Step::Packed;
  if (std::is_same_v<Packed, typename Step::Element> && count == Step::STEP) {
    std::memcpy(to, from, Step::STEP * sizeof(Packed));
    return;
  }
  for (int i = 0; i < Step::STEP; i++) to[i] = i < count ? converted<Packed>(from[i]) : Packed{};
}

// Half of each input: lane 2i of the result is a[i] + a[i + LANES/2], lane 2i+1 the same of b.
template <size_t... I>
inline Floats fold(Floats a, Floats b, std::index_sequence<I...>) {
#ifdef __clang__
  return __builtin_shufflevector(a, b, (I % 2 * LANES + I / 2)...) +
         __builtin_shufflevector(a, b, (I % 2 * LANES + I / 2 + LANES / 2)...);
#else
  const Ints low = {static_cast<int32_t>(I % 2 * LANES + I / 2)...};
  return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, low + LANES / 2);
#endif
}

// Lane i of the result is the sum of the lanes of values[i]. Recursive, so that all of it stays in registers.
template <int HALF = LANES / 2>
inline Floats horizontal_sums(Floats* values) {
#pragma GCC unroll 16
  for (int i = 0; i < HALF; i++) values[i] = fold(values[i], values[i + HALF], std::make_index_sequence<LANES>());
  if constexpr (HALF > 1) return horizontal_sums<HALF / 2>(values);
  return values[0];
}

struct Prefetch {  // walks the weights of the next block while this one is used
  const char* next;
  int64_t stride, lines;
};

// sums[ROWS][COLUMNS] += x @ weight.T over `steps` whole steps; x is packed as [steps][ROWS][STEP].
template <class Step, int ROWS>
__attribute__((noinline)) void tile(const typename Step::Packed* x, const typename Step::Element* const* weight,
                                    int64_t steps, Prefetch ahead, float* sums) {
  constexpr int COUNT = ROWS * COLUMNS, PADDED = (COUNT + LANES - 1) / LANES * LANES;
  Floats sum[PADDED];
#pragma GCC unroll 16
  for (int i = 0; i < PADDED; i++) sum[i] = Floats{};
  for (int64_t k = 0; k < steps * Step::STEP; k += Step::STEP, x += ROWS * Step::STEP, ahead.next += ahead.stride) {
    typename Step::Vector w[COLUMNS];
#pragma GCC unroll 4
    for (int c = 0; c < COLUMNS; c++) w[c] = Step::weight(weight[c] + k);
    for (int64_t line = 0; line < ahead.lines; line++) __builtin_prefetch(ahead.next + 64 * line);
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r++) {
      const auto value = load<typename Step::Vector>(x + r * Step::STEP);
#pragma GCC unroll 4
      for (int c = 0; c < COLUMNS; c++)
        sum[r * COLUMNS + c] = Step::multiply_add(sum[r * COLUMNS + c], value, w[c]);
    }
  }
#pragma GCC unroll 16
  for (int first = 0; first < COUNT; first += LANES) {
    const Floats total = horizontal_sums(sum + first);
    if constexpr (COUNT % LANES == 0) {
      const Floats all = load<Floats>(sums + first) + total;
      std::memcpy(sums + first, &all, sizeof all);
    } else {
      for (int i = 0; i < std::min(LANES, COUNT - first); i++) sums[first + i] += total[i];
    }
  }
}

}  // namespace specstep
