// Blocks of weights in groups of 32 along K, each a few bits with a scale of its own, as GGUF has them: q8_0, q4_0 and
// q4_1. The products of a group are sums of integers, which no order changes; x is quantised to signed bytes, a scale
// for each row and group.
#pragma once

#include "group_sum.h"

namespace specstep {

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

// How a group's quants lie: BYTES of them, OFFSET more than the values they stand for.
struct ByteQuants {
  static constexpr int OFFSET = 128, BITS = 8;
  static constexpr int64_t BYTES = GROUP * OUTPUTS;
  static Words word(const char* from, int number, int part) {
    return load<Words>(from + number * OUTPUTS * 4 + part * sizeof(Words));
  }
  static int quant(const char* from, int lane, int k) {
    return static_cast<uint8_t>(from[(k / 4 * OUTPUTS + lane) * 4 + k % 4]);
  }
};

template <int MORE>
struct NibbleQuants {  // elements 0 to 15 in the lower halves of bytes, 16 to 31 in the upper ones
  static constexpr int OFFSET = MORE, BITS = 4;
  static constexpr int64_t BYTES = GROUP * OUTPUTS / 2;
  static Words word(const char* from, int number, int part) {
    const Words both = load<Words>(from + number % 4 * OUTPUTS * 4 + part * sizeof(Words));
    return (number < 4 ? both : both >> 4) & 0x0f0f0f0f;
  }
  static int quant(const char* from, int lane, int k) {
    const auto both = static_cast<uint8_t>(from[(k % 16 / 4 * OUTPUTS + lane) * 4 + k % 4]);
    return k < 16 ? both & 15 : both >> 4;
  }
};

// A kind of block, see block.h: quants, then a scale for each output, then its least value where there is one.
template <class Quants, bool LEAST>
struct GroupBlock {
  using Element = Bfloat16;
  using Term = GroupTerm;
  static constexpr int STEP = GROUP;
  static constexpr int64_t SCALES = OUTPUTS * sizeof(uint16_t), BYTES = Quants::BYTES + (LEAST ? 2 : 1) * SCALES;

  static Term term(const Element* x, int64_t count) {
    Term term;
    quantize(x, count, Quants::OFFSET, term);
    return term;
  }
  template <int ROWS>
  static void multiply(Floats* sum, const Term* x, const char* from) {
    if constexpr (ROWS > CHAINS) {
      multiply<ROWS / 2>(sum, x, from);
      return multiply<ROWS - ROWS / 2>(sum + ROWS / 2, x + ROWS / 2, from);
    }
    const Floats scale = widen(from + Quants::BYTES), least = LEAST ? widen(from + Quants::BYTES + SCALES) : Floats{};
    Integers products[ROWS][PARTS];
    constexpr int AT_ONCE = Quants::BITS == 8 ? 1 : PARTS;  // bytes need twice the sums
#pragma GCC unroll 4
    for (int part = 0; part < PARTS; part += AT_ONCE) {
      if (PARTS > 1) asm("" : "+r"(x));  // read again by each part: there are no registers to keep it in
      multiply_group<Quants, ROWS, AT_ONCE>(products, x, from, part);
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
      for (int part = 0; part < PARTS; part++) {
        Lanes& to = sum[r].part[part];
        to = multiply_add(to, __builtin_convertvector(products[r][part], Lanes), scale.part[part] * x[r].scale);
        if (LEAST) to = multiply_add(to, Lanes{} + x[r].shift, least.part[part]);
      }
  }
  static void elements(const char* from, int lane, float* out) {
    const float scale = lane_of(widen(from + Quants::BYTES), lane);
    const float least = LEAST ? lane_of(widen(from + Quants::BYTES + SCALES), lane) : 0.0f;
    for (int k = 0; k < GROUP; k++)
      out[k] = static_cast<float>(Quants::quant(from, lane, k) - Quants::OFFSET) * scale + least;
  }
};

using Int8Block = GroupBlock<ByteQuants, false>;           // q8_0
using Int4Block = GroupBlock<NibbleQuants<8>, false>;      // q4_0
using LeastInt4Block = GroupBlock<NibbleQuants<0>, true>;  // q4_1

}  // namespace specstep
