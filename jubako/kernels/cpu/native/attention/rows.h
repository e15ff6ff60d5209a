// How are the rows of a task kept, merged over the parts of their keys, and finished?
//
// A row is one query of one head. `m` is the largest score so far, `l` the sum of exp(score - m),
// `acc` the sum of exp(score - m) · value.
#pragma once

#include <cmath>

#include "../base/vec.h"
#include "args.h"
#include "plan.h"

namespace jb {
namespace JB_ISA {

constexpr float NOTHING = -INFINITY;

// exp(x) of one float, by the same instructions as of many.
static inline float exp_one(float x) {
  f32x16 y = v_exp(v_set(x));
  return ((const float*)&y)[0];
}

// Merge a part's sums into those of the parts before it. Its own function, so that it rounds alike
// wherever it is called from.
static __attribute__((noinline)) void merge_row(float* m, float* l, float* acc, float part_m,
                                                float part_l, const float* part_acc, int64_t size) {
  if (part_m == NOTHING) return;
  if (*m == NOTHING) {
    *m = part_m;
    *l = part_l;
    for (int64_t d = 0; d < size; d += 16) v_store(acc + d, v_load(part_acc + d));
    return;
  }
  float top = *m > part_m ? *m : part_m;
  float old = exp_one(*m - top), fresh = exp_one(part_m - top);
  *m = top;
  *l = *l * old + part_l * fresh;
  f32x16 a = v_set(old), b = v_set(fresh);
  for (int64_t d = 0; d < size; d += 16) {
    v_store(acc + d, v_load(acc + d) * a + v_load(part_acc + d) * b);
  }
}

// Write a row's result. `sink` is a score without a value; NOTHING: there is none.
static __attribute__((noinline)) void finish_row(const AttentionArgs& a, int64_t token, int64_t head,
                                                 float m, float l, const float* acc, float sink) {
  float factor = 0;
  if (m != NOTHING) {
    if (sink != NOTHING) {
      float top = m > sink ? m : sink;
      float rest = exp_one(m - top);
      factor = rest / (l * rest + exp_one(sink - top));
    } else {
      factor = 1.0f / l;
    }
  }
  int64_t at = token * a.out_stride + head * a.value_size;
  f32x16 f = v_set(factor);
  for (int64_t d = 0; d < a.value_size; d += 16) {
    f32x16 y = factor == 0 ? v_set(0) : v_load(acc + d) * f;
    int64_t n = a.value_size - d;
    if (a.dtype == F16) {
      for (int64_t j = 0; j < (n < 16 ? n : 16); ++j) {
        ((uint16_t*)a.out)[at + d + j] = f32_to_f16(((const float*)&y)[j]);
      }
    } else if (n >= 16) {
      v_store_any(a.out, at + d, a.dtype, y);
    } else {
      v_store_part(a.out, at + d, a.dtype, y, n);
    }
  }
}

static inline float sink_of(const AttentionArgs& a, int64_t head) {
  return a.sinks ? a.sinks[head] : NOTHING;
}

}  // namespace JB_ISA
}  // namespace jb
