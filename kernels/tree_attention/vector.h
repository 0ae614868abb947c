// Vectors of floats for whichever instruction set the compiler is told to use, and the functions whose bits must be the
// same wherever they are called: no product is left next to a sum, which a compiler may or may not fuse.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif

namespace specstep::attention {

#if defined(__AVX512F__)
constexpr int LANES = 16, VECTORS = 4;  // VECTORS of each of ROWS rows are summed at a time: 24 of 32 registers
#elif defined(__AVX2__)
constexpr int LANES = 8, VECTORS = 2;  // 12 of 16
#else
constexpr int LANES = 4, VECTORS = 2;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));
typedef uint32_t Words __attribute__((vector_size(LANES * 4)));
typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
typedef uint16_t HalvesOfPairs __attribute__((vector_size(LANES * 4)));

template <class T>
inline T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}
template <class T>
inline void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

inline Floats splat(float value) { return Floats{} + value; }
inline Floats as_floats(Words value) { return reinterpret_cast<Floats>(value); }
inline Words as_words(Floats value) { return reinterpret_cast<Words>(value); }

// x * y + z, rounded once where the machine can do that.
inline Floats multiply_add(Floats x, Floats y, Floats z) {
#if defined(__AVX512F__)
  return reinterpret_cast<Floats>(
      _mm512_fmadd_ps(reinterpret_cast<__m512>(x), reinterpret_cast<__m512>(y), reinterpret_cast<__m512>(z)));
#elif defined(__AVX2__) && defined(__FMA__)
  return reinterpret_cast<Floats>(
      _mm256_fmadd_ps(reinterpret_cast<__m256>(x), reinterpret_cast<__m256>(y), reinterpret_cast<__m256>(z)));
#elif defined(__FP_FAST_FMAF)
  for (int i = 0; i < LANES; i++) z[i] = __builtin_fmaf(x[i], y[i], z[i]);
  return z;
#else
  return x * y + z;  // there is no instruction that could fuse them
#endif
}

// 2 ** (x * factor) for least <= x and x * factor < 127, with a relative error below 1e-7; 1 for x = 0. `least` is
// `least_power(factor)`; below it the result is 2 ** -125.
inline float least_power(float factor) { return factor > 1e-36f ? -125.0f / factor : -1e38f; }
inline Floats power(Floats x, float factor, float least) {
  const Floats by = splat(factor), shift = splat(12582912.0f);  // plus that, a float is rounded to an integer
  const Floats y = x < least ? splat(least) : x;
  const Floats shifted = multiply_add(y, by, shift);
  const Floats rest = multiply_add(y, by, shift - shifted);  // -0.5 to 0.5
  Floats p = splat(1.53533605e-4f);
  p = multiply_add(p, rest, splat(1.33988750e-3f));
  p = multiply_add(p, rest, splat(9.61843692e-3f));
  p = multiply_add(p, rest, splat(5.55033237e-2f));
  p = multiply_add(p, rest, splat(2.40226477e-1f));
  p = multiply_add(p, rest, splat(6.93147182e-1f));
  p = multiply_add(p, rest, splat(1.0f));
  return as_floats(as_words(p) + (as_words(shifted) << 23));
}

// tanh(x): a quotient of polynomials, within a few units in the last place.
inline Floats hyperbolic_tangent(Floats x) {
  x = x < -7.9053f ? splat(-7.9053f) : x;
  x = x > 7.9053f ? splat(7.9053f) : x;
  const Floats square = x * x;
  Floats p = splat(-2.76076847742355e-16f);
  p = multiply_add(p, square, splat(2.00018790482477e-13f));
  p = multiply_add(p, square, splat(-8.60467152213735e-11f));
  p = multiply_add(p, square, splat(5.12229709037114e-08f));
  p = multiply_add(p, square, splat(1.48572235717979e-05f));
  p = multiply_add(p, square, splat(6.37261928875436e-04f));
  p = multiply_add(p, square, splat(4.89352455891786e-03f));
  Floats q = splat(1.19825839466702e-06f);
  q = multiply_add(q, square, splat(1.18534705686654e-04f));
  q = multiply_add(q, square, splat(2.26843463243900e-03f));
  q = multiply_add(q, square, splat(4.89352518554385e-03f));
  return x * p / q;
}

// Lanes 0, COUNT, 1, COUNT + 1 ... of two vectors, from lane FROM of each on.
template <int FROM, class Vector, size_t... I>
inline Vector interleaved(Vector a, Vector b, std::index_sequence<I...>) {
  constexpr int COUNT = sizeof...(I);
#ifdef __clang__
  return __builtin_shufflevector(a, b, (FROM + I / 2 + I % 2 * COUNT)...);
#else
  typedef decltype(a == b) Places;
  using Place = std::decay_t<decltype(Places{}[0])>;
  return __builtin_shuffle(a, b, Places{static_cast<Place>(FROM + I / 2 + I % 2 * COUNT)...});
#endif
}
template <int FROM, class Vector>
inline Vector interleaved(Vector a, Vector b) {
  return interleaved<FROM>(a, b, std::make_index_sequence<sizeof(Vector) / sizeof(a[0])>());
}

// LANES vectors of LANES words become their columns.
template <int ROUND = 1>
inline void transpose(Words* rows) {
  Words out[LANES];
#pragma GCC unroll 16
  for (int i = 0; i < LANES / 2; i++) {
    out[2 * i] = interleaved<0>(rows[i], rows[i + LANES / 2]);
    out[2 * i + 1] = interleaved<LANES / 2>(rows[i], rows[i + LANES / 2]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < LANES; i++) rows[i] = out[i];
  if constexpr (2 * ROUND < LANES) transpose<2 * ROUND>(rows);
}

template <int BY, size_t... I>
inline Floats turned(Floats x, std::index_sequence<I...>) {  // lane i is lane i ^ BY
#ifdef __clang__
  return __builtin_shufflevector(x, x, (I ^ BY)...);
#else
  return __builtin_shuffle(x, Ints{static_cast<int32_t>(I ^ BY)...});
#endif
}

// The sum, or the greatest, of all lanes, in every lane.
template <int BY = LANES / 2>
inline Floats sum_of_lanes(Floats x) {
  x = x + turned<BY>(x, std::make_index_sequence<LANES>());
  if constexpr (BY > 1) return sum_of_lanes<BY / 2>(x);
  return x;
}
template <int BY = LANES / 2>
inline Floats greatest_of_lanes(Floats x) {
  const Floats other = turned<BY>(x, std::make_index_sequence<LANES>());
  x = x > other ? x : other;
  if constexpr (BY > 1) return greatest_of_lanes<BY / 2>(x);
  return x;
}

// All ones in the lanes whose bits are set.
template <size_t... I>
inline Ints lanes_of_bits(uint32_t bits, std::index_sequence<I...>) {
  const Words each = {(1u << I)...};
  return ((Words{} + bits) & each) != Words{};
}

}  // namespace specstep::attention
