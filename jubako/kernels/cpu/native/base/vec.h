// How are 16 floats computed with at once, on every instruction set from one source?
//
// GCC's vector extensions: the compiler splits a vector into what the level has. Everything here is
// inlined, so that no function of one level can be linked into another.
#pragma once

#include <cstdint>
#include <cstring>

#include "types.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));

JB_INLINE f32x16 v_set(float x) {
  f32x16 v = {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
  return v;
}

JB_INLINE i32x16 v_seti(int32_t x) {
  i32x16 v = {x, x, x, x, x, x, x, x, x, x, x, x, x, x, x, x};
  return v;
}

JB_INLINE f32x16 v_load(const float* p) {
  f32x16 v;
  memcpy(&v, p, 64);
  return v;
}

JB_INLINE void v_store(float* p, f32x16 v) { memcpy(p, &v, 64); }

JB_INLINE f32x16 v_load_bf16(const uint16_t* p) {
  u16x16 h;
  memcpy(&h, p, 32);
  u32x16 bits = __builtin_convertvector(h, u32x16) << 16;
  f32x16 v;
  memcpy(&v, &bits, 64);
  return v;
}

// To the nearest, ties to even; a NaN becomes some NaN.
JB_INLINE void v_store_bf16(uint16_t* p, f32x16 v) {
#if defined(__AVX512BF16__)
  // The instruction flushes subnormals, which no activation of a model is.
  __m256bh h = _mm512_cvtneps_pbh((__m512)v);
  memcpy(p, &h, 32);
#else
  u32x16 bits;
  memcpy(&bits, &v, 64);
  u32x16 rounded = bits + 0x7fff + ((bits >> 16) & 1);
  // Rounding could carry a NaN over to zero.
  u32x16 nan = (u32x16)(v != v);
  u32x16 high = ((nan & (bits | 0x400000)) | (~nan & rounded)) >> 16;
  u16x16 h = __builtin_convertvector(high, u16x16);
  memcpy(p, &h, 32);
#endif
}

JB_INLINE f32x16 v_load_f16(const uint16_t* p) {
#if defined(__AVX512F__)
  __m256i h;
  memcpy(&h, p, 32);
  return (f32x16)_mm512_cvtph_ps(h);
#else
  f32x16 v;
  for (int i = 0; i < 16; ++i) ((float*)&v)[i] = f16_to_f32(p[i]);
  return v;
#endif
}

// To the nearest, ties to even. What a level has an instruction for is here, not in types.h.
JB_INLINE uint16_t f32_to_f16(float x) {
#if defined(__F16C__)
  return (uint16_t)_mm_extract_epi16(_mm_cvtps_ph(_mm_set_ss(x), 0), 0);
#else
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  if (magnitude < 0x38800000) {
    // Subnormal: adding a half puts its bits where they belong, rounded.
    float y;
    memcpy(&y, &magnitude, 4);
    y += 0.5f;
    memcpy(&magnitude, &y, 4);
    return (uint16_t)(sign | (magnitude - 0x3f000000));
  }
  magnitude += 0xfff + (magnitude >> 13 & 1);
  return (uint16_t)(sign | ((magnitude >> 13) - (112 << 10)));
#endif
}

// 16 elements of an array of `dtype` (F32 or BF16) from element i on, and back.
JB_INLINE f32x16 v_load_any(const void* p, int64_t i, int32_t dtype) {
  return dtype == F32 ? v_load((const float*)p + i) : v_load_bf16((const uint16_t*)p + i);
}

JB_INLINE void v_store_any(void* p, int64_t i, int32_t dtype, f32x16 v) {
  if (dtype == F32) {
    v_store((float*)p + i, v);
  } else {
    v_store_bf16((uint16_t*)p + i, v);
  }
}

// The first n < 16 elements; the others are 0, or are left alone.
JB_INLINE f32x16 v_load_part(const void* p, int64_t i, int32_t dtype, int64_t n) {
  f32x16 v = v_set(0);
  for (int64_t j = 0; j < n; ++j) ((float*)&v)[j] = load_f32(p, i + j, dtype);
  return v;
}

JB_INLINE void v_store_part(void* p, int64_t i, int32_t dtype, f32x16 v, int64_t n) {
  for (int64_t j = 0; j < n; ++j) {
    float x = ((float*)&v)[j];
    if (dtype == F32) {
      ((float*)p)[i + j] = x;
    } else {
      ((uint16_t*)p)[i + j] = f32_to_bf16(x);
    }
  }
}

JB_INLINE f32x16 v_max(f32x16 a, f32x16 b) { return a > b ? a : b; }
JB_INLINE f32x16 v_min(f32x16 a, f32x16 b) { return a < b ? a : b; }
JB_INLINE f32x16 v_abs(f32x16 a) {
  i32x16 bits;
  memcpy(&bits, &a, 64);
  bits &= 0x7fffffff;
  memcpy(&a, &bits, 64);
  return a;
}

// Sums and maxima of the lanes, always in the same order.
JB_INLINE float v_sum(f32x16 v) {
  const float* x = (const float*)&v;
  float a[8], b[4];
  for (int i = 0; i < 8; ++i) a[i] = x[i] + x[i + 8];
  for (int i = 0; i < 4; ++i) b[i] = a[i] + a[i + 4];
  return (b[0] + b[2]) + (b[1] + b[3]);
}

JB_INLINE float v_maximum(f32x16 v) {
  const float* x = (const float*)&v;
  float m = x[0];
  for (int i = 1; i < 16; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

// e^x within 2 units in the last place; 0 below -87.3, e^88.3 above 88.3. A NaN stays one.
JB_INLINE f32x16 v_exp(f32x16 x) {
  f32x16 small = x;
  x = v_min(x, v_set(88.3f));
  x = v_max(x, v_set(-87.3f));
  const f32x16 magic = v_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  f32x16 n = (x * 1.44269504088896341f + magic) - magic;
  f32x16 r = x - n * 0.693359375f;
  r = r - n * -2.12194440e-4f;
  f32x16 p = v_set(1.9875691500e-4f);
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  i32x16 exponent = (__builtin_convertvector(n, i32x16) + 127) << 23;
  f32x16 scale;
  memcpy(&scale, &exponent, 64);
  f32x16 y = p * scale;
  y = small < -87.3f ? v_set(0) : y;
  return small != small ? small : y;
}

JB_INLINE f32x16 v_sigmoid(f32x16 x) { return 1.0f / (1.0f + v_exp(-x)); }

// Within 2 units in the last place.
JB_INLINE f32x16 v_tanh(f32x16 x) {
  f32x16 a = v_abs(x);
  f32x16 large = 1.0f - 2.0f / (v_exp(v_min(a, v_set(44.0f)) * 2.0f) + 1.0f);
  large = x < 0.0f ? -large : large;
  f32x16 z = x * x;
  f32x16 p = v_set(-5.70498872745e-3f);
  p = p * z + 2.06390887954e-2f;
  p = p * z + -5.37397155531e-2f;
  p = p * z + 1.33314422036e-1f;
  p = p * z + -3.33332819422e-1f;
  f32x16 y = a < 0.625f ? p * z * x + x : large;
  return x != x ? x : y;
}

// The error function within 2e-7 (Abramowitz and Stegun 7.1.26, by series near 0).
JB_INLINE f32x16 v_erf(f32x16 x) {
  f32x16 a = v_abs(x);
  f32x16 t = 1.0f / (1.0f + a * 0.3275911f);
  f32x16 p = v_set(1.061405429f);
  p = p * t + -1.453152027f;
  p = p * t + 1.421413741f;
  p = p * t + -0.284496736f;
  p = p * t + 0.254829592f;
  f32x16 large = 1.0f - p * t * v_exp(-a * a);
  large = x < 0.0f ? -large : large;
  f32x16 z = x * x;
  f32x16 s = v_set(-1.0f / 42.0f);
  s = z * (1.0f / 216.0f) + s;
  s = s * z + 0.1f;
  s = s * z + -1.0f / 3.0f;
  s = s * z + 1.0f;
  return a < 0.3f ? s * x * 1.1283791670955126f : large;
}

JB_INLINE f32x16 v_silu(f32x16 x) { return x * v_sigmoid(x); }

// (1 + tanh(a)) / 2 is sigmoid(2a), which takes one exponential and one division.
JB_INLINE f32x16 v_gelu_tanh(f32x16 x) {
  return x * v_sigmoid(1.5957691216057308f * (x + 0.044715f * x * x * x));
}

JB_INLINE f32x16 v_gelu(f32x16 x) { return 0.5f * x * (1.0f + v_erf(x * 0.7071067811865476f)); }
