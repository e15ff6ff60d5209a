// What is computed element by element between the products: plain activations, gates, and what makes
// numbers of positions.

#include <math.h>

#include "../base/vec.h"
#include "args.h"
#include "rows.h"

namespace jb {
namespace JB_ISA {
namespace {

// log(1 + e^x) = max(x, 0) + log(1 + u) with u = e^-|x|, and log(1 + u) = 2 atanh(u / (2 + u)), whose
// series ends early: its argument is at most a third.
f32x16 softplus(f32x16 x) {
  f32x16 u = v_exp(-v_abs(x));
  f32x16 s = u / (u + 2.0f), z = s * s;
  f32x16 p = v_set(1.0f / 15.0f);
  p = p * z + 1.0f / 13.0f;
  p = p * z + 1.0f / 11.0f;
  p = p * z + 1.0f / 9.0f;
  p = p * z + 1.0f / 7.0f;
  p = p * z + 1.0f / 5.0f;
  p = p * z + 1.0f / 3.0f;
  p = p * z + 1.0f;
  return v_max(x, v_set(0)) + 2.0f * s * p;
}

f32x16 plain(int32_t function, f32x16 x) {
  switch (function) {
    case PLAIN_SILU: return v_silu(x);
    case PLAIN_GELU_TANH: return v_gelu_tanh(x);
    case PLAIN_GELU: return v_gelu(x);
    case PLAIN_RELU: return v_max(x, v_set(0));
    case PLAIN_RELU_SQUARED: x = v_max(x, v_set(0)); return x * x;
    case PLAIN_TANH: return v_tanh(x);
    case PLAIN_SIGMOID: return v_sigmoid(x);
    case PLAIN_SOFTPLUS: return softplus(x);
    default: return x;
  }
}

void pointwise(Team& team, const void* p) {
  const PointwiseArgs& a = *(const PointwiseArgs*)p;
  Range part = team.range(*a.rows * pieces_of(a.size));
  for (int64_t item = part.begin; item < part.end; ++item) {
    const auto [row, start, size] = piece_of(item, a.size);
    const void* x = row_of(a.x, row, a.ldx, a.x_dtype);
    void* y = row_of(a.y, row, a.ldy, a.y_dtype);
    JB_FOR_16(i, n, size) {
      f32x16 v = load_16(x, start + i, a.x_dtype, n);
      if (a.bias) v += load_16(a.bias, start + i, F32, n);
      v = v_min(v_max(plain(a.function, v), v_set(a.low)), v_set(a.high));
      if (a.factor) v *= load_16(a.factor, start + i, F32, n);
      store_16(y, start + i, a.y_dtype, v, n);
    }
  }
}

void gate(Team& team, const void* p) {
  const GateArgs& a = *(const GateArgs*)p;
  Range part = team.range(*a.rows * pieces_of(a.size));
  for (int64_t item = part.begin; item < part.end; ++item) {
    const auto [row, start, size] = piece_of(item, a.size);
    const void* x = row_of(a.x, row, a.ldx, a.x_dtype);
    const void* gates = row_of(a.gate, row, a.ld_gate, a.gate_dtype);
    void* y = row_of(a.y, row, a.ldy, a.y_dtype);
    f32x16 factor = v_set(0);
    if (a.one) factor = plain(a.function, v_set(load_f32(gates, 0, a.gate_dtype)));
    JB_FOR_16(i, n, size) {
      if (!a.one) factor = plain(a.function, load_16(gates, start + i, a.gate_dtype, n));
      f32x16 v = load_16(x, start + i, a.x_dtype, n) * factor;
      if (a.add) v += load_16(y, start + i, F32, n);
      store_16(y, start + i, a.y_dtype, v, n);
    }
  }
}

void gated_norm(Team& team, const void* p) {
  const GatedNormArgs& a = *(const GatedNormArgs*)p;
  int64_t groups = a.size / a.group;
  Range part = team.range(*a.rows * groups);
  for (int64_t item = part.begin; item < part.end; ++item) {
    int64_t row = item / groups, start = item % groups * a.group;
    const void* x = row_of(a.x, row, a.ldx, a.x_dtype);
    const void* gates = row_of(a.gate, row, a.ld_gate, a.gate_dtype);
    void* y = row_of(a.y, row, a.ldy, a.y_dtype);
    f32x16 squares = v_set(0);
    JB_FOR_16(i, n, a.group) {
      f32x16 v = load_16(x, start + i, a.x_dtype, n);
      if (!a.norm_first) v *= v_silu(load_16(gates, start + i, a.gate_dtype, n));
      squares += v * v;
    }
    const float scale = 1.0f / __builtin_sqrtf(v_sum(squares) / (float)a.group + a.eps);
    JB_FOR_16(i, n, a.group) {
      f32x16 v = load_16(x, start + i, a.x_dtype, n) * scale;
      v *= load_16(a.weight, start + i, F32, n);
      v *= v_silu(load_16(gates, start + i, a.gate_dtype, n));
      store_16(y, start + i, a.y_dtype, v, n);
    }
  }
}

void position_scale(Team& team, const void* p) {
  const PositionScaleArgs& a = *(const PositionScaleArgs*)p;
  Range part = team.range(*a.rows);
  for (int64_t row = part.begin; row < part.end; ++row) {
    float steps = floorf(((float)a.positions[row] + a.offset) / a.every);
    a.y[row * a.ldy] = 1.0f + a.scale * log1pf(steps);
  }
}

}  // namespace

void fill_pointwise(OpTable& table) {
  table.fn[OP_POINTWISE] = pointwise;
  table.fn[OP_GATE] = gate;
  table.fn[OP_GATED_NORM] = gated_norm;
  table.fn[OP_POSITION_SCALE] = position_scale;
}

}  // namespace JB_ISA
}  // namespace jb
