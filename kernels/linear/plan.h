// How a product of packed weights is cut. None of it changes a bit of the result: see tile.h.
#pragma once

#include "tile.h"

namespace specstep {

constexpr int64_t SUM_ROWS = 256;          // whose sums are held while K goes by: 16 KB
constexpr int64_t TASK_BYTES = 32 * 1024;  // least weight per thread: takes about as long as waking the thread

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }

// Rows in blocks as even as can be.
template <class Block>
struct Plan {
  int64_t rows, panels, steps, blocks;

  Plan(int64_t m, int64_t n, int64_t k)
      : rows(m), panels(divide_up(n, OUTPUTS)), steps(divide_up(k, Block::STEP)), blocks(divide_up(m, MAX_ROWS)) {}
  int64_t panel_bytes() const { return steps * Block::BYTES; }
  int64_t first_row(int64_t block) const { return block * (rows / blocks) + std::min(block, rows % blocks); }
  int64_t rows_of(int64_t block) const { return first_row(block + 1) - first_row(block); }
  int64_t grain() const { return divide_up(TASK_BYTES, std::max<int64_t>(1, panel_bytes() * blocks)); }
};

}  // namespace specstep
