// How rows of a cache are packed into 32-bit words, and how two words are multiplied: a word is one element as a float,
// or, where the machine multiplies them, two bfloat16.
#pragma once

#include <algorithm>

#include "vector.h"

namespace specstep::attention {

struct Bfloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

inline Words widened(const uint16_t* from) {
#ifdef __AVX512F__  // g++ 12 converts halves of a vector and joins them
  return reinterpret_cast<Words>(_mm512_cvtepu16_epi32(load<__m256i>(from)));
#else
  return __builtin_convertvector(load<Halves>(from), Words);
#endif
}

// Floats as words, of the elements in the lower 16 bits of words, what is above them zero; a float is its own.
template <class Element>
inline Words float_words(Words given) {
  if constexpr (std::is_same_v<Element, float>) return given;
  if constexpr (std::is_same_v<Element, Bfloat16>) return given << 16;
  const Words special = reinterpret_cast<Words>((given & 0x7c00) == 0x7c00);
  const Floats finite = as_floats((given & 0x7fff) << 13) * 0x1p112f;  // the exponent's other bias; exact
  return as_words(finite) | ((given & 0x8000) << 16) | (special & 0x7f800000);
}

// Floats rounded to nearest, ties to even; NaN stays NaN.
inline Words upper_halves(Floats values) {
  const Words bits = as_words(values), nan = reinterpret_cast<Words>(values != values);
  return (((bits + 0x7fff + ((bits >> 16) & 1)) & ~nan) | (nan & 0x7fc00000)) >> 16;
}
inline void store_rounded(Floats values, float* to) { store(to, values); }
inline void store_rounded(Floats values, Bfloat16* to) {
  store(to, __builtin_convertvector(upper_halves(values), Halves));
}
inline void store_rounded(Floats values, Float16* to) {
  const Words bits = as_words(values), size = bits & 0x7fffffff, sign = (bits >> 16) & 0x8000;
  const Words normal = (size + 0xfff + ((size >> 13) & 1) - (112u << 23)) >> 13;
  const Words small = as_words(as_floats(size) + 0.5f) - 0x3f000000;  // 0.5 has 2 ** -24 as its last place
  Words half = reinterpret_cast<Words>(size < 0x38800000u) & small;
  half |= reinterpret_cast<Words>((size >= 0x38800000u) & (size < 0x47800000u)) & normal;
  half |= reinterpret_cast<Words>(size >= 0x47800000u) & 0x7c00;
  half |= reinterpret_cast<Words>(size > 0x7f800000u) & 0x0200;
  store(to, __builtin_convertvector(half | sign, Halves));
}

// A cache of the numbers themselves.
template <class Given>
struct Plain {
  using Stored = Given;
  struct Scale {};
  static constexpr int WORDS_PER_SCALE = LANES;  // 32 bits of memory, whose elements have one scale
  static int64_t size(int64_t stored) { return stored; }  // of a row, in elements
  // The scales at column `at` of the rows that are the lanes of a vector, and of one row, of `count` elements each.
  static Scale scales_of(const Stored* const*, int64_t, int64_t) { return {}; }
  static Scale scale_of(const Stored*, int64_t, int64_t) { return {}; }
};

// One element a word. Element: of queries and results.
template <class Given>
struct Wide : Plain<Given> {
  using Element = Given;
  using Stored = Given;
  using Scale = typename Plain<Given>::Scale;
  static constexpr int PER_WORD = 1;
  static Words words(const Element* from) {
    if constexpr (sizeof(Element) == 2) return float_words<Element>(widened(&from->bits));
    return float_words<Element>(load<Words>(from));
  }
  // Word `i` of those that 32 bits of memory are.
  static Words word(Words raw, int i, Scale) {
    if constexpr (std::is_same_v<Element, Bfloat16>) return i ? raw & 0xffff0000 : raw << 16;
    if constexpr (std::is_same_v<Element, Float16>) return float_words<Element>(i ? raw >> 16 : raw & 0xffff);
    return raw;
  }
  static Floats multiply_add(Floats sum, Words x, Words y) {
    return attention::multiply_add(as_floats(x), as_floats(y), sum);
  }
  // The words of a vector of weights [64] in place, and their sum.
  static Floats pack_weights(const Floats* weights, uint32_t* to) {
    Floats total = weights[0];
    store(to, weights[0]);
#pragma GCC unroll 16
    for (int i = 1; i < 64 / LANES; i++) {
      store(to + i * LANES, weights[i]);
      total = total + weights[i];
    }
    return sum_of_lanes(total);
  }
  // LANES columns of a position as they are multiplied with its weight.
  static void pack_values(const Stored* first, const Stored*, Scale, Scale, uint32_t* to) { store(to, words(first)); }
};

// Rows of integers of eight bits, behind which lies a scale for each 32 of them, the upper half of a float: see
// int8_rows.py.
struct Bytes {
  using Stored = int8_t;
  using Scale = Floats;
  static constexpr int64_t GROUP = 32, SCALE_BYTES = 2;
  static constexpr int WORDS_PER_SCALE = LANES < GROUP / 4 ? LANES : GROUP / 4;
  static int64_t size(int64_t stored) { return stored - SCALE_BYTES * divide_up(stored, GROUP + SCALE_BYTES); }
  static uint32_t scale_bits(const int8_t* row, int64_t count, int64_t at) {
    return static_cast<uint32_t>(load<uint16_t>(row + count + at / GROUP * SCALE_BYTES)) << 16;
  }
  static Floats scales_of(const int8_t* const* rows, int64_t count, int64_t at) {
    Words bits;
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) bits[i] = scale_bits(rows[i], count, std::min(at, count - 1));
    return as_floats(bits);
  }
  static Floats scale_of(const int8_t* row, int64_t count, int64_t at) {
    return as_floats(Words{} + scale_bits(row, count, at));
  }
  // Byte i of each word, LANES bytes, as what they stand for.
  static Floats widened(Words raw, int i, Floats scales) {
    return __builtin_convertvector(reinterpret_cast<Ints>(raw << (24 - 8 * i)) >> 24, Floats) * scales;
  }
  static Floats widened(const int8_t* from, Floats scale) {
    typedef int8_t Packed __attribute__((vector_size(LANES)));
    return __builtin_convertvector(__builtin_convertvector(load<Packed>(from), Ints), Floats) * scale;
  }
};

// They are floats before they are multiplied.
template <class Given>
struct WideBytes : Wide<Given>, Bytes {
  using Bytes::scale_of, Bytes::scales_of, Bytes::size, Bytes::WORDS_PER_SCALE;
  using Stored = int8_t;
  using Scale = Floats;
  static Words word(Words raw, int i, Floats scales) { return as_words(Bytes::widened(raw, i, scales)); }
  static void pack_values(const int8_t* first, const int8_t*, Floats scale, Floats, uint32_t* to) {
    store(to, Bytes::widened(first, scale));
  }
};

#ifdef __AVX512BF16__
// Two bfloat16 a word, as vdpbf16ps takes them.
struct Pairs : Plain<Bfloat16> {
  using Element = Bfloat16;
  static constexpr int PER_WORD = 2;
  static Words words(const Element* from) { return load<Words>(from); }
  static Words word(Words raw, int, Scale) { return raw; }
  static Floats multiply_add(Floats sum, Words x, Words y) {
    return reinterpret_cast<Floats>(_mm512_dpbf16_ps(reinterpret_cast<__m512>(sum), reinterpret_cast<__m512bh>(x),
                                                     reinterpret_cast<__m512bh>(y)));
  }
  static Floats pack_weights(const Floats* weights, uint32_t* to) {
    const Words ones = Words{} + 0x3f803f80;
    Floats total = {};
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      const auto packed = reinterpret_cast<Words>(_mm512_cvtne2ps_pbh(
          reinterpret_cast<__m512>(weights[2 * i + 1]), reinterpret_cast<__m512>(weights[2 * i])));
      store(to + i * LANES, packed);
      total = multiply_add(total, packed, ones);  // of the rounded weights: their error cancels in the quotient
    }
    return sum_of_lanes(total);
  }
  // 2 * LANES columns of two positions.
  static void pack_values(const Stored* first, const Stored* second, Scale, Scale, uint32_t* to) {
    const auto a = load<HalvesOfPairs>(first), b = load<HalvesOfPairs>(second);
    store(to, interleaved<0>(a, b));
    store(to + LANES, interleaved<LANES>(a, b));
  }
};

// Bytes are rounded to bfloat16 before they are multiplied.
struct PairsOfBytes : Pairs, Bytes {
  using Bytes::scale_of, Bytes::scales_of, Bytes::size, Bytes::WORDS_PER_SCALE;
  using Stored = int8_t;
  using Scale = Floats;
  // Both rounded, `lower` in the lower halves of words.
  template <size_t... I>
  static Words counted(std::index_sequence<I...>) {
    return Words{static_cast<uint32_t>(I)...};
  }
  static Words paired(Floats lower, Floats upper) {
    const auto one_after_the_other =
        reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(reinterpret_cast<__m512>(upper), reinterpret_cast<__m512>(lower)));
    const Words places = counted(std::make_index_sequence<LANES>()) * 0x10001 + (LANES << 16);
    return reinterpret_cast<Words>(_mm512_permutexvar_epi16(reinterpret_cast<__m512i>(places), one_after_the_other));
  }
  static Words word(Words raw, int i, Floats scales) {
    return paired(Bytes::widened(raw, 2 * i, scales), Bytes::widened(raw, 2 * i + 1, scales));
  }
  static void pack_values(const int8_t* first, const int8_t* second, Floats scale, Floats second_scale, uint32_t* to) {
    for (int64_t at = 0; at < 2 * LANES; at += LANES)
      store(to + at, paired(Bytes::widened(first + at, scale), Bytes::widened(second + at, second_scale)));
  }
};
#endif

}  // namespace specstep::attention
