// Blocks of weights in groups of 32 along K, each a few bits with a scale of its own, as GGUF has them: q8_0, q4_0 and
// q4_1. The products of a group are sums of integers, which no order changes; x is quantised to signed bytes, a scale
// for each row and group.
#pragma once

#include "block.h"

namespace specstep {

constexpr int GROUP = 32;
constexpr int REGISTERS = GROUP / 4;  // words of four bytes along K, for each output

typedef int32_t Integers __attribute__((vector_size(4 * LANES)));

#if defined(__AVX512VNNI__)
constexpr int WORDS = REGISTERS;  // of x: four signed bytes each
#else
constexpr int WORDS = 2 * REGISTERS;  // of x: two signed halves each, of even bytes and of odd ones
#endif

// Rows whose sums of integers run side by side: as many as there are registers for.
constexpr int CHAINS = LANES == 16 ? 12 : 1;

struct GroupTerm {  // what a group takes of one row of x
  int32_t words[WORDS];
  int32_t start;  // of the sum of integers: takes away what the weights' bytes are more than their values
  float scale;
  float shift;  // the sum of x, which the least value of a group is multiplied by
};

// Two products of halves in each lane, added.
inline Integers multiply_halves(Words w, int32_t x) {
#if defined(__AVX512F__)
  return reinterpret_cast<Integers>(_mm512_madd_epi16(reinterpret_cast<__m512i>(w), _mm512_set1_epi32(x)));
#elif defined(__AVX2__)
  return reinterpret_cast<Integers>(_mm256_madd_epi16(reinterpret_cast<__m256i>(w), _mm256_set1_epi32(x)));
#elif defined(__SSE2__)
  return reinterpret_cast<Integers>(_mm_madd_epi16(reinterpret_cast<__m128i>(w), _mm_set1_epi32(x)));
#else
  const Integers wide = reinterpret_cast<Integers>(w);
  return (wide << 16 >> 16) * static_cast<int16_t>(x) + (wide >> 16) * (x >> 16);
#endif
}

// sum + four products of unsigned bytes of w with the bytes of x's word of that number, in each lane.
inline Integers multiply_bytes(Integers sum, Words w, const GroupTerm& x, int number) {
#if defined(__AVX512VNNI__)
  const __m512i word = _mm512_set1_epi32(x.words[number]);
  return reinterpret_cast<Integers>(
      _mm512_dpbusd_epi32(reinterpret_cast<__m512i>(sum), reinterpret_cast<__m512i>(w), word));
#else
  sum += multiply_halves(w & 0x00ff00ff, x.words[2 * number]);
  return sum + multiply_halves((w >> 8) & 0x00ff00ff, x.words[2 * number + 1]);
#endif
}

// Float16 of each output, finite.
inline Floats widen(const char* from) {
  Floats values;
#if defined(__AVX512F__)
  values.part[0] = _mm512_cvtph_ps(load<__m256i>(from));
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

// A group of a row of x as signed bytes: the largest becomes 127 or -127.
struct Quantized {
  float range;  // of x; that bytes stand for 127 times what they do
  int32_t sum;  // of the bytes
  int8_t bytes[GROUP];
};

inline float quantizing_factor(float range) { return range > 1e-30f ? 127.0f / range : 0.0f; }

inline void quantize(const uint16_t* bits, Quantized& to) {
#if defined(__AVX512F__) && defined(__AVX512BW__)
  const auto both = load<__m512i>(bits);
  const __m512i sizes = _mm512_and_si512(both, _mm512_set1_epi16(0x7fff));
  const __m256i most = _mm256_max_epu16(_mm512_castsi512_si256(sizes), _mm512_extracti64x4_epi64(sizes, 1));
  const __m128i greatest = _mm_max_epu16(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  const __m128i least = _mm_minpos_epu16(_mm_xor_si128(greatest, _mm_set1_epi16(-1)));
  to.range = to_float(Bfloat16{static_cast<uint16_t>(~_mm_cvtsi128_si32(least))});
  const __m512 factor = _mm512_set1_ps(quantizing_factor(to.range));
  const auto rounded = [&](__m256i half) {
    const __m512i wide = _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16);
    return _mm512_cvtps_epi32(_mm512_mul_ps(_mm512_castsi512_ps(wide), factor));
  };
  const __m512i low = rounded(_mm512_castsi512_si256(both)), high = rounded(_mm512_extracti64x4_epi64(both, 1));
  to.sum = _mm512_reduce_add_epi32(_mm512_add_epi32(low, high));
  const __m128i bytes[2] = {_mm512_cvtepi32_epi8(low), _mm512_cvtepi32_epi8(high)};
  std::memcpy(to.bytes, bytes, sizeof bytes);
#else
  uint16_t largest = 0;
  for (int i = 0; i < GROUP; i++) largest = std::max<uint16_t>(largest, bits[i] & 0x7fff);
  to.range = to_float(Bfloat16{largest}), to.sum = 0;
  const float factor = quantizing_factor(to.range);
  for (int i = 0; i < GROUP; i++) {
    to.bytes[i] = static_cast<int8_t>(__builtin_rintf(to_float(Bfloat16{bits[i]}) * factor));
    to.sum += to.bytes[i];
  }
#endif
}

// Quantises up to 32 elements of a row. NaN and infinities make the scale so.
inline void quantize(const Bfloat16* x, int64_t count, int offset, GroupTerm& term) {
  Quantized quantized;
  if (count >= GROUP) {
    quantize(&x->bits, quantized);
  } else {
    uint16_t bits[GROUP] = {};
    std::memcpy(bits, x, count * sizeof *bits);
    quantize(bits, quantized);
  }
  const auto& bytes = quantized.bytes;
#if defined(__AVX512VNNI__)
  std::memcpy(term.words, bytes, sizeof bytes);
#else
  for (int i = 0; i < WORDS; i++) {
    const int8_t* first = bytes + i / 2 * 4 + i % 2;
    const uint32_t low = static_cast<uint16_t>(first[0]), high = static_cast<uint16_t>(first[2]);
    term.words[i] = static_cast<int32_t>(low | high << 16);
  }
#endif
  term.start = -offset * quantized.sum;
  term.scale = quantized.range / 127.0f;
  term.shift = term.scale * static_cast<float>(quantized.sum);
}

// How a group's quants lie: BYTES of them, OFFSET more than the values they stand for.
struct ByteQuants {
  static constexpr int OFFSET = 128;
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
  static constexpr int OFFSET = MORE;
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
  // Word by word of the weights, so that the sums of rows, each a chain of additions, run side by side.
  template <int ROWS>
  static void multiply(Floats* sum, const Term* x, const char* from) {
    if constexpr (ROWS > CHAINS) {
      multiply<ROWS / 2>(sum, x, from);
      return multiply<ROWS - ROWS / 2>(sum + ROWS / 2, x + ROWS / 2, from);
    }
    const Floats scale = widen(from + Quants::BYTES), least = LEAST ? widen(from + Quants::BYTES + SCALES) : Floats{};
    for (int part = 0; part < PARTS; part++) {
      Integers products[ROWS];
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) products[r] = Integers{} + x[r].start;
#pragma GCC unroll 8
      for (int number = 0; number < REGISTERS; number++) {
        const Words word = Quants::word(from, number, part);
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) products[r] = multiply_bytes(products[r], word, x[r], number);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        Lanes& to = sum[r].part[part];
        to = multiply_add(to, __builtin_convertvector(products[r], Lanes), scale.part[part] * x[r].scale);
        if (LEAST) to = multiply_add(to, Lanes{} + x[r].shift, least.part[part]);
      }
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
