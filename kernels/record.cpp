// Records the calls that one thread makes of the operators: begin, end and inputs of each, in their order.
//
// Compiled models call each operator through `guarded`, which opens a call, and name its inputs through `borrowed`. What
// lies between two calls is the compiler's code.
#include "record.h"

#include <chrono>

namespace specstep {

__thread Recorder* recorder = nullptr;

namespace {

constexpr size_t ROOM = 4096;  // calls of a step, so that memory is seldom moved while it is timed

int64_t now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Recorder& own_recorder() {
  static thread_local Recorder own;
  return own;
}

}  // namespace

void begin_call(const char* name) {
  recorder->push_back({name, 0, 0, -1, 0, {}});
  recorder->back().begin = now();
}

void end_call() { recorder->back().end = now(); }

void add_input(const torch::stable::Tensor& tensor) {
  if (recorder->empty() || recorder->back().inputs == MOST_INPUTS) return;
  RecordedCall& call = recorder->back();
  call.input[call.inputs++] = {tensor.data_ptr(), tensor.numel() * static_cast<int64_t>(tensor.element_size())};
}

}  // namespace specstep

// What kernels/recording.py calls: records what the calling thread does from here on.
extern "C" __attribute__((visibility("default"))) void specstep_start_recording() {
  auto& own = specstep::own_recorder();
  own.clear();
  own.reserve(specstep::ROOM);
  specstep::recorder = &own;
}

// Ends that -> how many calls there were, and where they lie until the thread records again.
extern "C" __attribute__((visibility("default"))) int64_t specstep_stop_recording(
    const specstep::RecordedCall** calls) {
  specstep::recorder = nullptr;
  const auto& own = specstep::own_recorder();
  *calls = own.data();
  return static_cast<int64_t>(own.size());
}
