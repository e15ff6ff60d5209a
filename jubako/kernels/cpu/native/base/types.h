// Which element types do arrays have, and how do single values change type?
#pragma once

#include <cstdint>
#include <cstring>

// Values mirrored in Python (jubako/kernels/cpu/library.py).
enum DType : int32_t { F32 = 0, BF16 = 1, F16 = 2 };

// Element types of KV pages beyond these: int8, and 8 bits with 4 of exponent and 3 of mantissa.
// After the tokens of a slab come as many float32, by which their elements are multiplied.
enum KvType : int32_t { KV_I8 = 3, KV_F8E4M3 = 4 };

#define JB_INLINE static inline __attribute__((always_inline, unused))

JB_INLINE int64_t dtype_size(int32_t dtype) { return dtype == F32 ? 4 : 2; }

JB_INLINE float bf16_to_f32(uint16_t h) {
  uint32_t bits = (uint32_t)h << 16;
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// To the nearest, ties to even; NaN stays NaN.
JB_INLINE uint16_t f32_to_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((bits >> 16) | 0x40);
  bits += 0x7fffu + ((bits >> 16) & 1);
  return (uint16_t)(bits >> 16);
}

JB_INLINE float f16_to_f32(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16;
  uint32_t rest = h & 0x7fff;
  uint32_t bits;
  if (rest >= 0x7c00) {
    bits = sign | 0x7f800000u | ((rest & 0x3ff) << 13);
  } else if (rest >= 0x400) {
    bits = sign | ((rest << 13) + (112u << 23));
  } else {
    // Subnormal: its integer value times 2^-24 is exact.
    float x = (float)rest * 5.9604644775390625e-8f;
    memcpy(&bits, &x, 4);
    bits |= sign;
  }
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

// One element of an array of `dtype`, and back.
JB_INLINE float load_f32(const void* p, int64_t i, int32_t dtype) {
  if (dtype == F32) return ((const float*)p)[i];
  uint16_t h = ((const uint16_t*)p)[i];
  return dtype == BF16 ? bf16_to_f32(h) : f16_to_f32(h);
}
