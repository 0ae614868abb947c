// How the operators of this library share work between threads: see parallel.cpp.
#pragma once
#include <cstdint>

namespace specstep {

using Part = void (*)(const void* body, int64_t begin, int64_t end);

// What the next long region will probably read, in stretches as its threads take them: those that wait for work fetch
// some of it into their caches. It need not be there when they do.
void expect(const void* memory, int64_t bytes);

void run_parts(int64_t count, int64_t grain, Part part, const void* body);

// Calls body(begin, end) over parts of [0, count), at least `grain` long but for the last, from as many threads as
// PyTorch may use, and returns when all of it is done. What is computed must not depend on where a part begins and ends.
// Called from a body, or while another thread is in here, it runs in the calling thread alone.
template <class Body>
void parallel_for(int64_t count, int64_t grain, const Body& body) {
  run_parts(
      count, grain, [](const void* given, int64_t begin, int64_t end) { (*static_cast<const Body*>(given))(begin, end); },
      &body);
}

}  // namespace specstep
