// How do the ops on rows walk one, 16 elements at a time?
#pragma once

#include "../base/vec.h"

#define JB_LAMBDA __attribute__((always_inline))

// i = 0, 16, ... with n = 16, and what is left at the end.
#define JB_FOR_16(i, n, size)                                                           \
  for (int64_t i = 0, n = (size) < 16 ? (size) : 16; i < (size);                        \
       i += 16, n = (size) - i < 16 ? (size) - i : 16)

JB_INLINE f32x16 load_16(const void* p, int64_t i, int32_t dtype, int64_t n) {
  return n == 16 ? v_load_any(p, i, dtype) : v_load_part(p, i, dtype, n);
}

JB_INLINE void store_16(void* p, int64_t i, int32_t dtype, f32x16 v, int64_t n) {
  if (n == 16) {
    v_store_any(p, i, dtype, v);
  } else {
    v_store_part(p, i, dtype, v, n);
  }
}

JB_INLINE const void* row_of(const void* p, int64_t row, int64_t ld, int32_t dtype) {
  return (const char*)p + row * ld * dtype_size(dtype);
}

JB_INLINE void* row_of(void* p, int64_t row, int64_t ld, int32_t dtype) {
  return (char*)p + row * ld * dtype_size(dtype);
}

// Few rows are split within the row, so that all threads have work.
constexpr int64_t PIECE = 512;

struct Piece {
  int64_t row, start, size;
};

JB_INLINE int64_t pieces_of(int64_t size) { return (size + PIECE - 1) / PIECE; }

JB_INLINE Piece piece_of(int64_t item, int64_t size) {
  int64_t pieces = pieces_of(size), start = item % pieces * PIECE;
  return {item / pieces, start, size - start < PIECE ? size - start : PIECE};
}
