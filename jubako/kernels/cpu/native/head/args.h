// What do the ops take that choose tokens without writing logits? Mirrored in Python
// (jubako/kernels/cpu/head.py).
#pragma once

#include <cstdint>

#include "../matmul/layout.h"

namespace jb {

enum : int32_t {
  OP_HEAD_GREEDY = HEAD_OPS + 0,
};

// The largest of each row of x [rows, k] @ w.T + bias, the lowest id among equals after rounding to
// `round_dtype`. A soft cap would change no choice that rounding does not.
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

}  // namespace jb
