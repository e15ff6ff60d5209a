// A quantised panel as one of MATRIX_BF16, each weight rounded once.
//
// Done once for a panel and used for all rows, so that a product's time hardly grows with them.
#pragma once

#if defined(__AVX512BF16__)

#include "scales_512.h"

namespace jb {
namespace JB_ISA {

#if defined(__AVX512VBMI__)

// One permutation makes a float of a byte: the byte goes to bits 16 .. 23 (Q8_0: 8 .. 15) of a
// constant with zeros there, which gives 128 + q (Q8_0: 32768 + q) exactly. A vector has k and k + 1
// of 8 outputs, in the order that the pairs of a row have after VCVTNE2PS2BF16.
JB_INLINE __m512i byte_places(int pair, int half, int byte) {
  __m512i lane = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
  // Float i is byte 4 * (8 * half + i / 2) + 2 * pair + i % 2.
  __m512i from = _mm512_add_epi32(_mm512_slli_epi32(_mm512_srli_epi32(lane, 1), 2),
                                  _mm512_and_si512(lane, _mm512_set1_epi32(1)));
  return _mm512_slli_epi32(_mm512_add_epi32(from, _mm512_set1_epi32(32 * half + 2 * pair)), 8 * byte);
}

// A tile's group of 32 to 16 rows of pairs.
JB_INLINE void unpack_group_bf16(int32_t kind, const char* group, Scales512 s, char* to) {
  const bool wide = kind == MATRIX_Q8_0;
  const int byte = wide ? 1 : 2;
  const __m512i base = _mm512_set1_epi32(wide ? 0x47000000 : 0x43000000);
  const __mmask64 places = 0x1111111111111111ull << byte;
  const float shift = -(wide ? 32768.0f : 128.0f) - (float)quant_offset(kind);
  const __m512i twice[2] = {_mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0),
                            _mm512_set_epi32(15, 15, 14, 14, 13, 13, 12, 12, 11, 11, 10, 10, 9, 9, 8, 8)};
  const int parts = kind == MATRIX_Q6_K ? 2 : 1;
  __m512 d[2][2], m[2][2];
#pragma GCC unroll 2
  for (int part = 0; part < parts; ++part) {
    // The shift times a scale is exact, so that adding it rounds as if it were taken from the quant.
    __m512 add = _mm512_fmadd_ps(s.d[part], _mm512_set1_ps(shift), s.m);
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      d[part][half] = _mm512_permutexvar_ps(twice[half], s.d[part]);
      m[part][half] = _mm512_permutexvar_ps(twice[half], add);
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < 8; ++row) {
    const __m512i q = (__m512i)group_row(kind, group, row, 0);
    const int part = parts == 2 ? row / 4 : 0;
#pragma GCC unroll 2
    for (int pair = 0; pair < 2; ++pair) {
      __m512 v[2];
#pragma GCC unroll 2
      for (int half = 0; half < 2; ++half) {
        __m512i one = _mm512_mask_permutexvar_epi8(base, places, byte_places(pair, half, byte), q);
        v[half] = _mm512_fmadd_ps(_mm512_castsi512_ps(one), d[part][half], m[part][half]);
      }
      _mm512_store_si512(to + 64 * (2 * row + pair), (__m512i)_mm512_cvtne2ps_pbh(v[1], v[0]));
    }
  }
}

#else

JB_INLINE void unpack_group_bf16(int32_t kind, const char* group, Scales512 s, char* to) {
  const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8,
                                         23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
  const __m512i byte = _mm512_set1_epi32(255);
  const __m512 shift = _mm512_set1_ps(-(float)quant_offset(kind));
  const __m512 m[2] = {_mm512_fmadd_ps(s.d[0], shift, s.m), _mm512_fmadd_ps(s.d[1], shift, s.m)};
#pragma GCC unroll 8
  for (int row = 0; row < 8; ++row) {
    __m512i q = (__m512i)group_row(kind, group, row, 0);
    __m512 v[4];
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) {
      __m512i one = b == 3 ? _mm512_srli_epi32(q, 24) : _mm512_and_si512(_mm512_srli_epi32(q, 8 * b), byte);
      v[b] = _mm512_fmadd_ps(_mm512_cvtepi32_ps(one), s.d[row / 4], m[row / 4]);
    }
#pragma GCC unroll 2
    for (int b = 0; b < 2; ++b) {
      __m512i both = (__m512i)_mm512_cvtne2ps_pbh(v[2 * b + 1], v[2 * b]);
      _mm512_store_si512(to + 64 * (2 * row + b), _mm512_permutexvar_epi16(pairs, both));
    }
  }
}

#endif

// How far ahead packed bytes are fetched.
enum : int64_t { UNPACK_AHEAD = 1024 };

// Step `step` (32 of k) of both tiles, from the unit at `at`: 2 KiB.
JB_INLINE void unpack_step_bf16(int32_t kind, const char* at, int g, char* to) {
  const Unit unit = matrix_unit(kind);
  const int64_t bytes = unit_bytes(unit) / (unit.k / 32);
  for (int64_t line = 0; line < bytes; line += 64) {
    _mm_prefetch(at + UNPACK_AHEAD + g * bytes + line, _MM_HINT_T0);
  }
#pragma GCC unroll 2
  for (int t = 0; t < 2; ++t) {
    const Scales512 s = scales_512(kind, unit_scales(unit, at, t), g);
    unpack_group_bf16(kind, unit_numbers(unit, at, t) + g * group_bytes(kind), s, to + 1024 * t);
  }
}

template <int KIND>
static __attribute__((noinline)) void unpack_panel_bf16_of(const char* at, int64_t k, char* to) {
  const Unit unit = matrix_unit(KIND);
  for (int64_t i = 0; i < k; i += unit.k, at += unit_bytes(unit)) {
    for (int g = 0; g < unit.k / 32; ++g, to += 2048) unpack_step_bf16(KIND, at, g, to);
  }
}

static __attribute__((unused)) void unpack_panel_bf16(const Matrix* w, int64_t panel, char* to) {
  switch (w->kind) {
#define KIND(name) \
  case name: unpack_panel_bf16_of<name>(panel_start(w, panel), w->k, to); break;
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

}  // namespace JB_ISA
}  // namespace jb

#endif
