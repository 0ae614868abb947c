// The product of x and a packed weight, for any number of rows, cut into tiles: see linear.cpp.
//
// With few rows the weight is streamed once, at the speed of memory. With many, a panel stays in the first-level cache, a
// chunk of K at a time, while block after block of rows goes by. Letters: M rows, N columns, K depth.
#pragma once

#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <utility>

#include "../parallel.h"
#include "following.h"
#include "linear.h"
#include "plan.h"

namespace specstep {

constexpr int64_t PACK_ELEMENTS = 64 * 1024;  // of x, least per thread

template <class Block>
using Tile = void (*)(const typename Block::Term*, const char*, int64_t, float*);

template <class Block, int... ROWS>
constexpr std::array<Tile<Block>, MAX_ROWS> tiles(std::integer_sequence<int, ROWS...>) {
  return {tile<Block, ROWS + 1>...};
}

template <class Block>
constexpr std::array<Tile<Block>, MAX_ROWS> TILES = tiles<Block>(std::make_integer_sequence<int, MAX_ROWS>());

// x as [block][step][row of the block], so that a tile reads it in one stream.
template <class Block>
void pack(const Plan<Block>& plan, const typename Block::Element* x, int64_t depth, typename Block::Term* to) {
  const int64_t block_elements = divide_up(plan.rows, plan.blocks) * std::max<int64_t>(1, depth);
  parallel_for(plan.blocks, divide_up(PACK_ELEMENTS, block_elements), [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; block++) {
      const int64_t first = plan.first_row(block), rows = plan.rows_of(block);
      auto* term = to + first * plan.steps;
      for (int64_t step = 0; step < plan.steps; step++) {
        const auto* from = x + first * depth + step * Block::STEP;
        const int64_t count = depth - step * Block::STEP;
        for (int64_t row = 0; row < rows; row++, from += depth) *term++ = Block::term(from, count);
      }
    }
  });
}

// Sums [rows][OUTPUTS] plus bias, rounded, to the `count` first outputs of each row.
template <class Element>
void store(const float* sums, int64_t rows, int64_t count, const Element* bias, Element* out, int64_t stride) {
  float shift[OUTPUTS] = {};
  for (int64_t i = 0; bias && i < count; i++) shift[i] = to_float(bias[i]);
  for (int64_t row = 0; row < rows; row++, sums += OUTPUTS, out += stride) {
    Element results[OUTPUTS];
    for (int i = 0; i < OUTPUTS; i += LANES) rounded(load<Lanes>(sums + i) + load<Lanes>(shift + i), results + i);
    if (count == OUTPUTS)
      std::memcpy(out, results, sizeof results);  // a constant size is a few instructions
    else
      std::memcpy(out, results, count * sizeof(Element));
  }
}

// All rows, packed, times one panel.
template <class Block>
void multiply_panel(const Plan<Block>& plan, const Layer& layer, const typename Block::Term* x, int64_t panel,
                    typename Block::Element* out) {
  alignas(64) float sums[SUM_ROWS * OUTPUTS];
  const char* weight = static_cast<const char*>(layer.weight) + panel * plan.panel_bytes();
  const auto* bias = static_cast<const typename Block::Element*>(layer.bias);
  const int64_t n = panel * OUTPUTS;
  for (int64_t first = 0; first < plan.blocks; first += SUM_ROWS / MAX_ROWS) {
    const int64_t end = std::min(plan.blocks, first + SUM_ROWS / MAX_ROWS), row = plan.first_row(first);
    const int64_t rows = plan.first_row(end) - row;
    std::fill_n(sums, rows * OUTPUTS, 0.0f);
    for (int64_t step = 0; step < plan.steps; step += CHUNK_STEPS<Block>) {
      const int64_t steps = std::min(CHUNK_STEPS<Block>, plan.steps - step);
      for (int64_t block = first; block < end; block++) {
        const int64_t at = plan.first_row(block), count = plan.rows_of(block);
        TILES<Block>[count - 1](x + at * plan.steps + step * count, weight + step * Block::BYTES, steps,
                                sums + (at - row) * OUTPUTS);
      }
    }
    store(sums, rows, std::min<int64_t>(OUTPUTS, layer.columns - n), bias ? bias + n : nullptr,
          out + row * layer.columns + n, layer.columns);
  }
}

// The product of zeros: the bias alone. A drafter that a step leaves out computes with zeros, and reads no weight.
template <class Element>
void store_bias(const Layer& layer, int64_t rows, Element* out) {
  const float sums[OUTPUTS] = {};
  const auto* bias = static_cast<const Element*>(layer.bias);
  for (int64_t row = 0; row < rows; row++)
    for (int64_t n = 0; n < layer.columns; n += OUTPUTS)
      store(sums, 1, std::min<int64_t>(OUTPUTS, layer.columns - n), bias ? bias + n : nullptr,
            out + row * layer.columns + n, layer.columns);
}

template <class Block>
void multiply(const Layer& layer, int64_t rows, const void* x, void* out) {
  if (rows == 0 || layer.columns == 0) return;
  using Term = typename Block::Term;
  using Element = typename Block::Element;
  const auto* from = static_cast<const Element*>(x);
  const bool zeros = std::all_of(from, from + rows * layer.depth, [](Element value) { return to_float(value) == 0; });
  if (zeros) return store_bias(layer, rows, static_cast<Element*>(out));
  const Plan<Block> plan(rows, layer.columns, layer.depth);
  const size_t bytes = divide_up(rows * plan.steps * sizeof(Term) + 1, 64) * 64;
  const std::unique_ptr<void, decltype(&std::free)> memory(std::aligned_alloc(64, bytes), &std::free);
  if (!memory) throw std::bad_alloc();
  auto* packed = static_cast<Term*>(memory.get());
  expect_after({layer.weight, plan.panels * plan.panel_bytes()});
  pack(plan, from, layer.depth, packed);
  parallel_for(plan.panels, plan.grain(), [&](int64_t begin, int64_t end) {
    for (int64_t panel = begin; panel < end; panel++)
      multiply_panel(plan, layer, packed, panel, static_cast<Element*>(out));
  });
}

}  // namespace specstep
