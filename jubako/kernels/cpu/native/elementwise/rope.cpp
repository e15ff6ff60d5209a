// How are query and key heads normalised and turned, and how do keys and values reach the pages?

#include "../base/vec.h"
#include "args.h"
#include "page_rows.h"

namespace jb {
namespace JB_ISA {
namespace {

JB_INLINE void load_head(const RopeArgs& a, const void* source, const float* weight, float* x) {
  int64_t D = a.head_size;
  f32x16 squares = v_set(0);
  JB_FOR_16(i, n, D) {
    f32x16 v = load_16(source, i, a.dtype, n);
    squares += v * v;
    store_16(x, i, F32, v, n);
  }
  if (!weight) return;
  float inverse = 1.0f / __builtin_sqrtf(v_sum(squares) / (float)D + a.eps);
  JB_FOR_16(i, n, D) {
    store_16(x, i, F32, load_16(x, i, F32, n) * inverse * load_16(weight, i, F32, n), n);
  }
}

JB_INLINE void turn(const RopeArgs& a, int64_t token, float* x) {
  int64_t position = a.positions ? a.positions[token] : token;
  const float* cos = a.cos + position * a.ld_table;
  const float* sin = a.sin + position * a.ld_table;
  int64_t half = a.rotary / 2;
  if (a.interleaved) {
    for (int64_t d = 0; d < half; ++d) {
      float even = x[2 * d], odd = x[2 * d + 1];
      x[2 * d] = even * cos[d] - odd * sin[d];
      x[2 * d + 1] = odd * cos[d] + even * sin[d];
    }
    return;
  }
  JB_FOR_16(i, n, half) {
    f32x16 c = load_16(cos, i, F32, n), s = load_16(sin, i, F32, n);
    f32x16 low = load_16(x, i, F32, n), high = load_16(x + half, i, F32, n);
    store_16(x, i, F32, low * c - high * s, n);
    store_16(x + half, i, F32, high * c + low * s, n);
  }
}

JB_INLINE void put(const float* x, void* out, int32_t dtype, int64_t D) {
  JB_FOR_16(i, n, D) store_16(out, i, dtype, load_16(x, i, F32, n), n);
}

void rope(Team& team, const void* p) {
  const RopeArgs& a = *(const RopeArgs*)p;
  int64_t D = a.head_size, Hq = a.num_heads, Hkv = a.num_kv_heads;
  int64_t heads = Hq + Hkv + (a.pages ? Hkv : 0);
  Range part = team.range(*a.rows * heads);
  float x[MAX_HEAD_SIZE];
  for (int64_t item = part.begin; item < part.end; ++item) {
    int64_t token = item / heads, head = item % heads;
    int64_t slot = a.pages ? (*a.slots)[token] : 0;
    if (head >= Hq && slot < 0) continue;
    const char* source =
        (const char*)a.qkv + (token * a.ld_token + head * a.ld_head) * dtype_size(a.dtype);
    bool is_value = head >= Hq + Hkv;
    load_head(a, source, is_value || !a.weight ? nullptr : a.weight + head * D, x);
    if (!is_value && a.cos) turn(a, token, x);
    if (head < Hq || !a.pages) {
      int64_t place = token * a.ld_out_token + head * D;
      put(x, (char*)a.q_out + place * dtype_size(a.out_dtype), a.out_dtype, D);
    } else if (is_value) {
      write_page_row(x, page_row(a, slot, head - Hq - Hkv, 1), a.kv_dtype, D);
    } else {
      write_page_row(x, page_row(a, slot, head - Hq, 0), a.kv_dtype, D);
    }
  }
}

typedef double f64x8 __attribute__((vector_size(64)));
typedef int64_t i64x8 __attribute__((vector_size(64)));
typedef float f32x8 __attribute__((vector_size(32)));

// Sine and cosine of 8 angles below a million, right to the float32 they are rounded to in all but
// a few cases: quarter turns are taken off in double, the rest is a Taylor series.
JB_INLINE void sine_cosine(f64x8 x, f64x8* sine, f64x8* cosine) {
  const double magic = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  f64x8 shifted = x * 0.63661977236758134308 + magic;
  f64x8 turns = shifted - magic;
  f64x8 r = x - turns * 1.57079632679489655800;
  r = r - turns * 6.12323399573676603587e-17;
  f64x8 z = r * r;
  f64x8 s = z * (1.0 / 6227020800.0) - 1.0 / 39916800.0;
  s = s * z + 1.0 / 362880.0;
  s = s * z - 1.0 / 5040.0;
  s = s * z + 1.0 / 120.0;
  s = s * z - 1.0 / 6.0;
  s = s * z * r + r;
  f64x8 c = z * (-1.0 / 87178291200.0) + 1.0 / 479001600.0;
  c = c * z - 1.0 / 3628800.0;
  c = c * z + 1.0 / 40320.0;
  c = c * z - 1.0 / 720.0;
  c = c * z + 1.0 / 24.0;
  c = c * z - 0.5;
  c = c * z + 1.0;
  i64x8 quarter;
  memcpy(&quarter, &shifted, 64);
  i64x8 odd = -(quarter & 1);
  i64x8 sine_sign = (quarter & 2) << 62, cosine_sign = ((quarter + 1) & 2) << 62;
  i64x8 a, b;
  memcpy(&a, &s, 64);
  memcpy(&b, &c, 64);
  i64x8 u = ((a & ~odd) | (b & odd)) ^ sine_sign;
  i64x8 v = ((b & ~odd) | (a & odd)) ^ cosine_sign;
  memcpy(sine, &u, 64);
  memcpy(cosine, &v, 64);
}

void rotation(Team& team, const void* p) {
  const RotationArgs& a = *(const RotationArgs*)p;
  Range part = team.range(*a.rows);
  for (int64_t row = part.begin; row < part.end; ++row) {
    float position = (float)a.positions[row];
    float* cos = a.cos + row * a.ld_table;
    float* sin = a.sin + row * a.ld_table;
    for (int64_t i = 0; i < a.size; i += 8) {
      int64_t n = a.size - i < 8 ? a.size - i : 8;
      f32x8 angle = {};
      memcpy(&angle, a.frequencies + i, 4 * n);
      angle *= position;
      f64x8 s, c;
      sine_cosine(__builtin_convertvector(angle, f64x8), &s, &c);
      f32x8 low = __builtin_convertvector(s, f32x8) * a.factor;
      f32x8 high = __builtin_convertvector(c, f32x8) * a.factor;
      memcpy(sin + i, &low, 4 * n);
      memcpy(cos + i, &high, 4 * n);
    }
  }
}

}  // namespace

void fill_rope(OpTable& table) {
  table.fn[OP_ROPE] = rope;
  table.fn[OP_ROTATION] = rotation;
}

}  // namespace JB_ISA
}  // namespace jb
