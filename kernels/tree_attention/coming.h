// What is fetched into the first-level cache before it is needed.
#pragma once

#include <algorithm>
#include <cstdint>

namespace specstep::attention {

inline int64_t divide_up(int64_t value, int64_t by) { return (value + by - 1) / by; }
inline int64_t round_up(int64_t value, int64_t by) { return divide_up(value, by) * by; }

// Keys and values of the block that comes next, brought into the cache a few rows at a time between other work: all at
// once they are more than a core can wait for while it computes.
class Coming {
 public:
  Coming() = default;
  Coming(int64_t rows, int64_t shares) : rows_(rows), step_(divide_up(rows, shares)) {}
  void add(int which, const void* rows, int64_t stride, int64_t bytes) {
    lines_[which] = {static_cast<const char*>(rows), stride, bytes};
  }
  // One share.
  void fetch() {
    const int64_t end = std::min(next_ + step_, rows_);
    for (int64_t row = next_; row < end; row++)
      for (const Lines& lines : lines_)
        for (int64_t at = 0; at < lines.bytes; at += 64) __builtin_prefetch(lines.rows + row * lines.stride + at);
    next_ = end;
  }

 private:
  struct Lines {
    const char* rows;
    int64_t stride, bytes;
  };
  Lines lines_[2] = {};
  int64_t rows_ = 0, step_ = 0, next_ = 0;
};

}  // namespace specstep::attention
