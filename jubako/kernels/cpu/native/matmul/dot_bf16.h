// The product of a few rows with a panel, in bf16 pairs (VDPBF16PS).
#pragma once

#if defined(__AVX512BF16__)

#include "layout.h"
#include "native_width.h"

namespace jb {
namespace JB_ISA {

enum : int { ROWS_DOT_BF16 = 6 };

// c[row][32] = x[rows, k] @ panel; k a multiple of 32, the panel as of MATRIX_BF16.
template <int ROWS>
JB_INLINE void dot_bf16_rows(const uint16_t* x, int64_t ldx, const char* panel, int64_t k, float* c) {
  // One or two rows have too few chains of sums to hide the instruction's latency.
  constexpr int CHAINS = ROWS <= 2 ? 2 : 1;
  __m512 sums[ROWS][2][CHAINS];
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int t = 0; t < 2; ++t) {
#pragma GCC unroll 2
      for (int n = 0; n < CHAINS; ++n) sums[r][t][n] = _mm512_setzero_ps();
    }
  }
  for (int64_t i = 0; i < k; i += 32, panel += 2048) {
#pragma GCC unroll 16
    for (int row = 0; row < 16; ++row) {
      __m512bh w0 = (__m512bh)_mm512_load_si512(panel + 64 * row);
      __m512bh w1 = (__m512bh)_mm512_load_si512(panel + 1024 + 64 * row);
      // Hardware prefetching alone leaves a tenth of the bandwidth.
      _mm_prefetch(panel + 2048 + 64 * row, _MM_HINT_T0);
      _mm_prefetch(panel + 3072 + 64 * row, _MM_HINT_T0);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
        int32_t pair;
        memcpy(&pair, x + r * ldx + i + 2 * row, 4);
        __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
        sums[r][0][row % CHAINS] = _mm512_dpbf16_ps(sums[r][0][row % CHAINS], both, w0);
        sums[r][1][row % CHAINS] = _mm512_dpbf16_ps(sums[r][1][row % CHAINS], both, w1);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
    for (int t = 0; t < 2; ++t) {
      __m512 sum = sums[r][t][0];
      if (CHAINS == 2) sum = _mm512_add_ps(sum, sums[r][t][CHAINS - 1]);
      _mm512_storeu_ps(c + r * PANEL + TILE * t, sum);
    }
  }
}

template <int ROWS>
struct DotBf16 {
  static void run(int64_t rows, const uint16_t* x, int64_t ldx, const char* panel, int64_t k,
                  float* c) {
    if (rows == ROWS) {
      dot_bf16_rows<ROWS>(x, ldx, panel, k, c);
    } else {
      DotBf16<ROWS - 1>::run(rows, x, ldx, panel, k, c);
    }
  }
};

template <>
struct DotBf16<0> {
  static void run(int64_t, const uint16_t*, int64_t, const char*, int64_t, float*) {}
};

static __attribute__((unused)) void dot_bf16(int64_t rows, const uint16_t* x, int64_t ldx, const char* panel, int64_t k,
                     float* c) {
  for (; rows > 0; rows -= ROWS_DOT_BF16, x += ROWS_DOT_BF16 * ldx, c += ROWS_DOT_BF16 * PANEL) {
    DotBf16<ROWS_DOT_BF16>::run(rows < ROWS_DOT_BF16 ? rows : ROWS_DOT_BF16, x, ldx, panel, k, c);
  }
}

}  // namespace JB_ISA
}  // namespace jb

#endif
