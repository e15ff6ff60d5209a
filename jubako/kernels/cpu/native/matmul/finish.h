// What becomes of a panel's sums: bias, activation, addition, rounding.
#pragma once

#include "../base/vec.h"
#include "layout.h"

namespace jb {
namespace JB_ISA {

template <int EPILOGUE>
JB_INLINE f32x16 activate(f32x16 gate) {
  if (EPILOGUE == EPILOGUE_SILU_MUL) return v_silu(gate);
  return EPILOGUE == EPILOGUE_GELU_TANH_MUL ? v_gelu_tanh(gate) : v_gelu(gate);
}

// Up to 16 outputs of a row to y[at ..].
template <bool ADD, int DTYPE>
JB_INLINE void write_part(void* y, int64_t at, f32x16 value, int64_t count) {
  if (count >= TILE) {
    if (ADD) value += v_load((const float*)y + at);
    v_store_any(y, at, DTYPE, value);
  } else if (count > 0) {
    if (ADD) value += v_load_part(y, at, F32, count);
    v_store_part(y, at, DTYPE, value, count);
  }
}

JB_INLINE f32x16 bias_of(const float* bias, int64_t at, int64_t count) {
  if (!bias || count <= 0) return v_set(0);
  return count >= TILE ? v_load(bias + at) : v_load_part(bias, at, F32, count);
}

// Where a panel's outputs go, and what is added to them.
template <int EPILOGUE>
struct Outputs {
  static constexpr bool GATED = EPILOGUE >= EPILOGUE_SILU_MUL;
  f32x16 shift0, shift1;
  int64_t to;     // in a row of y
  int64_t count;  // the panel's outputs, or more
};

template <int EPILOGUE>
JB_INLINE Outputs<EPILOGUE> outputs_of(const Matrix* w, int64_t panel, int64_t column, const float* bias) {
  constexpr bool GATED = Outputs<EPILOGUE>::GATED;
  const int64_t outputs = GATED ? w->n / 2 : w->n;
  const int64_t at = panel * (GATED ? TILE : PANEL), count = outputs - at;
  const f32x16 shift1 = GATED ? bias_of(bias, outputs + at, count) : bias_of(bias, at + TILE, count - TILE);
  return {bias_of(bias, at, count), shift1, column + at, count};
}

// Both tiles' sums of a row: with bf16 its 32 results are one whole cache line.
template <int EPILOGUE, int DTYPE>
JB_INLINE void finish_row(const MatmulArgs* a, const Outputs<EPILOGUE>& o, int64_t row, f32x16 v0, f32x16 v1) {
  const int64_t to = row * a->ldy + o.to;
  v0 += o.shift0;
  v1 += o.shift1;
  if (Outputs<EPILOGUE>::GATED) {
    write_part<false, DTYPE>(a->y, to, activate<EPILOGUE>(v0) * v1, o.count);
  } else {
    write_part<EPILOGUE == EPILOGUE_ADD, DTYPE>(a->y, to, v0, o.count);
    write_part<EPILOGUE == EPILOGUE_ADD, DTYPE>(a->y, to + TILE, v1, o.count - TILE);
  }
}

template <int EPILOGUE, int DTYPE>
static void finish_rows(const MatmulArgs* a, const Matrix* w, int64_t panel, int64_t column,
                        const float* bias, int64_t first, int64_t rows, const float* c) {
  const Outputs<EPILOGUE> o = outputs_of<EPILOGUE>(w, panel, column, bias);
  for (int64_t r = 0; r < rows; ++r) {
    finish_row<EPILOGUE, DTYPE>(a, o, first + r, v_load(c + r * PANEL), v_load(c + r * PANEL + TILE));
  }
}

// CALL(epilogue, dtype of y) for what the arguments say.
#define JB_EPILOGUE(a, CALL, EPILOGUE)   \
  case EPILOGUE:                         \
    if ((a)->y_dtype == F32) {           \
      CALL(EPILOGUE, F32);               \
    } else {                             \
      CALL(EPILOGUE, BF16);              \
    }                                    \
    break;
#define JB_EPILOGUES(a, CALL)                         \
  switch ((a)->epilogue) {                            \
    JB_EPILOGUE(a, CALL, EPILOGUE_NONE)               \
    JB_EPILOGUE(a, CALL, EPILOGUE_SILU_MUL)           \
    JB_EPILOGUE(a, CALL, EPILOGUE_GELU_TANH_MUL)      \
    JB_EPILOGUE(a, CALL, EPILOGUE_GELU_MUL)           \
    case EPILOGUE_ADD: CALL(EPILOGUE_ADD, F32); break; \
  }

// Rows first .. first + rows of the panel's outputs; `column` and `bias` belong to the part.
JB_INLINE void finish(const MatmulArgs* a, const Matrix* w, int64_t panel, int64_t column,
                      const float* bias, int64_t first, int64_t rows, const float* c) {
#define JB_FINISH(EPILOGUE, DTYPE) \
  finish_rows<EPILOGUE, DTYPE>(a, w, panel, column, bias, first, rows, c)
  JB_EPILOGUES(a, JB_FINISH)
#undef JB_FINISH
}

}  // namespace JB_ISA
}  // namespace jb
