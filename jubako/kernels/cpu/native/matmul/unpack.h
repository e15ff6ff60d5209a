// What numbers do the packed kinds stand for? In float32, on every level.
#pragma once

#include "layout.h"
#include "native_width.h"

namespace jb {
namespace JB_ISA {

JB_INLINE bool has_fifth_bit(int32_t kind) {
  return kind == MATRIX_Q5_0 || kind == MATRIX_Q5_1 || kind == MATRIX_Q5_K;
}

// What is subtracted from a stored quant.
JB_INLINE int32_t quant_offset(int32_t kind) {
  switch (kind) {
    case MATRIX_INT8:
    case MATRIX_Q8_0: return 128;
    case MATRIX_Q4_0: return 8;
    case MATRIX_Q5_0: return 16;
    case MATRIX_Q6_K: return 32;
  }
  return 0;
}

JB_INLINE bool has_minimum(int32_t kind) {
  return kind == MATRIX_Q4_1 || kind == MATRIX_Q5_1 || kind == MATRIX_Q4_K || kind == MATRIX_Q5_K;
}

// Bytes of the numbers of a group of 32 elements.
JB_INLINE int64_t group_bytes(int32_t kind) {
  Unit unit = matrix_unit(kind);
  return unit.numbers / (unit.k / 32);
}

JB_INLINE void load_halves(const void* from, float* to) {
#if defined(__AVX512F__)
  __m256i h;
  memcpy(&h, from, 32);
  _mm512_storeu_ps(to, _mm512_cvtph_ps(h));
#elif defined(__F16C__)
  for (int i = 0; i < 2; ++i) {
    __m128i h;
    memcpy(&h, (const char*)from + 16 * i, 16);
    _mm256_storeu_ps(to + 8 * i, _mm256_cvtph_ps(h));
  }
#else
  uint16_t h[16];
  memcpy(h, from, 32);
  for (int i = 0; i < 16; ++i) to[i] = f16_to_f32(h[i]);
#endif
}

// Scale of each lane, for elements 0 .. 15 and 16 .. 31 of a group, and what is added.
struct GroupScales {
  float d[2][16];
  float m[16];
};

JB_INLINE void group_scales(int32_t kind, const char* scales, int32_t group, GroupScales* s) {
  if (kind == MATRIX_Q4_K || kind == MATRIX_Q5_K) {
    float d[16], dmin[16];
    uint32_t words[48];
    load_halves(scales, d);
    load_halves(scales + 32, dmin);
    memcpy(words, scales + 64, sizeof words);
    for (int j = 0; j < 16; ++j) {
      uint32_t high = words[32 + j] >> (2 * group);
      uint32_t scale = (words[j] >> (4 * group) & 15) | (high & 3) << 4;
      uint32_t minimum = (words[16 + j] >> (4 * group) & 15) | (high >> 16 & 3) << 4;
      s->d[0][j] = s->d[1][j] = d[j] * (float)scale;
      s->m[j] = -(dmin[j] * (float)minimum);
    }
  } else if (kind == MATRIX_Q6_K) {
    float d[16];
    int8_t factors[32];
    load_halves(scales, d);
    memcpy(factors, scales + 32 + 32 * group, sizeof factors);
    for (int j = 0; j < 16; ++j) {
      s->d[0][j] = d[j] * (float)factors[j];
      s->d[1][j] = d[j] * (float)factors[16 + j];
      s->m[j] = 0;
    }
  } else {
    load_halves(scales, s->d[0]);
    memcpy(s->d[1], s->d[0], sizeof s->d[0]);
    if (has_minimum(kind)) {
      load_halves(scales + 32, s->m);
    } else {
      memset(s->m, 0, sizeof s->m);
    }
  }
}

// Part `part` of row `row` of a group: in each lane the four bytes of k = 4 row .. 4 row + 3.
JB_INLINE vu group_row(int32_t kind, const char* group, int row, int part) {
  const char* at = group + 4 * WIDTH * part;
  if (kind == MATRIX_Q8_0) return loadu(at + 64 * row);
  vu low = loadu(at + 64 * (row & 3));
  low = (row < 4 ? low : low >> 4) & 0x0f0f0f0fu;
  if (has_fifth_bit(kind)) {
    vu high = loadu(at + 256);
    return low | ((row < 4 ? high << (4 - row) : high >> (row - 4)) & 0x10101010u);
  }
  if (kind == MATRIX_Q6_K) {
    vu high = loadu(at + 256 + 64 * (row >> 2));
    int t = 2 * (row & 3);
    return low | ((t < 4 ? high << (4 - t) : high >> (t - 4)) & 0x30303030u);
  }
  return low;
}

// One tile of a unit of a ggml kind: to[k * PANEL + lane].
JB_INLINE void unpack_quants(int32_t kind, const char* scales, const char* numbers, float* to) {
  int groups = (int)(matrix_unit(kind).k / 32);
  float offset = (float)quant_offset(kind);
  for (int g = 0; g < groups; ++g) {
    GroupScales s;
    group_scales(kind, scales, g, &s);
    const char* group = numbers + g * group_bytes(kind);
#pragma GCC unroll 8
    for (int row = 0; row < 8; ++row) {
      for (int part = 0; part < PARTS; ++part) {
        vu q = group_row(kind, group, row, part);
        vf d = loadf(s.d[row >> 2] + WIDTH * part);
        vf m = loadf(s.m + WIDTH * part);
#pragma GCC unroll 4
        for (int b = 0; b < 4; ++b) {
          vf value = (to_float(q >> (8 * b) & 255u) - offset) * d + m;
          storef(to + (32 * g + 4 * row + b) * PANEL + WIDTH * part, value);
        }
      }
    }
  }
}

JB_INLINE void unpack_bf16(const char* numbers, float* to) {
  for (int row = 0; row < 16; ++row) {
    for (int part = 0; part < PARTS; ++part) {
      vu pair = loadu(numbers + 64 * row + 4 * WIDTH * part);
      storef(to + 2 * row * PANEL + WIDTH * part, as_float(pair << 16));
      storef(to + (2 * row + 1) * PANEL + WIDTH * part, as_float(pair & 0xffff0000u));
    }
  }
}

JB_INLINE void unpack_int8(const float* row_scales, const char* numbers, float* to) {
  for (int row = 0; row < 16; ++row) {
    for (int part = 0; part < PARTS; ++part) {
      vu q = loadu(numbers + 64 * row + 4 * WIDTH * part);
      vf d = loadf(row_scales + WIDTH * part);
      for (int b = 0; b < 4; ++b) {
        storef(to + (4 * row + b) * PANEL + WIDTH * part, (to_float(q >> (8 * b) & 255u) - 128.0f) * d);
      }
    }
  }
}

// A panel as float32: to[k][32], k up to a multiple of the unit.
static __attribute__((noinline, unused)) void unpack_panel(const Matrix* w, int64_t panel, float* to) {
  const Unit unit = matrix_unit(w->kind);
  const char* at = panel_start(w, panel);
  for (int64_t k = 0; k < w->k; k += unit.k, at += unit_bytes(unit), to += unit.k * PANEL) {
    for (int tile = 0; tile < 2; ++tile) {
      const char* scales = unit_scales(unit, at, tile);
      const char* numbers = unit_numbers(unit, at, tile);
      float* tile_to = to + TILE * tile;
      __builtin_prefetch(at + 4096);
      switch (w->kind) {
        case MATRIX_F32: memcpy(tile_to, numbers, 64); break;
        case MATRIX_BF16: unpack_bf16(numbers, tile_to); break;
        case MATRIX_INT8:
          unpack_int8(w->scales + panel * PANEL + TILE * tile, numbers, tile_to);
          break;
#define KIND(name) \
  case name: unpack_quants(name, scales, numbers, tile_to); break;
          KIND(MATRIX_Q8_0)
          KIND(MATRIX_Q4_0)
          KIND(MATRIX_Q4_1)
          KIND(MATRIX_Q5_0)
          KIND(MATRIX_Q5_1)
          KIND(MATRIX_Q4_K)
          KIND(MATRIX_Q5_K)
          KIND(MATRIX_Q6_K)
#undef KIND
      }
    }
  }
}

// Element k of the row in lane `lane` of tile `tile`, from the unit that has it.
JB_INLINE float unpack_one(const Matrix* w, int64_t panel, int tile, int lane, int64_t k) {
  const Unit unit = matrix_unit(w->kind);
  const char* at = panel_start(w, panel) + k / unit.k * unit_bytes(unit);
  const char* scales = unit_scales(unit, at, tile);
  const char* numbers = unit_numbers(unit, at, tile);
  int64_t i = k % unit.k;
  if (w->kind == MATRIX_F32) return ((const float*)numbers)[lane];
  if (w->kind == MATRIX_BF16) {
    return bf16_to_f32(((const uint16_t*)numbers)[i / 2 * 32 + 2 * lane + i % 2]);
  }
  if (w->kind == MATRIX_INT8) {
    int q = (uint8_t)numbers[i / 4 * 64 + 4 * lane + i % 4];
    return (float)(q - 128) * w->scales[panel * PANEL + TILE * tile + lane];
  }
  int g = (int)(i / 32), e = (int)(i % 32), row = e / 4, byte = 4 * lane + e % 4;
  const uint8_t* group = (const uint8_t*)numbers + g * group_bytes(w->kind);
  int q;
  if (w->kind == MATRIX_Q8_0) {
    q = group[64 * row + byte];
  } else {
    q = group[64 * (row & 3) + byte] >> (row < 4 ? 0 : 4) & 15;
    if (has_fifth_bit(w->kind)) q |= (group[256 + byte] >> row & 1) << 4;
    if (w->kind == MATRIX_Q6_K) q |= (group[256 + 64 * (row >> 2) + byte] >> 2 * (row & 3) & 3) << 4;
  }
  float value = (float)(q - quant_offset(w->kind));
  const uint16_t* h = (const uint16_t*)scales;
  if (w->kind == MATRIX_Q6_K) {
    int factor = (int8_t)scales[32 + 16 * (2 * g + (row >> 2)) + lane];
    return value * (f16_to_f32(h[lane]) * (float)factor);
  }
  if (w->kind == MATRIX_Q4_K || w->kind == MATRIX_Q5_K) {
    uint32_t words[3];
    for (int j = 0; j < 3; ++j) memcpy(words + j, scales + 64 * (j + 1) + 4 * lane, 4);
    int scale = (int)((words[0] >> 4 * g & 15) | (words[2] >> 2 * g & 3) << 4);
    int minimum = (int)((words[1] >> 4 * g & 15) | (words[2] >> (16 + 2 * g) & 3) << 4);
    return value * (f16_to_f32(h[lane]) * (float)scale) - f16_to_f32(h[16 + lane]) * (float)minimum;
  }
  value *= f16_to_f32(h[lane]);
  return has_minimum(w->kind) ? value + f16_to_f32(h[16 + lane]) : value;
}

}  // namespace JB_ISA
}  // namespace jb
