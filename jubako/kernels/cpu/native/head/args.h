// What do the ops take that choose tokens without writing logits? Mirrored in Python
// (jubako/kernels/cpu/head.py).
#pragma once

#include <cstdint>

#include "../matmul/layout.h"

namespace jb {

enum : int32_t {
  OP_HEAD_GREEDY = HEAD_OPS + 0,
  OP_HEAD_CANDIDATES = HEAD_OPS + 1,
};

// The largest of each row of x [rows, k] @ w.T + bias, the lowest id among equals after rounding to
// `round_dtype`; -1 for a row of nothing but NaN or minus infinity. A soft cap would change no
// choice that rounding does not.
struct HeadGreedyArgs {
  const int64_t* rows;
  const void* x;
  int64_t ldx;
  const Matrix* w;
  const float* bias;  // [n] or null
  int64_t* ids;       // [rows]
  float* values;      // [rows], the rounded logits; or null
  void* scratch;      // head_scratch_bytes()
  int64_t scratch_bytes;
  int32_t x_dtype;
  int32_t round_dtype;
  int32_t activation_bits;
};

// The product's scratch, then for each thread and row what it has found: see greedy.cpp.
JB_INLINE int64_t head_scratch_bytes(int32_t threads, int64_t rows, int64_t k) {
  return matmul_scratch_bytes(threads, rows, k) + threads * rows * (256 + 16) + 64;
}

// What a row wants of OP_HEAD_CANDIDATES.
struct HeadRow {
  int32_t count;  // all tokens that are at least as good as the count-th best, 1 to HEAD_MAX_COUNT
  int32_t flags;
  float temperature;  // of HEAD_DRAW and HEAD_SUM_SCALED
  uint32_t key[3];    // of HEAD_DRAW
};

enum : int32_t {
  HEAD_DRAW = 1,        // instead of `count`: those that may win a draw from the whole vocabulary
  HEAD_SUM = 2,         // the logarithm of the sum of exponentials of all logits
  HEAD_SUM_SCALED = 4,  // the same of logits over the temperature
};

enum : int32_t { HEAD_MAX_COUNT = 512, HEAD_CAPACITY = 1024, HEAD_ROW_BYTES = 320 };

// `found` of a row without its candidates.
enum : int32_t {
  HEAD_TOO_MANY = -1,    // more equals than there is room for
  HEAD_NOT_NUMBERS = -2  // a logit is NaN
};

// The tokens of each row of x [rows, k] @ w.T + bias among which its choice lies, by ascending id,
// perhaps with a few more, and their logits, rounded to `round_dtype`. Tokens at minus infinity are
// none.
struct HeadCandidatesArgs {
  const int64_t* rows;
  const void* x;
  int64_t ldx;
  const Matrix* w;
  const float* bias;      // [n] or null
  const HeadRow* wanted;  // [rows]
  int32_t* found;         // [rows], how many
  int32_t* ids;           // [rows, HEAD_CAPACITY]
  float* values;          // [rows, HEAD_CAPACITY]
  double* sums;           // [rows, 2]: HEAD_SUM, HEAD_SUM_SCALED; others undefined
  // [rows] or null: a mask of the tokens, the lowest bit first, or null where all are allowed. Those
  // that are not are at minus infinity.
  const uint32_t* const* allowed;
  void* scratch;  // head_candidates_scratch_bytes()
  int64_t scratch_bytes;
  int32_t x_dtype;
  int32_t round_dtype;
  int32_t activation_bits;
};

// The product's scratch, then for each thread and row what it has found: see candidates.cpp.
JB_INLINE int64_t head_candidates_scratch_bytes(int32_t threads, int64_t rows, int64_t k) {
  return matmul_scratch_bytes(threads, rows, k) +
         threads * rows * (HEAD_ROW_BYTES + HEAD_CAPACITY * 8) + 64;
}

}  // namespace jb
