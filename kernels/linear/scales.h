// How the scales of a step's groups lie for the 16 outputs of a panel, and the least values that are added.
#pragma once

#include "quants.h"

namespace specstep {

constexpr int64_t HALF_BYTES = OUTPUTS * sizeof(uint16_t);  // of a float16 for each output

// Float16 of each output, finite.
inline Floats widen(const char* from) {
  Floats values;
#if defined(__AVX512F__)
  values.part[0] = _mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__F16C__)
  for (int part = 0; part < PARTS; part++) values.part[part] = _mm256_cvtph_ps(load<__m128i>(from + part * sizeof(Halves)));
#else
  for (int part = 0; part < PARTS; part++) {
    const Words bits = __builtin_convertvector(load<Halves>(from + part * sizeof(Halves)), Words);
    const Lanes magnitude = reinterpret_cast<Lanes>((bits & 0x7fff) << 13) * 0x1p112f;  // the exponent's other bias
    values.part[part] = reinterpret_cast<Lanes>(reinterpret_cast<Words>(magnitude) | (bits & 0x8000) << 16);
  }
#endif
  return values;
}

inline float lane_of(const Floats& values, int lane) { return values.part[lane / LANES][lane % LANES]; }

// A signed byte of each output, times a factor.
inline Floats scaled_bytes(const char* from, const Floats& factor) {
  typedef int8_t Bytes __attribute__((vector_size(LANES)));
  Floats values;
  for (int part = 0; part < PARTS; part++) {
#if defined(__AVX512F__)
    const Lanes wide = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
    const __m128i eight = _mm_cvtsi64_si128(load<int64_t>(from + part * LANES));
    const Lanes wide = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight));
#else
    const Lanes wide = __builtin_convertvector(load<Bytes>(from + part * LANES), Lanes);
#endif
    values.part[part] = wide * factor.part[part];
  }
  return values;
}

// Float16 of each of a group's COUNT parts.
template <int COUNT, bool WITH_LEAST>
struct HalfScales {
  static constexpr int GROUPS = 1, SUMS = COUNT;
  static constexpr bool LEAST = WITH_LEAST;
  static constexpr int64_t BYTES = SUMS * (LEAST ? 2 : 1) * HALF_BYTES;

  explicit HalfScales(const char* from) : from(from) {}
  Floats scale(int, int sum) const { return widen(from + sum * HALF_BYTES); }
  Floats least(int, int sum) const { return widen(from + (SUMS + sum) * HALF_BYTES); }

  const char* from;
};

// Signed bytes of each of COUNT parts of eight groups, and a float16 that they are times.
template <int COUNT, bool WITH_LEAST>
struct ByteScales {
  static constexpr int GROUPS = 8, SUMS = COUNT;
  static constexpr bool LEAST = WITH_LEAST;
  static constexpr int64_t ALL = GROUPS * SUMS * OUTPUTS, BYTES = (LEAST ? 2 : 1) * (ALL + HALF_BYTES);

  explicit ByteScales(const char* from)
      : from(from),
        factor(widen(from + (LEAST ? 2 : 1) * ALL)),
        least_factor(LEAST ? widen(from + 2 * ALL + HALF_BYTES) : Floats{}) {}
  Floats scale(int group, int sum) const { return scaled_bytes(from + (group * SUMS + sum) * OUTPUTS, factor); }
  Floats least(int group, int sum) const {
    return scaled_bytes(from + ALL + (group * SUMS + sum) * OUTPUTS, least_factor);
  }

  const char* from;
  Floats factor, least_factor;
};

}  // namespace specstep
