// The product of up to 32 rows with a panel, in the tile registers (AMX).
#pragma once

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)

#include "layout.h"
#include "native_width.h"

namespace jb {
namespace JB_ISA {

struct alignas(64) TileConfig {
  uint8_t palette, start_row;
  uint8_t reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
};

// Registers 0 .. 3 hold sums (rows 0 .. 15 with tile 0 and 1, rows 16 .. 31 with tile 0 and 1), 4 and
// 5 the two blocks of rows of x, 6 and 7 the weights.
JB_INLINE void amx_configure(int64_t rows) {
  TileConfig config = {};
  config.palette = 1;
  int first = rows < 16 ? (int)rows : 16;
  int second = rows > 16 ? (int)rows - 16 : 16;
  const int heights[8] = {first, first, second, second, first, second, 16, 16};
  for (int i = 0; i < 8; ++i) {
    config.row_bytes[i] = 64;
    config.rows[i] = (uint8_t)heights[i];
  }
  _tile_loadconfig(&config);
}

JB_INLINE void amx_release() { _tile_release(); }

// How far ahead of a step weights are fetched. Further ahead the lines that come from the hardware's
// prefetching, which keeps more of them on their way, come late: 4 KiB costs a fifth of the bandwidth.
enum : int64_t { AMX_AHEAD = 512 };

// Steps of k that are done for all rows before the next ones: their weights, 2 KiB each, and those
// of the rows stay in the first-level cache.
enum : int64_t { AMX_STEPS = 12 };

// c[rows][32] = x[rows] @ panel for up to 32 rows, in steps of 64 bytes of k: bf16 to float32, or
// INT8 (x signed, weights unsigned) to int32. ADD: on top of what c has.
// `lines` cache lines from `next` on are fetched in each step.
template <bool PAIRS, bool TWO_BLOCKS, bool FETCH>
JB_INLINE void amx_steps(const char* x, int64_t stride, const char* panel, int64_t steps, char* c,
                         bool add, const char* next, int64_t lines) {
#define JB_TDP(sum, a, b)      \
  if (PAIRS) {                 \
    _tile_dpbf16ps(sum, a, b); \
  } else {                     \
    _tile_dpbsud(sum, a, b);   \
  }
  if (add) {
    _tile_loadd(0, c, 128);
    _tile_loadd(1, c + 64, 128);
    if (TWO_BLOCKS) {
      _tile_loadd(2, c + 16 * 128, 128);
      _tile_loadd(3, c + 16 * 128 + 64, 128);
    }
  } else {
    _tile_zero(0);
    _tile_zero(1);
    if (TWO_BLOCKS) {
      _tile_zero(2);
      _tile_zero(3);
    }
  }
  for (int64_t i = 0; i < steps; ++i, panel += 2048, x += 64) {
    if (FETCH) {
#pragma GCC unroll 32
      for (int line = 0; line < 32; ++line) {
        _mm_prefetch(panel + AMX_AHEAD + 64 * line, _MM_HINT_T0);
      }
    }
    for (int64_t line = 0; line < lines; ++line, next += 64) _mm_prefetch(next, _MM_HINT_T1);
    _tile_loadd(6, panel, 64);
    _tile_loadd(4, x, stride);
    JB_TDP(0, 4, 6);
    _tile_loadd(7, panel + 1024, 64);
    JB_TDP(1, 4, 7);
    if (TWO_BLOCKS) {
      _tile_loadd(5, x + 16 * stride, stride);
      JB_TDP(2, 5, 6);
      JB_TDP(3, 5, 7);
    }
  }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 64, 128);
  if (TWO_BLOCKS) {
    _tile_stored(2, c + 16 * 128, 128);
    _tile_stored(3, c + 16 * 128 + 64, 128);
  }
#undef JB_TDP
}

// c[rows][32] = x @ panel over `steps` steps. `rows` are at most 32, or a multiple of 32 with the
// registers configured for 32. Meanwhile many rows fetch `next_bytes` from `next` on.
template <bool PAIRS>
static __attribute__((noinline)) void amx_panel(int64_t rows, const char* x, int64_t stride,
                                                const char* panel, int64_t steps, char* c,
                                                const char* next, int64_t next_bytes) {
  if (rows <= 16) {
    amx_steps<PAIRS, false, true>(x, stride, panel, steps, c, false, nullptr, 0);
    return;
  }
  if (rows <= 32) {
    amx_steps<PAIRS, true, true>(x, stride, panel, steps, c, false, nullptr, 0);
    return;
  }
  int64_t pieces = (steps + AMX_STEPS - 1) / AMX_STEPS;
  int64_t per_step = rows / 32 * steps * 64;
  int64_t lines = (next_bytes + per_step - 1) / per_step;
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int64_t begin = steps * piece / pieces, count = steps * (piece + 1) / pieces - begin;
    const char* w = panel + 2048 * begin;
    for (int64_t r = 0; r < rows; r += 32, next += 64 * lines * count) {
      amx_steps<PAIRS, true, false>(x + r * stride + 64 * begin, stride, w, count, c + 128 * r, piece > 0,
                                    next, lines);
    }
  }
}

}  // namespace JB_ISA
}  // namespace jb

#endif
