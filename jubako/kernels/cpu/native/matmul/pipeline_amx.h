// Products in the tile registers, of which results are finished while the next ones are computed.
//
// A block is up to 32 rows with a panel. Its sums stay in the registers until the next block starts:
// each is stored just before its register is needed anew, and the rows are finished a few at a time
// between the steps of that block. So the tile registers wait neither for their results to be written
// nor for what becomes of them.
#pragma once

#include "product.h"

#if JB_AMX

#define JB_INLINE_MEMBER inline __attribute__((always_inline))

namespace jb {
namespace JB_ISA {

enum : int64_t { BLOCK_FLOATS = BLOCK * PANEL };

// Sums of a panel as numbers: those of INT8 are integers yet.
template <bool PAIRS>
struct SumScales {
  f32x16 of_outputs[2];

  JB_INLINE_MEMBER void open(const Matrix* w, int64_t panel) {
    if (PAIRS) return;
    for (int t = 0; t < 2; ++t) of_outputs[t] = v_load(w->scales + panel * PANEL + TILE * t);
  }
  JB_INLINE_MEMBER f32x16 value(const RowsOfX& x, int64_t r, const float* c, int tile) const {
    if (PAIRS) return v_load(c + TILE * tile);
    i32x16 sums;
    memcpy(&sums, c + TILE * tile, 64);
    f32x16 value = __builtin_convertvector(sums - 128 * x.sums[2 * r], f32x16);
    return value * (x.scales[r] * of_outputs[tile]);
  }
};

// A Sink has `open(panel, which)`: `which`, 0 or 1, stands for the panel from now on, the other may
// still be in use; `fetch(which, r)`: row r of x with the panel comes soon; `row(which, r, c)`: finish
// it, c being its 32 sums, int32 unless PAIRS. PAIRS: bf16, else INT8 with 8 bits.
template <bool PAIRS, bool TWO_BLOCKS, class Sink>
struct TilePipeline {
  // Rows [row, end) of x with a panel; c is row `start`'s.
  struct Results {
    float* c = nullptr;
    int64_t which = 0, start = 0, row = 0, end = 0;
  };

  Sink& sink;
  Results last{};  // computed, still in the registers
  alignas(64) float c[2 * BLOCK_FLOATS];

  static __attribute__((always_inline)) void finish(Sink& sink, Results& r, int64_t count) {
    for (; count > 0 && r.row < r.end; --count, ++r.row) {
      sink.row(r.which, r.row, r.c + (r.row - r.start) * PANEL);
    }
  }

#define JB_TDP(sum, a, b)      \
  if (PAIRS) {                 \
    _tile_dpbf16ps(sum, a, b); \
  } else {                     \
    _tile_dpbsud(sum, a, b);   \
  }
#define JB_OPEN(sum, at)                                    \
  if (last.c) _tile_stored(sum, (char*)last.c + (at), 128); \
  _tile_zero(sum);

  // `steps` steps of `next`, the first with x and w and each other one `direction` from the one before.
  // Few rows, for which `lines` is -1, fetch their own weights; many `lines` lines from `ahead` on in
  // each step.
  JB_INLINE_MEMBER void block(const Results& next, const char* x, int64_t stride, const char* w,
                              int64_t steps, int64_t direction, const char* ahead, int64_t lines) {
    const int64_t x_step = 64 * direction, w_step = 2048 * direction;
    Results before = last;
    int64_t soon = next.row;
    const int64_t share = steps > 2 ? (before.end - before.row + steps - 3) / (steps - 2) : 0;
    for (int64_t i = 0; i < steps; ++i, x += x_step, w += w_step) {
      if (lines < 0) {
#pragma GCC unroll 32
        for (int line = 0; line < 32; ++line) _mm_prefetch(w + AMX_AHEAD + 64 * line, _MM_HINT_T0);
      }
      if (i == 0) {
        JB_OPEN(0, 0)
        _tile_loadd(6, w, 64);
        _tile_loadd(4, x, stride);
        JB_TDP(0, 4, 6);
        JB_OPEN(1, 64)
        _tile_loadd(7, w + 1024, 64);
        JB_TDP(1, 4, 7);
        if (TWO_BLOCKS) {
          JB_OPEN(2, 16 * 128)
          _tile_loadd(5, x + 16 * stride, stride);
          JB_TDP(2, 5, 6);
          JB_OPEN(3, 16 * 128 + 64)
          JB_TDP(3, 5, 7);
        }
        continue;
      }
      _tile_loadd(6, w, 64);
      _tile_loadd(4, x, stride);
      JB_TDP(0, 4, 6);
      _tile_loadd(7, w + 1024, 64);
      JB_TDP(1, 4, 7);
      if (TWO_BLOCKS) {
        _tile_loadd(5, x + 16 * stride, stride);
        JB_TDP(2, 5, 6);
        JB_TDP(3, 5, 7);
      }
      for (int64_t line = 0; line < lines; ++line, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);
      // A step late: the sums are on their way from the registers to the cache.
      if (i > 1) {
        finish(sink, before, share);
        for (int64_t n = 0; n < share && soon < next.end; ++n, ++soon) sink.fetch(next.which, soon);
      }
    }
    finish(sink, before, before.end - before.row);
    last = next;
  }
#undef JB_OPEN
#undef JB_TDP

  void flush() {
    if (!last.c) return;
    _tile_stored(0, last.c, 128);
    _tile_stored(1, (char*)last.c + 64, 128);
    if (TWO_BLOCKS) {
      _tile_stored(2, (char*)last.c + 16 * 128, 128);
      _tile_stored(3, (char*)last.c + 16 * 128 + 64, 128);
    }
    finish(sink, last, last.end - last.row);
    last.c = nullptr;
  }

  // All rows of x with the panels of `own`; `buffer` is the thread's scratch.
  __attribute__((noinline)) void run(const RowsOfX& x, const Matrix* w, Range own, char* buffer) {
    const int64_t rows = x.rows, chunk = rows_in_cache(PAIRS ? 2 * w->k : w->k);
    const int64_t steps = PAIRS ? round_up(x.k, 32) / 32 : round_up(x.k, 64) / 64;
    const int64_t stride = PAIRS ? 2 * x.ldx : x.ldx;
    const bool few = rows <= BLOCK;
    int64_t which = 0;
    Results next{c};
    for (int64_t from = 0; from < rows; from += chunk) {
      const int64_t to = from + chunk < rows ? from + chunk : rows;
      const int64_t all_steps = (to - from + BLOCK - 1) / BLOCK * steps;
      const int64_t lines = few ? -1 : (panel_bytes(w) / 64 + all_steps - 1) / all_steps;
      for (int64_t panel = own.begin; panel < own.end; ++panel) {
        const char* opened = open_panel(x, w, panel, buffer);
        // What unpacking has written is there before tiles are loaded.
        __asm__ volatile("" ::: "memory");
        which ^= 1;
        sink.open(panel, which);
        next.which = which;
        const char* ahead = panel_start(w, panel + 1);
        bool back = false;
        for (next.row = from; next.row < to; next.row = next.end) {
          next.end = next.row + BLOCK < to ? next.row + BLOCK : to;
          // The last block overlaps, unless it is the only one.
          next.start = few ? 0 : next.row + BLOCK > rows ? rows - BLOCK : next.row;
          const int64_t at = back ? steps - 1 : 0;
          block(next, (const char*)x.x + next.start * stride + 64 * at, stride, opened + 2048 * at, steps,
                back ? -1 : 1, ahead, lines);
          ahead += 64 * lines * (steps - 1);
          next.c = next.c == c ? c + BLOCK_FLOATS : c;
          // There and back again: the steps used last are still in the first-level cache.
          back = !few && !back;
        }
      }
    }
    flush();
  }
};

// Can the pipeline do it?
JB_INLINE bool tiles_serve(const RowsOfX& x, const Matrix* w) {
  if (x.form == FORM_BF16) return w->kind == MATRIX_BF16 || x.rows > BLOCK;
  return x.form == FORM_INT8 && x.bits == 8;
}

// All rows of x with the panels of `own`, each given to the sink of its kind of sums.
template <bool PAIRS, class Sink>
JB_INLINE void run_tiles(const RowsOfX& x, const Matrix* w, Range own, char* buffer, Sink& sink) {
  if (x.rows > 16) {
    TilePipeline<PAIRS, true, Sink> pipeline{sink};
    pipeline.run(x, w, own, buffer);
  } else {
    TilePipeline<PAIRS, false, Sink> pipeline{sink};
    pipeline.run(x, w, own, buffer);
  }
}

}  // namespace JB_ISA
}  // namespace jb

#endif
