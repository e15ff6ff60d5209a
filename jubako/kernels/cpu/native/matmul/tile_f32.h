// The product of a few rows with a panel, in float32.
//
// Each output is one chain of multiply-adds over k from 0 on, whatever the number of rows: a row's
// result is the same alone and in a batch. Lanes are outputs; the chains of two tiles, or of several
// rows, hide the latency.
#pragma once

#include "layout.h"
#include "native_width.h"

namespace jb {
namespace JB_ISA {

// Rows whose sums fit the registers beside the weights.
#if defined(__AVX512F__)
enum : int { ROWS_F32 = 12, TILES_F32 = 2 };
#elif defined(__AVX2__)
enum : int { ROWS_F32 = 6, TILES_F32 = 1 };
#elif defined(__aarch64__)
enum : int { ROWS_F32 = 6, TILES_F32 = 1 };
#else
enum : int { ROWS_F32 = 2, TILES_F32 = 1 };
#endif

// c[row][32] = x[rows, k] @ panel, the panel as float32 [k][32].
template <int ROWS>
JB_INLINE void tile_f32_rows(const float* x, int64_t ldx, const float* panel, int64_t k, float* c) {
  for (int tile = 0; tile < 2; tile += TILES_F32) {
    constexpr int N = TILES_F32 * PARTS;
    vf sums[ROWS][N];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) sums[r][n] = vf{};
    }
    const float* w = panel + TILE * tile;
    for (int64_t i = 0; i < k; ++i, w += PANEL) {
      vf weights[N];
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) weights[n] = loadf(w + WIDTH * n);
      __builtin_prefetch(w + 1024);
      if (TILES_F32 == 2) __builtin_prefetch(w + 1024 + 16);
#pragma GCC unroll 16
      for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
        for (int n = 0; n < N; ++n) sums[r][n] += weights[n] * x[r * ldx + i];
      }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 16
      for (int n = 0; n < N; ++n) storef(c + r * PANEL + TILE * tile + WIDTH * n, sums[r][n]);
    }
  }
}

template <int ROWS>
struct TileF32 {
  static void run(int64_t rows, const float* x, int64_t ldx, const float* panel, int64_t k, float* c) {
    if (rows == ROWS) {
      tile_f32_rows<ROWS>(x, ldx, panel, k, c);
    } else {
      TileF32<ROWS - 1>::run(rows, x, ldx, panel, k, c);
    }
  }
};

template <>
struct TileF32<0> {
  static void run(int64_t, const float*, int64_t, const float*, int64_t, float*) {}
};

static void tile_f32(int64_t rows, const float* x, int64_t ldx, const float* panel, int64_t k,
                     float* c) {
  for (; rows > 0; rows -= ROWS_F32, x += ROWS_F32 * ldx, c += ROWS_F32 * PANEL) {
    TileF32<ROWS_F32>::run(rows < ROWS_F32 ? rows : ROWS_F32, x, ldx, panel, k, c);
  }
}

}  // namespace JB_ISA
}  // namespace jb
