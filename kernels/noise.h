// The Gumbel noise of noise.py, in uint32: the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace specstep {

constexpr uint32_t OFFSETS[] = {0x9E3779B9u, 0x85EBCA6Bu};
constexpr float MOST_NOISE = 22.5f;  // no noise is larger: -log(2 ** -32)

inline uint32_t round(uint32_t word) {
  word *= 2 * word + 1;
  return word >> 16 | word << 16;
}

// The noise of one row at one position.
struct Noise {
  uint32_t words[2];

  Noise(int64_t seed, int64_t position) {
    const auto bits = static_cast<uint64_t>(seed);
    const uint32_t given[] = {static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32),
                              static_cast<uint32_t>(position)};
    for (int i = 0; i < 2; i++) {
      words[i] = OFFSETS[i];
      for (const uint32_t part : given) words[i] = round(round(words[i] + part));
    }
  }
  uint32_t bits(uint32_t token) const { return round(round(round(words[0] + token) + words[1])); }
  float operator()(uint32_t token) const {
    const float w = std::fmin((static_cast<float>(static_cast<int32_t>(bits(token) >> 1)) + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
    const float series = w * (1 + w * (1.0f / 2 + w * (1.0f / 3 + w * (1.0f / 4 + w * (1.0f / 5)))));
    return -std::log(w < 0x1p-6f ? series : -std::log(1 - w));
  }
  // Not below the noise, and cheap: -log w, with the binary exponent of w in place of its logarithm.
  float bound(uint32_t token) const {
    const float w = static_cast<float>(static_cast<int32_t>(bits(token) >> 1)) + 0.5f;
    int32_t word;
    std::memcpy(&word, &w, sizeof word);
    return static_cast<float>(127 + 31 - (word >> 23)) * 0.69314718f + 1e-3f;
  }
};

}  // namespace specstep
