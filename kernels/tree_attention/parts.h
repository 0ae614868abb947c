// Tree attention as parts of work for several threads, and how their results come together.
//
// Each query adds over blocks of 64 positions, which are merged in their order into spans of 128, and those in theirs.
// A part is one row of the batch, one key head, some nodes with all query heads of that key head, and all spans or one.
#pragma once

#include <atomic>
#include <memory>
#include <stdexcept>

#include "../parallel.h"
#include "call.h"

namespace specstep::attention {

constexpr int64_t SPAN = 2 * BLOCK;   // positions
constexpr int64_t TILE_ROWS = 96;     // queries that share a packed block
constexpr int64_t ENOUGH_PARTS = 16;  // with fewer, spans are parts of their own

// Some nodes of one row and one key head, and the spans that they see.
struct Tile {
  int64_t row, head, first, last, begin, end;  // nodes, spans
  int64_t stop;                                // the first position that none of them sees
  int64_t results;                             // where its spans' results lie, when they are parts
};

struct Part {
  int64_t tile, begin, end;  // spans
};

template <class Keys, class Values>
class Attention {
  using Element = typename Keys::Element;
  using Stored = typename Keys::Stored;

 public:
  explicit Attention(const Call& call)
      : call_(call), sizes_{Keys::size(call.k.size), Values::size(call.v.size)}, group_(call.q.heads / call.k.heads) {
    const int64_t nodes = std::max<int64_t>(1, TILE_ROWS / group_);
    for (int64_t row = 0; row < call.q.batch; row++)
      for (int64_t first = 0; first < call.q.count; first += nodes)
        for (int64_t head = 0; head < call.k.heads; head++)
          tiles_.push_back(tile(row, head, first, std::min(first + nodes, call.q.count)));
  }

  void run() {
    const bool split = static_cast<int64_t>(tiles_.size()) < ENOUGH_PARTS;
    int64_t results = 0;
    for (size_t i = 0; i < tiles_.size(); i++) {
      const int64_t step = split ? 1 : tiles_[i].end - tiles_[i].begin;
      tiles_[i].results = results;
      if (step < tiles_[i].end - tiles_[i].begin) results += (tiles_[i].end - tiles_[i].begin) * floats(tiles_[i]);
      for (int64_t span = tiles_[i].begin; span < tiles_[i].end; span += step)
        parts_.push_back({static_cast<int64_t>(i), span, span + step});
    }
    results_ = scratch<float>(RESULTS, results);
    done_ = std::make_unique<std::atomic<int64_t>[]>(tiles_.size());
    for (size_t i = 0; i < tiles_.size(); i++) done_[i] = 0;
    parallel_for(static_cast<int64_t>(parts_.size()), 1, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; i++) run(i);
    });
  }

 private:
  const Call& call_;
  const Sizes<Keys, Values> sizes_;
  const int64_t group_;
  std::vector<Tile> tiles_;
  std::vector<Part> parts_;
  float* results_ = nullptr;
  std::unique_ptr<std::atomic<int64_t>[]> done_;  // parts of each tile

  int64_t rows(const Tile& tile) const { return (tile.last - tile.first) * group_; }
  int64_t floats(const Tile& tile) const { return round_up(rows(tile) * (sizes_.columns() + 2), LANES); }
  Partial partial(const Tile& tile, float* memory) const {
    const int64_t outs = rows(tile) * sizes_.columns();
    return {memory + outs, memory + outs + rows(tile), memory, sizes_.columns()};
  }

  Tile tile(int64_t row, int64_t head, int64_t first, int64_t last) const {
    int64_t begin = std::numeric_limits<int64_t>::max(), end = 0;
    for (int64_t i = first; i < last; i++) {
      const Node& node = call_.rows[row].nodes[i];
      begin = std::min(begin, std::min(node.direct < node.end ? node.direct : node.end, node.first));
      end = std::max(end, node.end);
    }
    begin = std::max<int64_t>(begin, 0) / SPAN;
    return {row, head, first, last, begin, std::max(begin + 1, divide_up(end, SPAN)), end, 0};
  }

  void run(int64_t index) {
    const Part& part = parts_[index];
    const Tile& tile = tiles_[part.tile];
    const int64_t spans = tile.end - tile.begin, size = floats(tile);
    auto* queries = scratch<uint32_t>(QUERIES, rows(tile) * sizes_.key_stride());
    for (int64_t row = 0; row < rows(tile); row++) {
      const int64_t head = tile.head * group_ + row % group_;
      sizes_.pack_query(call_.q.template at<Element>(tile.row, head, tile.first + row / group_),
                        queries + row * sizes_.key_stride());
    }
    const Partial sum = partial(tile, scratch<float>(RESULT, size));
    if (part.end - part.begin == spans) {
      const Partial one = partial(tile, scratch<float>(SPAN_RESULT, size));
      sum.clear(rows(tile));
      for (int64_t span = part.begin; span < part.end; span++) {
        attend(index, span, queries, one);
        merge(rows(tile), sizes_.columns(), call_.scores, one, sum);
      }
      return finish(tile, sum);
    }
    float* results = results_ + tile.results;
    attend(index, part.begin, queries, partial(tile, results + (part.begin - tile.begin) * size));
    if (++done_[part.tile] < spans) return;
    sum.clear(rows(tile));
    for (int64_t i = 0; i < spans; i++)
      merge(rows(tile), sizes_.columns(), call_.scores, partial(tile, results + i * size), sum);
    finish(tile, sum);
  }

  // One span of a part. Of each block the keys are packed and weighed, then the values in their place: both together
  // would be more than the first-level cache holds.
  void attend(int64_t index, int64_t span, const uint32_t* queries, const Partial& sum) const {
    const Tile& tile = tiles_[parts_[index].tile];
    const auto most = rows(tile);
    auto* held = scratch<float>(WEIGHTS, most * (BLOCK + 2));
    const Weights weights{held + most * BLOCK, held + most * (BLOCK + 1), reinterpret_cast<uint32_t*>(held)};
    auto* packed = scratch<uint32_t>(PACKED, std::max(sizes_.key_stride(), sizes_.value_stride()) * BLOCK);
    sum.clear(most);
    for (int64_t start = span * SPAN; start < (span + 1) * SPAN; start += BLOCK) {
      Coming next = coming(index, start);
      visit(
          tile, start, call_.k, [&](auto... rows) { sizes_.pack_keys(rows..., next, packed); },
          [&](int64_t row, int64_t count, int64_t end, const uint64_t* seen) {
            sizes_.weigh_keys(count, queries + row * sizes_.key_stride(), packed, end, seen, call_.scores, next,
                              weights.from(row));
          });
      visit(
          tile, start, call_.v, [&](auto... rows) { sizes_.pack_values(rows..., next, packed); },
          [&](int64_t row, int64_t count, int64_t end, const uint64_t*) {
            sizes_.add_values(count, weights.from(row), packed, end, call_.scores, sum.from(row));
          });
    }
  }

  // Keys or values of a block: calls `pack` with positions and where they lie, then `use` for the queries that see what
  // is packed. First come the nodes all of whose positions lie in the cache as they are, then each other one.
  template <class Pack, class Use>
  void visit(const Tile& tile, int64_t start, const Heads& heads, const Pack& pack, const Use& use) const {
    const Row& row = call_.rows[tile.row];
    const auto* slots = heads.template at<Stored>(tile.row, tile.head, 0);
    const int64_t stride = heads.strides[2];
    int64_t shared = 0, own = start + BLOCK;  // positions that lie in the cache as they are; the first that do not
    for (int64_t i = tile.first; i < tile.last; i++) {
      const Node& node = row.nodes[i];
      if (!node.sees(start)) continue;
      shared = std::max(shared, std::min({node.direct, node.end, start + BLOCK}) - start);
      if (node.mixed(start)) own = std::min(own, node.direct);
    }
    if (shared > 0) pack(int64_t{0}, shared, [=](int64_t i) { return slots + (start + i) * stride; });
    const auto direct = [&](int64_t i) { return row.nodes[i].sees(start) && !row.nodes[i].mixed(start); };
    for (int64_t i = tile.first, last; i < tile.last; i = last + 1) {
      for (last = i; last < tile.last && direct(last);) last++;
      use_queries(tile, start, i, last, use);
    }
    for (int64_t i = tile.first; own < start + BLOCK && i < tile.last; i++) {
      const Node& node = row.nodes[i];
      if (!node.mixed(start)) continue;
      const int64_t first = std::max(own, start) - start, end = std::min(node.end, start + BLOCK) - start;
      pack(first, end, [&](int64_t i) { return slots + row.slot(node, start + i) * stride; });
      use_queries(tile, start, i, i + 1, use);
    }
  }

  // Calls use(first query, count, the first position that none sees, what each sees) for the nodes `first` to `last`.
  template <class Use>
  void use_queries(const Tile& tile, int64_t start, int64_t first, int64_t last, const Use& use) const {
    const Row& row = call_.rows[tile.row];
    const int64_t end_row = (last - tile.first) * group_;
    for (int64_t at = (first - tile.first) * group_; at < end_row; at += ROWS) {
      const int64_t count = std::min(ROWS, end_row - at);
      uint64_t seen[ROWS];
      int64_t end = 0;
      for (int64_t i = 0; i < count; i++) {
        const Node& node = row.nodes[tile.first + (at + i) / group_];
        seen[i] = row.seen(node, start);
        end = std::max(end, std::min(node.end - start, BLOCK));
      }
      use(at, count, end, seen);
    }
  }

  // What comes after a part's block from `start` on: its next one, or the next part's first.
  Coming coming(int64_t index, int64_t start) const {
    const Tile* tile = &tiles_[parts_[index].tile];
    const int64_t queries = rows(*tile);
    start += BLOCK;
    if (start >= std::min(parts_[index].end * SPAN, tile->stop)) {
      if (++index == static_cast<int64_t>(parts_.size())) return {};
      tile = &tiles_[parts_[index].tile], start = parts_[index].begin * SPAN;
    }
    const int64_t positions = std::min({BLOCK, tile->stop - start, call_.k.count - start});
    if (positions <= 0) return {};
    Coming found(positions, sizes_.shares() + queries);
    const auto add = [&](int which, const Heads& heads) {
      constexpr auto ELEMENT = static_cast<int64_t>(sizeof(Stored));
      found.add(which, heads.template at<Stored>(tile->row, tile->head, start), heads.strides[2] * ELEMENT,
                 heads.size * ELEMENT);
    };
    add(0, call_.k), add(1, call_.v);
    return found;
  }

  void finish(const Tile& tile, const Partial& sum) const {
    for (int64_t i = 0; i < rows(tile); i++) {
      const int64_t node = tile.first + i / group_, head = tile.head * group_ + i % group_;
      const float total = sum.total[i] + (call_.sinks ? call_.scores.sink(call_.sinks[head], sum.greatest[i]) : 0.0f);
      const Floats divisor = splat(total < 1e-30f ? 1e-30f : total);
      const int64_t place = (tile.row * call_.q.count + node) * call_.q.heads + head;
      auto* out = static_cast<Element*>(call_.out) + place * sizes_.value;
      for (int64_t column = 0; column < sizes_.value; column += LANES) {
        alignas(64) Element rounded[LANES];
        store_rounded(load<Floats>(sum.out + i * sum.stride + column) / divisor, rounded);
        std::copy_n(rounded, std::min<int64_t>(LANES, sizes_.value - column), out + column);
      }
    }
  }
};

}  // namespace specstep::attention
