// One tile of a linear layer: ROWS rows of x times one panel of 16 outputs along a stretch of K.
//
// Every output has one accumulator, a lane of a register. It adds one step after the other over a chunk of K, and the
// sums of chunks are added in their order. The chunks are the same for every number of rows, and so are the bits of an
// output.
#pragma once

#include "block.h"

namespace specstep {

// A sum of short sums is off by less than one long sum: float32 is as accurate as BLAS has it. And 8 KB of a panel stay
// in the first-level cache while several blocks of rows use them.
template <class Block>
constexpr int64_t CHUNK_STEPS = 8 * 1024 / Block::BYTES;

// sums [ROWS][OUTPUTS] += x times the panel, over a chunk of `steps` steps. x: [steps][ROWS] terms.
template <class Block, int ROWS>
__attribute__((noinline)) void tile(const typename Block::Term* x, const char* panel, int64_t steps, float* sums) {
  Floats sum[ROWS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) sum[r] = Floats{};
  for (int64_t step = 0; step < steps; step++, x += ROWS, panel += Block::BYTES)
    Block::template multiply<ROWS>(sum, x, panel);
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; r++) add(sums + r * OUTPUTS, sum[r]);
}

}  // namespace specstep
