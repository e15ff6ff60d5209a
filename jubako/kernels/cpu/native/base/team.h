// What does an op know of the threads that run it together?
#pragma once

#include <cstdint>

namespace jb {

struct Range {
  int64_t begin, end;
};

// One thread's view of the team. Every thread of the team calls the same op with the same
// arguments; rank 0 is the thread that called the library.
struct Team {
  int rank, size;
  void* barrier_state;

  // Wait until all threads of the team are here. Every thread must call it equally often.
  void barrier();

  // This thread's part of [0, n), a static split at multiples of `align`.
  // Inlined always, so that no level's copy is linked into another.
  __attribute__((always_inline)) Range range(int64_t n, int64_t align = 1) const {
    int64_t pieces = (n + align - 1) / align;
    int64_t begin = pieces * rank / size * align;
    int64_t end = pieces * (rank + 1) / size * align;
    return {begin < n ? begin : n, end < n ? end : n};
  }
};

}  // namespace jb
