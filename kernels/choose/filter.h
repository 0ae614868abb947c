// The least logit that top-k, then top-p, then min-p keep.
#pragma once
#include <functional>

#include "../row.h"

namespace specstep {

constexpr int64_t BUCKETS = 1024, PER_NAT = 16;  // logits below the greatest by more than 64 nats share the last bucket

// Logits sorted into buckets by their distance to the greatest: how many there are in each, and their probabilities.
class Filter {
 public:
  Filter(const float* x, int64_t count, float greatest) : x_(x), count_(count), greatest_(greatest) {}

  float least(float top_k, float top_p, float min_p) {
    float threshold = NONE;
    const auto most = static_cast<int64_t>(top_k);
    if (top_p > 0 || (most > 0 && most < count_)) {
      fill();
      if (most > 0 && most < count_) threshold = kth(most);
      if (top_p > 0) threshold = nucleus(top_p, threshold);
    }
    return min_p > 0 ? std::fmax(threshold, greatest_ + std::log(min_p)) : threshold;
  }

 private:
  const float* x_;
  int64_t count_;
  float greatest_;
  std::vector<int64_t> sizes_ = std::vector<int64_t>(BUCKETS);
  std::vector<double> mass_ = std::vector<double>(BUCKETS);

  int64_t bucket(float value) const {
    const float place = (greatest_ - value) * PER_NAT;
    return place < BUCKETS - 1 ? static_cast<int64_t>(place) : BUCKETS - 1;
  }
  void fill() {
    float probability[BLOCK];
    int32_t place[BLOCK];
    for (int64_t first = 0; first < count_; first += BLOCK) {
      const int64_t size = std::min(BLOCK, count_ - first);
      for (int64_t i = 0; i < size; i++) {
        const float below = greatest_ - x_[first + i], far = below * PER_NAT;
        probability[i] = exp_below_one(-below);
        place[i] = static_cast<int32_t>(far < BUCKETS - 1 ? far : BUCKETS - 1);
      }
      for (int64_t i = 0; i < size; i++) sizes_[place[i]]++, mass_[place[i]] += probability[i];
    }
  }
  std::vector<float> members(int64_t wanted) const {
    std::vector<float> found;
    for (int64_t i = 0; i < count_; i++)
      if (bucket(x_[i]) == wanted) found.push_back(x_[i]);
    return found;
  }
  float kth(int64_t most) const {
    int64_t index = 0, before = 0;
    while (before + sizes_[index] < most) before += sizes_[index++];
    std::vector<float> found = members(index);
    const auto place = found.begin() + (most - before - 1);
    std::nth_element(found.begin(), place, found.end(), std::greater<float>());
    return *place;
  }
  float nucleus(float top_p, float threshold) {
    const int64_t last = threshold == NONE ? BUCKETS - 1 : bucket(threshold);
    double total = 0;
    for (int64_t index = 0; index < last; index++) total += mass_[index];
    std::vector<float> found = members(last);
    for (const float value : found) total += value >= threshold ? exp_below_one(value - greatest_) : 0.0f;
    const double wanted = top_p * total;
    double before = 0;
    int64_t index = 0;
    while (index < last && before + mass_[index] < wanted) before += mass_[index++];
    if (index < last) found = members(index);
    std::sort(found.begin(), found.end(), std::greater<float>());
    float kept = found.empty() ? threshold : found.front();
    for (const float value : found) {
      if (!(before < wanted) || value < threshold) break;
      kept = value;
      before += exp_below_one(value - greatest_);
    }
    return std::fmax(kept, threshold);
  }
};

}  // namespace specstep
