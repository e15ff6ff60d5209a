#include "arena.h"

#include <sys/mman.h>

namespace jb {
namespace {

constexpr int64_t HUGE = 2 << 20, PAGE = 4096;

// Small pieces would waste most of a huge page.
int64_t rounded(int64_t bytes) {
  int64_t unit = bytes >= HUGE / 2 ? HUGE : PAGE;
  return (bytes + unit - 1) / unit * unit;
}

}  // namespace

void* arena_alloc(int64_t bytes) {
  int64_t size = rounded(bytes < 1 ? 1 : bytes);
  int64_t slack = size >= HUGE ? HUGE : 0;
  char* start = (char*)mmap(nullptr, size + slack, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  if (slack) {
    int64_t before = (HUGE - (int64_t)start % HUGE) % HUGE;
    if (before) munmap(start, before);
    if (slack > before) munmap(start + before + size, slack - before);
    start += before;
    madvise(start, size, MADV_HUGEPAGE);
  }
  return start;
}

void arena_free(void* start, int64_t bytes) {
  if (start) munmap(start, rounded(bytes < 1 ? 1 : bytes));
}

}  // namespace jb
