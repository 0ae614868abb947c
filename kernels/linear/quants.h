// How the quants of a group of 32 lie for the 16 outputs of a panel, and how they become unsigned bytes: words of four
// along K, an output each.
#pragma once

#include "block.h"

namespace specstep {

constexpr int GROUP = 32;
constexpr int REGISTERS = GROUP / 4;                  // words of four bytes along K, for each output
constexpr int64_t WORD_BYTES = OUTPUTS * sizeof(int32_t);  // of the words of a panel's outputs

// WIDTH bits of each quant: WIDTH words hold all 32, the first words in the lowest bits of their bytes.
template <int WIDTH>
struct Plane {
  static constexpr int64_t BYTES = WIDTH * WORD_BYTES;
  static constexpr uint32_t MASK = ((1u << WIDTH) - 1) * 0x01010101u;

  // The bits of word `number`, moved up to bit `to` of their bytes.
  static Words word(const char* from, int number, int part, int to) {
    const Words held = load<Words>(from + number % WIDTH * WORD_BYTES + part * sizeof(Words));
    const int down = number / WIDTH * WIDTH - to;
    return (down > 0 ? held >> down : held << -down) & MASK << to;
  }
  static int quant(const char* from, int lane, int k) {
    const int number = k / 4;
    const auto held = static_cast<uint8_t>(from[number % WIDTH * WORD_BYTES + lane * 4 + k % 4]);
    return held >> number / WIDTH * WIDTH & ((1 << WIDTH) - 1);
  }
};

// Quants of LOW bits and HIGH more above them, MORE than the numbers that they stand for.
template <int LOW, int HIGH, int MORE>
struct PlaneQuants {
  static constexpr int OFFSET = MORE, MOST = (1 << (LOW + HIGH)) - 1;
  static constexpr int64_t BYTES = (LOW + HIGH) * WORD_BYTES;
  static Words word(const char* from, int number, int part) {
    const Words low = Plane<LOW>::word(from, number, part, 0);
    if constexpr (HIGH == 0) return low;
    else return low | Plane<HIGH>::word(from + Plane<LOW>::BYTES, number, part, LOW);
  }
  static int quant(const char* from, int lane, int k) {
    const int low = Plane<LOW>::quant(from, lane, k);
    if constexpr (HIGH == 0) return low;
    else return low | Plane<HIGH>::quant(from + Plane<LOW>::BYTES, lane, k) << LOW;
  }
};

struct ByteQuants {
  static constexpr int OFFSET = 128, MOST = 255;
  static constexpr int64_t BYTES = REGISTERS * WORD_BYTES;
  static Words word(const char* from, int number, int part) {
    return load<Words>(from + number * WORD_BYTES + part * sizeof(Words));
  }
  static int quant(const char* from, int lane, int k) {
    return static_cast<uint8_t>(from[k / 4 * WORD_BYTES + lane * 4 + k % 4]);
  }
};

// Four bits that number the values of a Table, which are OFFSET too great.
template <class Table>
struct TableQuants {
  using Codes = PlaneQuants<4, 0, 0>;
  static constexpr int OFFSET = Table::OFFSET, MOST = Table::MOST;
  static constexpr int64_t BYTES = Codes::BYTES;
  static Words word(const char* from, int number, int part) {
    const Words codes = Codes::word(from, number, part);
#if defined(__AVX512BW__)
    const __m512i table = _mm512_broadcast_i32x4(load<__m128i>(Table::VALUES));
    return reinterpret_cast<Words>(_mm512_shuffle_epi8(table, reinterpret_cast<__m512i>(codes)));
#elif defined(__AVX2__)
    const __m256i table = _mm256_broadcastsi128_si256(load<__m128i>(Table::VALUES));
    return reinterpret_cast<Words>(_mm256_shuffle_epi8(table, reinterpret_cast<__m256i>(codes)));
#else
    uint8_t bytes[sizeof codes];
    std::memcpy(bytes, &codes, sizeof codes);
    for (uint8_t& byte : bytes) byte = Table::VALUES[byte];
    return load<Words>(bytes);
#endif
  }
  static int quant(const char* from, int lane, int k) { return Table::VALUES[Codes::quant(from, lane, k)]; }
};

struct UnevenTable {  // of GGUF's iq4_nl and iq4_xs
  static constexpr int OFFSET = 128, MOST = 241;
  static constexpr uint8_t VALUES[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
};

struct FloatTable {  // E2M1, doubled: of MXFP4 and NVFP4
  static constexpr int OFFSET = 12, MOST = 24;
  static constexpr uint8_t VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
};

}  // namespace specstep
