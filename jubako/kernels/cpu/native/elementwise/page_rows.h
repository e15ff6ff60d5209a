// How does one key or value go into its page?
#pragma once

#include "../base/vec.h"
#include "rows.h"

constexpr int64_t MAX_HEAD_SIZE = 1024;  // the Python side checks

typedef int8_t i8x16 __attribute__((vector_size(16)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

struct PageRow {
  char* elements;
  float* scale;  // only where kv_dtype is a KvType
};

JB_INLINE int64_t kv_element_bytes(int32_t kv_dtype) {
  return kv_dtype == F32 ? 4 : kv_dtype == KV_I8 || kv_dtype == KV_F8E4M3 ? 1 : 2;
}

// The place of the token in `slot`: of head `head`'s key (kind 0) or value (1). `Args` describes
// pages [blocks, Hkv, {K, V}, slab].
template <class Args>
JB_INLINE PageRow page_row(const Args& a, int64_t slot, int64_t head, int64_t kind) {
  int64_t bytes = kv_element_bytes(a.kv_dtype), row = a.head_size * bytes;
  int64_t slab = a.block_size * (row + (bytes == 1 ? 4 : 0));
  int64_t block = slot / a.block_size, offset = slot % a.block_size;
  char* start = (char*)a.pages + block * a.block_stride + (2 * head + kind) * slab;
  return {start + offset * row, (float*)(start + a.block_size * row) + offset};
}

// To the nearest, ties to even, of magnitudes up to 448.
JB_INLINE u8x16 to_f8e4m3(f32x16 x) {
  u32x16 bits;
  memcpy(&bits, &x, 64);
  u32x16 magnitude = bits & 0x7fffffff;
  u32x16 normal = ((magnitude + 0x7ffff + ((magnitude >> 20) & 1)) >> 20) - (120 << 3);
  // Below 2^-6 codes are multiples of 2^-9: adding 1.5 * 2^14 rounds to them.
  f32x16 shifted = v_abs(x) + 24576.0f;
  u32x16 small;
  memcpy(&small, &shifted, 64);
  small &= 0xff;
  u32x16 code = magnitude < 0x3c800000 ? small : normal;
  return __builtin_convertvector(code | ((bits >> 24) & 0x80), u8x16);
}

JB_INLINE i8x16 to_i8(f32x16 x) {
  const f32x16 magic = v_set(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  return __builtin_convertvector(__builtin_convertvector((x + magic) - magic, i32x16), i8x16);
}

// n floats of `x` into the page.
JB_INLINE void write_page_row(const float* x, PageRow to, int32_t kv_dtype, int64_t size) {
  if (kv_dtype == F32 || kv_dtype == BF16) {
    JB_FOR_16(i, n, size) store_16(to.elements, i, kv_dtype, load_16(x, i, F32, n), n);
    return;
  }
  if (kv_dtype == F16) {
    for (int64_t i = 0; i < size; ++i) ((uint16_t*)to.elements)[i] = f32_to_f16(x[i]);
    return;
  }
  f32x16 top = v_set(0);
  JB_FOR_16(i, n, size) top = v_max(top, v_abs(load_16(x, i, F32, n)));
  float largest = v_maximum(top), range = kv_dtype == KV_I8 ? 127.0f : 448.0f;
  *to.scale = largest / range;
  float inverse = largest > 0 ? range / largest : 0;
  JB_FOR_16(i, n, size) {
    f32x16 v = load_16(x, i, F32, n) * inverse;
    if (kv_dtype == KV_I8) {
      i8x16 q = to_i8(v);
      memcpy(to.elements + i, &q, n);
    } else {
      u8x16 q = to_f8e4m3(v);
      memcpy(to.elements + i, &q, n);
    }
  }
}
