// How are rows normalised, alone and as they join the residual stream?

#include "../base/vec.h"
#include "args.h"
#include "rows.h"

namespace jb {
namespace JB_ISA {
namespace {

struct Moments {
  float mean, inverse;
};

// The mean that is subtracted and the factor of one row; `x(i, n)` is 16 elements from i on, of
// which the first n count and the others are 0.
template <class Load>
JB_INLINE Moments moments(Load x, int64_t size, int32_t kind, float eps) {
  float mean = 0;
  if (kind == LAYER_NORM) {
    f32x16 sum = v_set(0);
    JB_FOR_16(i, n, size) sum += x(i, n);
    mean = v_sum(sum) / (float)size;
  }
  f32x16 squares[2] = {v_set(0), v_set(0)};
  int turn = 0;
  JB_FOR_16(i, n, size) {
    f32x16 v = x(i, n);
    if (kind == LAYER_NORM) {
      v -= mean;
      if (n < 16) {
        for (int64_t j = n; j < 16; ++j) ((float*)&v)[j] = 0;
      }
    }
    squares[turn] += v * v;
    turn ^= 1;
  }
  float variance = v_sum(squares[0] + squares[1]) / (float)size;
  return {mean, 1.0f / __builtin_sqrtf(variance + eps)};
}

template <class Load>
JB_INLINE void normalise(Load x, int64_t size, int32_t kind, float eps, const float* weight,
                         const float* bias, void* y, int32_t y_dtype) {
  Moments m = moments(x, size, kind, eps);
  JB_FOR_16(i, n, size) {
    f32x16 v = (x(i, n) - m.mean) * m.inverse * load_16(weight, i, F32, n);
    if (bias) v += load_16(bias, i, F32, n);
    store_16(y, i, y_dtype, v, n);
  }
}

void norm(Team& team, const void* p) {
  const NormArgs& a = *(const NormArgs*)p;
  Range part = team.range(*a.rows);
  for (int64_t row = part.begin; row < part.end; ++row) {
    const void* x = row_of(a.x, a.index ? a.index[row] : row, a.ldx, a.x_dtype);
    void* y = row_of(a.y, row, a.ldy, a.y_dtype);
    auto load = [&](int64_t i, int64_t n) JB_LAMBDA { return load_16(x, i, a.x_dtype, n); };
    normalise(load, a.size, a.kind, a.eps, a.weight, a.bias, y, a.y_dtype);
  }
}

void add_norm(Team& team, const void* p) {
  const AddNormArgs& a = *(const AddNormArgs*)p;
  Range part = team.range(*a.rows);
  for (int64_t row = part.begin; row < part.end; ++row) {
    const void* delta = row_of(a.delta, row, a.ld_delta, a.delta_dtype);
    float* stream = a.stream + row * a.ld_stream;
    auto load = [&](int64_t i, int64_t n) JB_LAMBDA { return load_16(delta, i, a.delta_dtype, n); };
    Moments m = {0, 1};
    if (a.post_weight) m = moments(load, a.size, a.kind, a.eps);
    JB_FOR_16(i, n, a.size) {
      f32x16 v = load(i, n);
      if (a.post_weight) v = (v - m.mean) * m.inverse * load_16(a.post_weight, i, F32, n);
      if (a.post_bias) v += load_16(a.post_bias, i, F32, n);
      store_16(stream, i, F32, load_16(stream, i, F32, n) + v * a.scale, n);
    }
    if (!a.weight) continue;
    void* y = row_of(a.y, row, a.ldy, a.y_dtype);
    auto again = [&](int64_t i, int64_t n) JB_LAMBDA { return load_16(stream, i, F32, n); };
    normalise(again, a.size, a.kind, a.eps, a.weight, a.bias, y, a.y_dtype);
  }
}

}  // namespace

void fill_norm(OpTable& table) {
  table.fn[OP_NORM] = norm;
  table.fn[OP_ADD_NORM] = add_norm;
}

}  // namespace JB_ISA
}  // namespace jb
