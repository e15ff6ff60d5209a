// What does the op of the experts need besides its arguments, and where in the scratch is it?
//
// A pair is a row and one of its experts. Pairs are sorted by expert, so that each expert multiplies
// all its rows at once.
#pragma once

#include "../matmul/layout.h"
#include "args.h"

namespace jb {

// Rows that are computed together: enough for each expert to have several, few enough for the
// scratch.
enum : int64_t { EXPERT_ROWS = 512 };

struct ExpertsLayout {
  // Elements from row to row of x and of what lies between the matrices, floats of answers: odd
  // numbers of cache lines.
  int64_t ld_x, ld_inner, ld_answer;
  int64_t starts, tokens, places, x, inner, answers, products, bytes;  // bytes from the start
};

JB_INLINE int64_t odd_lines(int64_t bytes) { return ((bytes + 63) / 64 | 1) * 64; }

// For `rows` rows, at most EXPERT_ROWS, of `hidden` elements of `element` bytes.
JB_INLINE ExpertsLayout experts_layout(int32_t threads, int64_t rows, int64_t experts, int64_t k,
                                       int64_t hidden, int64_t size, int64_t element) {
  ExpertsLayout l;
  const int64_t pairs = rows * k, wide = hidden > size ? hidden : size;
  l.ld_x = odd_lines(hidden * element) / element;
  l.ld_inner = odd_lines(size * element) / element;
  l.ld_answer = odd_lines(hidden * 4) / 4;
  l.starts = 0;
  l.tokens = round_up(4 * (experts + 1), 64);
  l.places = l.tokens + round_up(4 * pairs, 64);
  l.x = l.places + round_up(4 * pairs, 64);
  l.inner = l.x + pairs * l.ld_x * element;
  l.answers = l.inner + pairs * l.ld_inner * element;
  l.products = l.answers + pairs * l.ld_answer * 4;
  l.bytes = l.products + matmul_scratch_bytes(threads, pairs, wide);
  return l;
}

}  // namespace jb
