// The product of a few rows with a panel of a quantised kind, in integers (VPDPBUSD).
//
// A matrix in ggml's kinds meets activations of 16 bits for each group of 32: two products instead of
// one, which cost nothing while the weights come from memory, and the error stays below that of
// bf16. The integers of a group are exact; scales are applied in float32.
#pragma once

#if defined(__AVX512VNNI__)

#include "quantise.h"
#include "scales_512.h"

namespace jb {
namespace JB_ISA {

// A row takes 4 to 6 ns for 16 x 32 weights, unpacking them for the tile registers 20.
enum : int { ROWS_DOT_INT = 4 };

// A group of 32 activations of one row.
struct alignas(32) IntGroup {
  int8_t high[32];
  int8_t low[32];
  float scale;
  float scaled_sum;
  int32_t sums[2];
  int32_t unused[4];
};

// x[k] (k a multiple of 32) to groups.
static __attribute__((unused)) void quantise_groups(const uint16_t* x, int64_t k, IntGroup* to) {
  for (int64_t i = 0; i < k; i += 32, ++to) {
    __m512 v[2] = {load_bf16(x + i, 16), load_bf16(x + i + 16, 16)};
    __m512 most = _mm512_max_ps(_mm512_abs_ps(v[0]), _mm512_abs_ps(v[1]));
    float poison = _mm512_reduce_add_ps(_mm512_add_ps(poison_of(v[0]), poison_of(v[1])));
    float largest = _mm512_reduce_max_ps(most);
    float inverse = quantise_inverse(largest, 16);
    for (int half = 0; half < 2; ++half) {
      __m512i high = _mm512_setzero_si512(), low = _mm512_setzero_si512();
      quantise_16<16>(v[half], _mm512_set1_ps(inverse), to->high + 16 * half, to->low + 16 * half, &high,
                      &low);
      to->sums[half] = _mm512_reduce_add_epi32(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
    }
    to->scale = (inverse > 0 ? largest / quantise_range(16) : 0) + poison;
    to->scaled_sum = to->scale * (float)(to->sums[0] + to->sums[1]);
  }
}

JB_INLINE __m512i quad(const int8_t* p) {
  int32_t bytes;
  memcpy(&bytes, p, 4);
  return _mm512_set1_epi32(bytes);
}

// sums[r] += x[r] @ a tile's group.
template <int KIND, int ROWS>
JB_INLINE void dot_int_group(const IntGroup* const* x, const char* group, Scales512 s,
                             __m512* sums) {
  constexpr bool HALVES = KIND == MATRIX_Q6_K;
  constexpr int N = HALVES ? 2 : 1;
  __m512i high[ROWS][N], low[ROWS][N];
  const int32_t offset = quant_offset(KIND);
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int n = 0; n < N; ++n) {
      int32_t sum = HALVES ? x[r]->sums[n] : x[r]->sums[0] + x[r]->sums[1];
      high[r][n] = _mm512_setzero_si512();
      low[r][n] = offset ? _mm512_set1_epi32(-offset * sum) : _mm512_setzero_si512();
    }
  }
#pragma GCC unroll 8
  for (int row = 0; row < 8; ++row) {
    __m512i w = (__m512i)group_row(KIND, group, row, 0);
    const int n = HALVES ? row / 4 : 0;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) {
      high[r][n] = _mm512_dpbusd_epi32(high[r][n], w, quad(x[r]->high + 4 * row));
      low[r][n] = _mm512_dpbusd_epi32(low[r][n], w, quad(x[r]->low + 4 * row));
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < ROWS; ++r) {
    __m512 scale = _mm512_set1_ps(x[r]->scale);
    __m512 product = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][0], 8), low[r][0]));
    sums[r] = _mm512_fmadd_ps(product, _mm512_mul_ps(s.d[0], scale), sums[r]);
    if (HALVES) {
      product = _mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[r][N - 1], 8), low[r][N - 1]));
      sums[r] = _mm512_fmadd_ps(product, _mm512_mul_ps(s.d[1], scale), sums[r]);
    }
    if (has_minimum(KIND)) {
      sums[r] = _mm512_fmadd_ps(s.m, _mm512_set1_ps(x[r]->scaled_sum), sums[r]);
    }
  }
}

// One tile of a unit of any ggml kind.
template <int KIND, int ROWS>
JB_INLINE void dot_int_unit(const IntGroup* const* x, const char* scales, const char* numbers,
                            __m512* sums) {
  constexpr int GROUPS = KIND >= MATRIX_Q4_K ? 8 : 1;
#pragma GCC unroll 8
  for (int g = 0; g < GROUPS; ++g) {
    const Scales512 s = scales_512(KIND, scales, g);
    const IntGroup* own[ROWS];
    for (int r = 0; r < ROWS; ++r) own[r] = x[r] + g;
    dot_int_group<KIND, ROWS>(own, numbers + g * group_bytes(KIND), s, sums);
  }
}

template <int KIND, int ROWS>
static __attribute__((noinline)) void dot_int_rows(const IntGroup* x, int64_t ldx, const char* panel,
                                                   int64_t k, float* c) {
  const Unit unit = matrix_unit(KIND);
  __m512 sums[2][ROWS];
#pragma GCC unroll 2
  for (int t = 0; t < 2; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) sums[t][r] = _mm512_setzero_ps();
  }
  const IntGroup* own[ROWS];
  for (int r = 0; r < ROWS; ++r) own[r] = x + r * ldx;
  for (int64_t i = 0; i < k; i += unit.k, panel += unit_bytes(unit)) {
#pragma GCC unroll 2
    for (int t = 0; t < 2; ++t) {
      for (int64_t line = 0; line < unit_bytes(unit) / 2; line += 64) {
        _mm_prefetch(panel + 2048 + t * unit_bytes(unit) / 2 + line, _MM_HINT_T0);
      }
      dot_int_unit<KIND, ROWS>(own, unit_scales(unit, panel, t), unit_numbers(unit, panel, t), sums[t]);
    }
    for (int r = 0; r < ROWS; ++r) own[r] += unit.k / 32;
  }
#pragma GCC unroll 2
  for (int t = 0; t < 2; ++t) {
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; ++r) _mm512_storeu_ps(c + r * PANEL + TILE * t, sums[t][r]);
  }
}

// c[rows][32] for rows <= ROWS_DOT_INT.
static __attribute__((unused)) void dot_int(int32_t kind, int64_t rows, const IntGroup* x,
                                            int64_t ldx, const char* panel, int64_t k, float* c) {
  switch (kind) {
#define KIND(name)                                                             \
  case name:                                                                   \
    if (rows == 1) dot_int_rows<name, 1>(x, ldx, panel, k, c);                 \
    if (rows == 2) dot_int_rows<name, 2>(x, ldx, panel, k, c);                 \
    if (rows == 3) dot_int_rows<name, 3>(x, ldx, panel, k, c);                 \
    if (rows == 4) dot_int_rows<name, 4>(x, ldx, panel, k, c);                 \
    break;
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

// c[row][32] = the integer products of signed x [rows, k] (k a multiple of 64) with a panel of INT8.
template <int ROWS>
JB_INLINE void dot_int8_rows(const int8_t* x, int64_t ldx, const char* panel, int64_t k, int32_t* c) {
  __m512i sums[2][ROWS];
#pragma GCC unroll 2
  for (int t = 0; t < 2; ++t) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) sums[t][r] = _mm512_setzero_si512();
  }
  for (int64_t i = 0; i < k; i += 64, panel += 2048) {
#pragma GCC unroll 16
    for (int row = 0; row < 16; ++row) {
      __m512i w0 = _mm512_load_si512(panel + 64 * row);
      __m512i w1 = _mm512_load_si512(panel + 1024 + 64 * row);
      _mm_prefetch(panel + 2048 + 64 * row, _MM_HINT_T0);
      _mm_prefetch(panel + 3072 + 64 * row, _MM_HINT_T0);
#pragma GCC unroll 8
      for (int r = 0; r < ROWS; ++r) {
        __m512i both = quad(x + r * ldx + i + 4 * row);
        sums[0][r] = _mm512_dpbusd_epi32(sums[0][r], w0, both);
        sums[1][r] = _mm512_dpbusd_epi32(sums[1][r], w1, both);
      }
    }
  }
#pragma GCC unroll 2
  for (int t = 0; t < 2; ++t) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) _mm512_storeu_si512(c + r * PANEL + TILE * t, sums[t][r]);
  }
}

static __attribute__((unused)) void dot_int8(int64_t rows, const int8_t* x, int64_t ldx,
                                             const char* panel, int64_t k, int32_t* c) {
  for (; rows > 0; rows -= 4, x += 4 * ldx, c += 4 * PANEL) {
    if (rows >= 4) dot_int8_rows<4>(x, ldx, panel, k, c);
    if (rows == 3) dot_int8_rows<3>(x, ldx, panel, k, c);
    if (rows == 2) dot_int8_rows<2>(x, ldx, panel, k, c);
    if (rows == 1) dot_int8_rows<1>(x, ldx, panel, k, c);
  }
}

}  // namespace JB_ISA
}  // namespace jb

#endif
