// The Gumbel noise of noise.py, in uint32: the same bits.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>

namespace specstep {

constexpr uint32_t FACTORS[] = {0x21F0AAADu, 0x7FEB352Du, 0x2C1B3C6Du};
constexpr uint32_t OFFSETS[] = {0x9E3779B9u, 0x85EBCA6Bu};
constexpr float MOST_NOISE = 22.5f;  // no noise is larger: -log(2 ** -32)

inline uint32_t mix(uint32_t word) {
  word = (word + (word >> 16)) * FACTORS[1];
  word = (word + (word >> 13)) * FACTORS[2];
  return word + (word >> 16);
}

// The noise of one row at one position.
struct Noise {
  uint32_t key, other;

  Noise(int64_t seed, int64_t position) {
    const auto bits = static_cast<uint64_t>(seed);
    key = mix(static_cast<uint32_t>(bits) + OFFSETS[0]);
    key = mix(key + static_cast<uint32_t>(bits >> 32));
    key = mix(key + static_cast<uint32_t>(position));
    other = mix(key + OFFSETS[1]);
  }
  uint32_t bits(uint32_t token) const {
    const uint32_t mixed = (mix(token * FACTORS[0] + key) + other) * FACTORS[1];
    return mixed + (mixed >> 16);
  }
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
