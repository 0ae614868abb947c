// What the nodes of one row see, as positions: all that decides in which order a query adds.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "block.h"

namespace specstep::attention {

// A node sees positions `first` to `end`: below `direct` each lies in the slot of its own number, from there on the
// tree's keys lie in slots that the row lists from `own` on, in the order of their depths, then of their numbers.
struct Node {
  int64_t first, direct, end, own;

  bool mixed(int64_t start) const { return direct < end && direct < start + BLOCK && start < end; }
  bool sees(int64_t start) const { return start < end && (first < start + BLOCK || mixed(start)); }
};

// The pass as a row of the batch has it: pointers to its T nodes and M keys.
struct Where {
  int64_t length;
  const int64_t *depths, *key_depths;
  const int32_t* ancestors;
  int64_t nodes, keys, words, slots, window;

  bool visible(int64_t node, int64_t key) const {
    return static_cast<uint32_t>(ancestors[node * words + key / 32]) >> key % 32 & 1;
  }
  bool near(int64_t node, int64_t key) const { return window <= 0 || depths[node] - key_depths[key] < window; }
};

class Row {
 public:
  std::vector<Node> nodes;

  explicit Row(Where where) {
    where.length = std::clamp<int64_t>(where.length, 0, where.slots);
    where.keys = std::min(where.keys, where.slots - where.length);
    int64_t chain = 0;
    while (chain < where.keys && where.key_depths[chain] == chain) chain++;
    for (int64_t node = 0; node < where.nodes; node++) add(where, node, chain);
  }
  int64_t slot(const Node& node, int64_t position) const {
    return position < node.direct ? position : own_[node.own + position - node.direct].slot;
  }
  // Bit i: the node sees position start + i.
  uint64_t seen(const Node& node, int64_t start) const {
    uint64_t bits = below(node.direct - start) & ~below(node.first - start);
    for (int64_t position = std::max(start, node.direct); position < std::min(node.end, start + BLOCK); position++)
      bits |= static_cast<uint64_t>(own_[node.own + position - node.direct].near) << (position - start);
    return bits;
  }

 private:
  struct Own {
    int64_t slot, depth;
    bool near;
  };
  std::vector<Own> own_;

  static uint64_t below(int64_t count) {  // the first `count` bits
    return count >= BLOCK ? ~uint64_t{0} : count <= 0 ? 0 : (uint64_t{1} << count) - 1;
  }

  // chain: how many of the first keys lie at the position of their slot.
  void add(const Where& where, int64_t node, int64_t chain) {
    int64_t direct = 0, shallowest = std::numeric_limits<int64_t>::max();
    while (direct < chain && where.visible(node, direct)) direct++;
    for (int64_t key = direct; key < where.keys; key++)
      if (where.visible(node, key)) shallowest = std::min(shallowest, where.key_depths[key]);
    while (direct > 0 && direct - 1 > shallowest) direct--;  // a key of the rest comes before it
    const auto begin = static_cast<int64_t>(own_.size());
    for (int64_t key = direct; key < where.keys; key++)
      if (where.visible(node, key)) own_.push_back({where.length + key, where.key_depths[key], where.near(node, key)});
    std::sort(own_.begin() + begin, own_.end(), [](const Own& a, const Own& b) {
      return a.depth != b.depth ? a.depth < b.depth : a.slot < b.slot;
    });
    const int64_t first = where.window > 0 ? where.length + where.depths[node] + 1 - where.window : 0;
    direct += where.length;
    nodes.push_back({first, direct, direct + static_cast<int64_t>(own_.size()) - begin, begin});
  }
};

}  // namespace specstep::attention
