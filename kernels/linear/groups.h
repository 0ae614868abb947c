// Blocks of weights in groups of 32 along K, a few bits each with scales of their own, as GGUF has them. The products of
// a group are sums of integers, which no order changes; x is quantised to signed bytes, a scale for each row and group.
#pragma once

#include "group_sum.h"
#include "scales.h"

namespace specstep {

// A kind of block, see block.h: the quants of a step's groups, then scales. CUT: a packed weight's last dimension is as
// many times shorter, which tells kinds of the same size apart.
template <class Quants, class Scales, int CUT = 1>
struct GroupBlock {
  static constexpr int GROUPS = Scales::GROUPS, SUMS = Scales::SUMS, STEP = GROUPS * GROUP;
  static constexpr int64_t QUANT_BYTES = GROUPS * Quants::BYTES, BYTES = QUANT_BYTES + Scales::BYTES, LAST = BYTES / CUT;
  using Element = Bfloat16;
  using OfGroup = GroupTerm<SUMS>;
  struct Term {
    OfGroup groups[GROUPS];
  };

  static Term term(const Element* x, int64_t count) {
    Term term = {};
    for (int64_t group = 0; group < GROUPS && group * GROUP < count; group++)
      quantize(x + group * GROUP, count - group * GROUP, Quants::OFFSET, term.groups[group]);
    return term;
  }
  template <int ROWS>
  static void multiply(Floats* sum, const Term* x, const char* from) {
    if constexpr (ROWS > CHAINS) {
      multiply<ROWS / 2>(sum, x, from);
      return multiply<ROWS - ROWS / 2>(sum + ROWS / 2, x + ROWS / 2, from);
    }
    const Scales scales(from + QUANT_BYTES);
    const OfGroup* of_group = x->groups;
#pragma GCC unroll 1
    for (int group = 0; group < GROUPS; group++, of_group++, from += Quants::BYTES) {
      fetch_ahead(from, BYTES / GROUPS);
      add_group<ROWS>(sum, of_group, from, scales, group);
    }
  }
  static void elements(const char* from, int lane, float* out) {
    const Scales scales(from + QUANT_BYTES);
    for (int k = 0; k < STEP; k++) {
      const int group = k / GROUP, sum = k % GROUP * SUMS / GROUP;
      const float scale = lane_of(scales.scale(group, sum), lane);
      const float least = Scales::LEAST ? lane_of(scales.least(group, sum), lane) : 0.0f;
      const int quant = Quants::quant(from + group * Quants::BYTES, lane, k % GROUP);
      out[k] = static_cast<float>(quant - Quants::OFFSET) * scale + least;
    }
  }

 private:
  template <int ROWS>
  static void add_group(Floats* sum, const OfGroup* x, const char* from, const Scales& scales, int group) {
    constexpr int COUNT = REGISTERS / SUMS;  // words of a part
    constexpr int AT_ONCE = GroupSum<Quants, COUNT>::REGISTERS_OF_SUM == 1 ? PARTS : 1;  // as many sums as there are registers for
#pragma GCC unroll 2
    for (int part = 0; part < SUMS; part++) {
      const Floats scale = scales.scale(group, part), least = Scales::LEAST ? scales.least(group, part) : Floats{};
      Integers products[ROWS][PARTS];
#pragma GCC unroll 4
      for (int first = 0; first < PARTS; first += AT_ONCE) {
        if (PARTS > 1) asm("" : "+r"(x));  // read again by each part: there are no registers to keep it in
        multiply_words<Quants, ROWS, AT_ONCE, COUNT, GROUPS>(products, x, from, part, first);
      }
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; r++) {
        const OfGroup& row = x[r * GROUPS];
#pragma GCC unroll 4
        for (int p = 0; p < PARTS; p++) {
          Lanes& to = sum[r].part[p];
          to = multiply_add(to, __builtin_convertvector(products[r][p], Lanes), scale.part[p] * row.scale);
          if (Scales::LEAST) to = multiply_add(to, Lanes{} + row.shift[part], least.part[p]);
        }
      }
    }
  }
};

template <int MORE>
using Nibbles = PlaneQuants<4, 0, MORE>;
using Int8Block = GroupBlock<ByteQuants, HalfScales<1, false>>;                         // q8_0
using Int4Block = GroupBlock<Nibbles<8>, HalfScales<1, false>>;                         // q4_0
using LeastInt4Block = GroupBlock<Nibbles<0>, HalfScales<1, true>>;                     // q4_1
using Int5Block = GroupBlock<PlaneQuants<4, 1, 16>, HalfScales<1, false>>;              // q5_0
using LeastInt5Block = GroupBlock<PlaneQuants<4, 1, 0>, HalfScales<1, true>>;           // q5_1
using Q2KBlock = GroupBlock<PlaneQuants<2, 0, 0>, ByteScales<2, true>>;
using Q3KBlock = GroupBlock<PlaneQuants<2, 1, 4>, ByteScales<2, false>>;
using Q4KBlock = GroupBlock<Nibbles<0>, ByteScales<1, true>>;
using Q5KBlock = GroupBlock<PlaneQuants<4, 1, 0>, ByteScales<1, true>>;
using Q6KBlock = GroupBlock<PlaneQuants<4, 2, 32>, ByteScales<2, false>>;
using Iq4Block = GroupBlock<TableQuants<UnevenTable>, HalfScales<1, false>, 16>;        // iq4_nl
using Iq4XsBlock = GroupBlock<TableQuants<UnevenTable>, ByteScales<1, false>>;
using Mxfp4Block = GroupBlock<TableQuants<FloatTable>, HalfScales<1, false>, 2>;
using Nvfp4Block = GroupBlock<TableQuants<FloatTable>, HalfScales<2, false>, 2>;

}  // namespace specstep
