// How fast can the threads read memory? A plain loop, for comparison.

#include "args.h"
#include "native_width.h"
#include "../base/team.h"

namespace jb {
namespace JB_ISA {

void read(Team& team, const void* args) {
  const ReadArgs* a = (const ReadArgs*)args;
  Range own = team.range(a->bytes, 512);
  const char* at = (const char*)a->data + own.begin;
  const char* end = (const char*)a->data + own.end;
  constexpr int N = 512 / (4 * WIDTH);
  vu sums[N] = {};
  for (; at < end; at += 512) {
#pragma GCC unroll 32
    for (int i = 0; i < N; ++i) {
      if (i % (16 / WIDTH) == 0) __builtin_prefetch(at + 4096 + 4 * WIDTH * i);
      sums[i] += loadu(at + 4 * WIDTH * i);
    }
  }
  uint32_t total = 0;
  for (int i = 0; i < N; ++i) {
    for (int j = 0; j < WIDTH; ++j) total += sums[i][j];
  }
  a->sums[16 * team.rank] = total;
}

}  // namespace JB_ISA
}  // namespace jb
