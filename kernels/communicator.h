// What the ranks of an engine exchange, through memory that their processes share: see communicator.cpp.
#pragma once
#include <cstdint>

namespace specstep {

// Part `rank` of `parts` holds what that rank gave of bytes `begin` to `begin + count`.
using Taken = void (*)(const void* body, const char* const* parts, int64_t begin, int64_t count);

// The number of ranks that the calling thread's communicator has. Throws where it has none.
int64_t ranks_here();

void exchange_bytes(const void* mine, int64_t bytes, Taken taken, const void* body);

// Gives `bytes` bytes at `mine` to all ranks, and calls body(parts, begin, count) over what all gave of each stretch of
// them. Every rank makes the same calls in the same order. Throws where another rank has ended.
template <class Body>
void exchange(const void* mine, int64_t bytes, const Body& body) {
  exchange_bytes(
      mine, bytes,
      [](const void* given, const char* const* parts, int64_t begin, int64_t count) {
        (*static_cast<const Body*>(given))(parts, begin, count);
      },
      &body);
}

}  // namespace specstep
