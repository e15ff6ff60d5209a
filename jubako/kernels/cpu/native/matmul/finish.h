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

// Both tiles at once: with bf16 a row's 32 results are one whole cache line.
template <int EPILOGUE, int DTYPE>
static void finish_rows(const MatmulArgs* a, const Matrix* w, int64_t panel, int64_t column,
                        const float* bias, int64_t first, int64_t rows, const float* c) {
  constexpr bool GATED = EPILOGUE >= EPILOGUE_SILU_MUL;
  const int64_t outputs = GATED ? w->n / 2 : w->n;
  const int64_t at = panel * (GATED ? TILE : PANEL), count = outputs - at;
  const f32x16 shift0 = bias_of(bias, at, count);
  const f32x16 shift1 = GATED ? bias_of(bias, outputs + at, count) : bias_of(bias, at + TILE, count - TILE);
  const bool whole = count >= (GATED ? TILE : PANEL);
  for (int64_t r = 0; r < rows; ++r) {
    f32x16 v0 = v_load(c + r * PANEL) + shift0, v1 = v_load(c + r * PANEL + TILE) + shift1;
    const int64_t to = (first + r) * a->ldy + column + at;
    if (GATED) {
      v0 = activate<EPILOGUE>(v0) * v1;
      write_part<false, DTYPE>(a->y, to, v0, whole ? TILE : count);
    } else {
      write_part<EPILOGUE == EPILOGUE_ADD, DTYPE>(a->y, to, v0, whole ? TILE : count);
      write_part<EPILOGUE == EPILOGUE_ADD, DTYPE>(a->y, to + TILE, v1, whole ? TILE : count - TILE);
    }
  }
}

// Rows first .. first + rows of the panel's outputs; `column` and `bias` belong to the part.
JB_INLINE void finish(const MatmulArgs* a, const Matrix* w, int64_t panel, int64_t column,
                      const float* bias, int64_t first, int64_t rows, const float* c) {
#define JB_FINISH(EPILOGUE)                                                          \
  case EPILOGUE:                                                                     \
    if (a->y_dtype == F32) {                                                         \
      finish_rows<EPILOGUE, F32>(a, w, panel, column, bias, first, rows, c);         \
    } else {                                                                         \
      finish_rows<EPILOGUE, BF16>(a, w, panel, column, bias, first, rows, c);        \
    }                                                                                \
    break;
  switch (a->epilogue) {
    JB_FINISH(EPILOGUE_NONE)
    JB_FINISH(EPILOGUE_SILU_MUL)
    JB_FINISH(EPILOGUE_GELU_TANH_MUL)
    JB_FINISH(EPILOGUE_GELU_MUL)
    case EPILOGUE_ADD:
      finish_rows<EPILOGUE_ADD, F32>(a, w, panel, column, bias, first, rows, c);
      break;
  }
#undef JB_FINISH
}

}  // namespace JB_ISA
}  // namespace jb
