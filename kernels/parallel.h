// How the operators of this library share work between threads.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <cstdint>

namespace specstep {

// Calls body(begin, end) over parts of [0, count), at least `grain` long but for the last, from several threads, and
// returns when all of it is done. What a part computes must not depend on where it begins and ends.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  torch::stable::parallel_for(0, count, grain, body);
}

}  // namespace specstep
