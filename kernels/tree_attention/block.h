// Attention of some queries over one block of 64 positions, and how the results of blocks are merged.
//
// A query's result for a block is a sum over its positions in their order, in which what the query does not see adds a
// zero: no bit of it depends on what else is computed with it. So does none of what merges it.
#pragma once

#include <limits>

#include "coming.h"
#include "element.h"

namespace specstep::attention {

constexpr int64_t BLOCK = 64;  // positions
constexpr int64_t ROWS = 6;    // queries whose sums are in registers at a time
constexpr int64_t COLUMNS = 256;  // of values, whose sums are in the first-level cache at a time
constexpr int64_t VALUES_PER_SHARE = 8;  // positions that are packed between two fetches
constexpr float LOWEST = -3e38f;         // below every score; finite, so that differences are

// What the score of a query and a key means: exp of it is 2 ** (factor * score), after what `capped` does to it.
struct Scores {
  float factor, least;
  float before;  // 0, or the factor of scores whose hyperbolic tangent is taken

  Scores(double scale, double softcap) {
    factor = static_cast<float>((softcap > 0 ? softcap : scale) * 1.4426950408889634);
    before = softcap > 0 ? static_cast<float>(scale / softcap) : 0.0f;
    least = least_power(factor);
  }
  // The weight of a sink relative to a score.
  float sink(float logit, float score) const {
    const Floats power_of_2 = multiply_add(splat(-score), splat(factor), splat(logit) * splat(1.44269504f));
    return power(power_of_2 < 126.0f ? power_of_2 : splat(126.0f), 1.0f, least_power(1.0f))[0];
  }
  Floats capped(Floats scores) const { return hyperbolic_tangent(scores * splat(before)); }
};

// Results of some queries, a row each: the greatest score, the sum of weights relative to its own, and the values'.
struct Partial {
  float *greatest, *total, *out;
  int64_t stride;  // of `out`

  Partial from(int64_t row) const { return {greatest + row, total + row, out + row * stride, stride}; }
  void clear(int64_t rows) const {
    std::fill_n(greatest, rows, LOWEST);
    std::fill_n(total, rows, 0.0f);
    std::fill_n(out, rows * stride, 0.0f);
  }
};

// How some queries weigh the positions of a block, a row of words each: relative to the greatest score; their sums.
struct Weights {
  float *greatest, *total;
  uint32_t* words;

  uint32_t* of(int64_t row) const { return words + row * BLOCK; }
  Weights from(int64_t row) const { return {greatest + row, total + row, of(row)}; }
};

// What earlier and later results are multiplied with where they are added.
struct Factors {
  Floats keep, add;
};

// Adds a later greatest score and total to earlier ones. Where nothing was seen later, no bit changes, here and below.
inline Factors merge_weights(const Scores& scores, float later_greatest, float later_total, float* greatest,
                             float* total) {
  const float most = *greatest > later_greatest ? *greatest : later_greatest;
  const Floats both = power(Floats{*greatest - most, later_greatest - most}, scores.factor, scores.least);
  const Factors factors{splat(both[0]), splat(both[1])};
  *greatest = most;
  *total = multiply_add(splat(*total), factors.keep, splat(later_total) * factors.add)[0];
  return factors;
}

// Adds later values to earlier ones.
inline void merge_values(int64_t columns, const Factors& factors, const float* later, float* sum) {
  for (int64_t c = 0; c < columns; c += LANES)
    store(sum + c, multiply_add(load<Floats>(sum + c), factors.keep, load<Floats>(later + c) * factors.add));
}

// Adds later results to earlier ones.
inline void merge(int64_t rows, int64_t columns, const Scores& scores, const Partial& later, const Partial& sum) {
  for (int64_t row = 0; row < rows; row++) {
    const Factors factors =
        merge_weights(scores, later.greatest[row], later.total[row], sum.greatest + row, sum.total + row);
    merge_values(columns, factors, later.out + row * later.stride, sum.out + row * sum.stride);
  }
}

// c[r] = sum over k, in its order, of a[r][k] * b[k], for R rows and N vectors of columns; or that is added to c.
template <class Kind, int R, int N>
inline void multiply_tile(const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t steps,
                          bool add, float* c, int64_t c_stride) {
  Floats sum[R][N] = {};
  for (int64_t k = 0; k < steps; k++, b += b_stride) {
    Words column[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) column[n] = load<Words>(b + n * LANES);
#pragma GCC unroll 6
    for (int r = 0; r < R; r++) {
      const Words value = Words{} + a[r * a_stride + k];
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sum[r][n] = Kind::multiply_add(sum[r][n], value, column[n]);
    }
  }
#pragma GCC unroll 6
  for (int r = 0; r < R; r++) {
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) {
      float* to = c + r * c_stride + n * LANES;
      store(to, add ? load<Floats>(to) + sum[r][n] : sum[r][n]);
    }
  }
}

// Steps are summed 64 at a time: one long sum would be less accurate.
template <class Kind, int R = ROWS>
void multiply(int64_t rows, const uint32_t* a, int64_t a_stride, const uint32_t* b, int64_t b_stride, int64_t steps,
              int64_t columns, float* c, int64_t c_stride) {
  if constexpr (R > 1)
    if (rows < R) return multiply<Kind, R - 1>(rows, a, a_stride, b, b_stride, steps, columns, c, c_stride);
  for (int64_t k = 0; k < steps; k += 64, a += 64, b += 64 * b_stride) {
    const int64_t count = std::min<int64_t>(64, steps - k);
    int64_t first = 0;
    for (; first + VECTORS * LANES <= columns; first += VECTORS * LANES)
      multiply_tile<Kind, R, VECTORS>(a, a_stride, b + first, b_stride, count, k > 0, c + first, c_stride);
    for (; first < columns; first += LANES)
      multiply_tile<Kind, R, 1>(a, a_stride, b + first, b_stride, count, k > 0, c + first, c_stride);
  }
}

// The weights of 64 scores relative to the greatest that is seen (bit i of `seen`: score i), packed; their sum.
template <class Values>
inline float weigh(const float* given, uint64_t seen, const Scores& scores, float* greatest, uint32_t* weights) {
  constexpr int COUNT = BLOCK / LANES;
  Floats each[COUNT], most = splat(LOWEST);
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; i++) {
    const Ints lanes = lanes_of_bits(static_cast<uint32_t>(seen >> (i * LANES)), std::make_index_sequence<LANES>());
    each[i] = load<Floats>(given + i * LANES);
    if (scores.before != 0) each[i] = scores.capped(each[i]);
    each[i] = lanes ? each[i] : splat(LOWEST);
    most = each[i] > most ? each[i] : most;
  }
  most = greatest_of_lanes(most);
#pragma GCC unroll 16
  for (int i = 0; i < COUNT; i++) {
    const Ints lanes = lanes_of_bits(static_cast<uint32_t>(seen >> (i * LANES)), std::make_index_sequence<LANES>());
    const Floats below = each[i] - most;
    const Floats weight = power(below, scores.factor, scores.least);
    const Ints none = ~lanes | (below < scores.least);
    each[i] = none ? Floats{} : weight;
  }
  *greatest = most[0];
  return Values::pack_weights(each, weights)[0];
}

// The sizes of heads, and how they are packed. Keys are packed [word][position], values [positions of a word][column].
template <class Keys, class Values>
struct Sizes {
  using Element = typename Keys::Element;
  using Stored = typename Keys::Stored;
  int64_t key, value;

  static constexpr int64_t RAW = 4 / sizeof(Stored);            // elements in 32 bits of memory
  static constexpr int64_t WORDS_OF_RAW = RAW / Keys::PER_WORD;  // as they are packed

  int64_t key_words() const { return divide_up(key, Keys::PER_WORD); }
  int64_t key_stride() const { return round_up(key_words(), LANES * WORDS_OF_RAW); }
  int64_t columns() const { return round_up(value, LANES); }
  int64_t value_stride() const { return round_up(value, LANES * Values::PER_WORD); }
  // How often the packing of a block fetches a share of what comes.
  int64_t shares() const { return BLOCK / LANES * divide_up(key, RAW * LANES) + BLOCK / VALUES_PER_SHARE; }

  void pack_query(const Element* from, uint32_t* to) const {
    constexpr int64_t STEP = LANES * Keys::PER_WORD;
    for (int64_t at = 0; at < key_stride() * Keys::PER_WORD; at += STEP, to += LANES) {
      Element padded[STEP] = {};
      if (at + STEP > key) std::copy_n(from + at, key - at, padded);
      store(to, Keys::words(at + STEP > key ? padded : from + at));
    }
  }
  // The keys of positions `first` to `end` of a block and those that share a vector with them; row(i) is position i's.
  template <class Row>
  void pack_keys(int64_t first, int64_t end, Row row, Coming& coming, uint32_t* to) const {
    constexpr int64_t STEP = LANES * RAW;
    for (int64_t lane = first / LANES * LANES; lane < end; lane += LANES) {
      const Stored* rows[LANES];
      for (int64_t i = 0; i < LANES; i++) rows[i] = row(std::min(lane + i, end - 1));
      uint32_t* packed = to + lane;
      for (int64_t at = 0; at < key; at += STEP) {
        coming.fetch();
        Words group[LANES];
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i++) group[i] = raw(rows[i] + at, key - at);
        transpose(group);
#pragma GCC unroll 16
        for (int64_t i = 0; i < LANES; i += Keys::WORDS_PER_SCALE) {
          const auto scales = Keys::scales_of(rows, key, at + i * RAW);
#pragma GCC unroll 16
          for (int64_t j = i; j < i + Keys::WORDS_PER_SCALE; j++)
            for (int word = 0; word < WORDS_OF_RAW; word++, packed += BLOCK)
              store(packed, Keys::word(group[j], word, scales));
        }
      }
    }
  }
  template <class Row>
  void pack_values(int64_t first, int64_t end, Row row, Coming& coming, uint32_t* to) const {
    constexpr int64_t PER_WORD = Values::PER_WORD, STEP = LANES * PER_WORD;
    static constexpr Stored ZEROS[STEP] = {};
    const int64_t count = value, whole = count / STEP * STEP, stride = value_stride();
    for (int64_t position = first / PER_WORD * PER_WORD; position < end; position += PER_WORD) {
      if (position % VALUES_PER_SHARE == 0) coming.fetch();
      const bool both = position + PER_WORD <= end;  // else zeros stand for the second position of its words
      const Stored *a = row(position), *b = both ? row(position + PER_WORD - 1) : a;
      const auto pack = [&](int64_t at, const Stored* from_a, const Stored* from_b) {
        Values::pack_values(from_a, from_b, Values::scale_of(a, count, at), Values::scale_of(b, count, at),
                            to + position / PER_WORD * stride + at);
      };
#pragma GCC unroll 4
      for (int64_t at = 0; at < whole; at += STEP) pack(at, a + at, both ? b + at : ZEROS);
      if (whole == count) continue;
      Stored last[2][STEP] = {};
      std::copy_n(a + whole, count - whole, last[0]);
      if (both) std::copy_n(b + whole, count - whole, last[1]);
      pack(whole, last[0], last[1]);
    }
  }
  // 32 bits for each lane of the `count` elements from `from` on, zeros beyond their end.
  static Words raw(const Stored* from, int64_t count) {
    if (count >= LANES * RAW) return load<Words>(from);
    Stored padded[LANES * RAW] = {};
    std::copy_n(from, count, padded);
    return load<Words>(padded);
  }

  // What at most ROWS queries weigh the first `end` positions of a packed block with.
  void weigh_keys(int64_t rows, const uint32_t* queries, const uint32_t* keys, int64_t end, const uint64_t* seen,
                  const Scores& scores, Coming& coming, const Weights& weights) const {
    alignas(64) float score[ROWS * BLOCK];
    multiply<Keys>(rows, queries, key_stride(), keys, BLOCK, key_words(), round_up(end, LANES), score, BLOCK);
    for (int64_t row = 0; row < rows; row++) {
      coming.fetch();
      weights.total[row] =
          weigh<Values>(score + row * BLOCK, seen[row], scores, weights.greatest + row, weights.of(row));
    }
  }
  // The values of the same positions, so weighed, merged into `sum`, some columns at a time.
  void add_values(int64_t rows, const Weights& weights, const uint32_t* values, int64_t end, const Scores& scores,
                  const Partial& sum) const {
    alignas(64) float out[ROWS * COLUMNS];
    Factors factors[ROWS];
    for (int64_t row = 0; row < rows; row++)
      factors[row] =
          merge_weights(scores, weights.greatest[row], weights.total[row], sum.greatest + row, sum.total + row);
    for (int64_t first = 0; first < columns(); first += COLUMNS) {
      const int64_t count = std::min(COLUMNS, columns() - first);
      multiply<Values>(rows, weights.words, BLOCK, values + first, value_stride(), divide_up(end, Values::PER_WORD),
                       count, out, COLUMNS);
      for (int64_t row = 0; row < rows; row++)
        merge_values(count, factors[row], out + row * COLUMNS, sum.out + row * sum.stride + first);
    }
  }
};

}  // namespace specstep::attention
