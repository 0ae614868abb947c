// Which weight follows which. The last step multiplied by q, k, v, then o, then gate: while threads wait after o, they
// fetch gate.
#pragma once

#include <unordered_map>

#include "../parallel.h"

namespace specstep {

constexpr size_t MOST_WEIGHTS = 16384;

struct Weight {
  const void* memory;
  int64_t bytes;
};

// Notes that a weight is multiplied by now, and has idle threads fetch the one that came after it last time.
inline void expect_after(const Weight& weight) {
  thread_local std::unordered_map<const void*, Weight> following;
  thread_local const void* before = nullptr;
  if (following.size() > MOST_WEIGHTS) following.clear();  // of models that are gone
  following[before] = weight;
  before = weight.memory;
  const auto next = following.find(before);
  if (next != following.end()) expect(next->second.memory, next->second.bytes);
}

}  // namespace specstep
