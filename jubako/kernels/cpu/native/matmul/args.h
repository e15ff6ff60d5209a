// What do the matrix ops take? Mirrored in Python (jubako/kernels/cpu/matmul.py).
#pragma once

#include <cstdint>

#include "../base/optable.h"
#include "../base/types.h"

namespace jb {

enum : int32_t {
  OP_PACK = MATMUL_OPS + 0,
  OP_MATMUL = MATMUL_OPS + 1,
  OP_EMBED = MATMUL_OPS + 2,
  OP_READ = MATMUL_OPS + 3,
};

// How a packed matrix holds its numbers. INT8 has one scale for each row; the others from Q8_0 on
// are ggml's types, re-ordered but neither rounded nor expanded.
enum MatrixKind : int32_t {
  MATRIX_F32 = 0,
  MATRIX_BF16 = 1,
  MATRIX_INT8 = 2,
  MATRIX_Q8_0 = 3,
  MATRIX_Q4_0 = 4,
  MATRIX_Q4_1 = 5,
  MATRIX_Q5_0 = 6,
  MATRIX_Q5_1 = 7,
  MATRIX_Q4_K = 8,
  MATRIX_Q5_K = 9,
  MATRIX_Q6_K = 10,
};

// A weight matrix [n, k], packed: layout.h has the layout. Interleaved ones are two matrices
// [n / 2, k], gate and up, of which each panel has 16 rows each.
struct Matrix {
  int32_t kind;
  int32_t interleaved;
  int64_t n;
  int64_t k;
  void* data;     // matrix_bytes(), 64-byte aligned, zeroed before packing
  float* scales;  // INT8: one for each row of the panels; else null
};

// Rows [row, row + rows) of `to` from a row-major source. Of an interleaved matrix, rows of its
// half 0 (gate) or 1 (up). Other rows are left alone, so that a matrix can have several sources.
struct PackArgs {
  const Matrix* to;
  const void* from;
  int64_t from_stride;  // bytes between rows
  int64_t row;
  int64_t rows;
  int32_t from_kind;  // F32, BF16 or F16 (DType), or 16 + MatrixKind for ggml's blocks
  int32_t half;
};

enum Epilogue : int32_t {
  EPILOGUE_NONE = 0,
  EPILOGUE_ADD = 1,  // y += result; y is float32
  EPILOGUE_SILU_MUL = 2,  // act(gate) * up of an interleaved matrix: y [rows, n / 2]
  EPILOGUE_GELU_TANH_MUL = 3,
  EPILOGUE_GELU_MUL = 4,
};

// y [rows, n] = x [rows, k] @ w.T + bias, with `parts` matrices on the same x beside each other.
// Products are summed in float32 and rounded to y's type once. With float32 x each output is summed
// in an order that depends on nothing but k. With bf16 x and a kind from Q8_0 on, x may be rounded
// to 16 bits below the largest of each 32 neighbours, and weights to bf16.
struct MatmulArgs {
  const int64_t* rows;
  const void* x;
  int64_t ldx;  // elements; an odd multiple of 32 (64 bytes) reads fastest
  const Matrix* w;   // [parts]
  const float* bias;  // [n of all parts] or null
  void* y;
  int64_t ldy;  // elements
  // matmul_scratch_bytes(); ops that run one after another share it.
  void* scratch;
  int64_t scratch_bytes;
  int32_t parts;
  int32_t x_dtype;  // F32 or BF16
  int32_t y_dtype;
  int32_t epilogue;
  // INT8 and bf16 x: 8 bits for each activation, or 16 in two passes.
  int32_t activation_bits;
};

// y [rows, k] = scale * w[ids].
struct EmbedArgs {
  const int64_t* rows;
  const void* ids;  // [rows]
  const Matrix* w;
  void* y;
  int64_t ldy;  // elements
  float scale;
  int32_t ids_bits;  // 32 or 64
  int32_t y_dtype;   // F32 or BF16
};

// Reads memory and does nothing with it: the bandwidth that products are measured against.
struct ReadArgs {
  const void* data;  // 64-byte aligned
  int64_t bytes;     // a multiple of 512
  uint32_t* sums;    // one for each thread, 64 bytes apart
};

}  // namespace jb
