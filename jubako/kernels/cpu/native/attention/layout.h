// How is the scratch of an attention op divided?
#pragma once

#include <cstdint>

#include "../base/types.h"

namespace jb {

// Keys are attended in parts of this many positions, counted from position 0, and parts are merged
// in order. A row's result depends on its position alone then, not on who computes it with whom.
constexpr int64_t PART = 512;

// Rows (queries times heads of one KV head) that one pass over the keys serves, at most.
constexpr int64_t STREAM_ROWS = 32;

// Splits of contexts that can be under way at a time.
constexpr int64_t MERGE_COUNTERS = 4096;

// Rows of a task on tile registers: with more, keys are laid out less often; with fewer, there are
// more tasks to share. And keys that are laid out at a time.
constexpr int64_t TILE_ROWS = 512, FEW_TILE_ROWS = 256;
constexpr int64_t TILE_KEYS = 256;

struct ScratchHeader {
  int64_t next_task;
  int64_t threads_done;
  char padding[48];
  int32_t parts_done[MERGE_COUNTERS];
};

JB_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Bytes that one thread works in, but for its plan.
JB_INLINE int64_t stream_bytes(int64_t head_size, int64_t value_size) {
  int64_t q = round_up(head_size, 16), v = round_up(value_size, 16);
  int64_t floats = STREAM_ROWS * (q + 2 * v + 2 * 16 + 2 * 32 + 64);
  return 4 * floats + 3 * 8 * (PART + 64);
}

JB_INLINE int64_t tile_bytes(int64_t head_size, int64_t value_size) {
  int64_t q = round_up(head_size, 32), v = round_up(value_size, 32);
  int64_t halves = TILE_ROWS * q + TILE_KEYS * (q + v);
  int64_t floats = TILE_ROWS * (v + 16) + 2 * 32 * (TILE_KEYS + 16) + 20 * TILE_ROWS;
  return 2 * halves + 4 * floats + 4096;
}

JB_INLINE int64_t thread_bytes(int64_t head_size, int64_t value_size) {
  int64_t a = stream_bytes(head_size, value_size), b = tile_bytes(head_size, value_size);
  return round_up(a > b ? a : b, 4096);
}

constexpr int64_t PLAN_BYTES_PER_REQUEST = 40;

JB_INLINE int64_t plan_bytes(int64_t num_reqs) {
  return round_up((num_reqs + 1) * PLAN_BYTES_PER_REQUEST, 4096);
}

// Floats that keep one row of one part until the parts are merged.
JB_INLINE int64_t kept_row_floats(int64_t value_size) { return round_up(value_size, 16) + 16; }

}  // namespace jb
