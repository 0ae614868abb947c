// What the operators do and when, for `specstep profile`: see record.cpp. Off, it costs a load and a branch per call.
#pragma once
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <vector>

namespace specstep {

constexpr int64_t MOST_INPUTS = 8;  // that a call is recorded with, the first ones

// kernels/recording.py reads the same layout.
struct RecordedInput {
  const void* data;
  int64_t bytes;
};

struct RecordedCall {
  const char* name;
  int64_t begin, end;  // nanoseconds of the monotonic clock; end is 0 until then
  int64_t read;        // bytes that it reads of its inputs where it says so, else -1
  int64_t inputs;
  RecordedInput input[MOST_INPUTS];
};

using Recorder = std::vector<RecordedCall>;

extern __thread Recorder* recorder;  // of the calling thread, null while it records nothing

void begin_call(const char* name);
void end_call();
void add_input(const torch::stable::Tensor& tensor);

// One call of an operator, from here to the end of the block.
class Recorded {
 public:
  explicit Recorded(const char* name) : recording_(recorder != nullptr) {
    if (recording_) begin_call(name);
  }
  ~Recorded() {
    if (recording_) end_call();
  }
  Recorded(const Recorded&) = delete;
  Recorded& operator=(const Recorded&) = delete;

 private:
  const bool recording_;
};

inline void record_input(const torch::stable::Tensor& tensor) {
  if (recorder != nullptr) add_input(tensor);
}

// For an operator that reads a part of its inputs: how many bytes `count()` they are.
template <class Count>
void record_read(const Count& count) {
  if (recorder != nullptr && !recorder->empty() && recorder->back().end == 0) recorder->back().read = count();
}

}  // namespace specstep
