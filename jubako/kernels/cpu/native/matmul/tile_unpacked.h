// The product of up to 32 rows with a quantised panel, unpacked on its way to the tile registers.
//
// A step of k is unpacked while the tile registers work on one before: as a ring of a few steps the
// unpacked weights stay in the first-level cache, and memory never waits for a panel to be used.
#pragma once

#include "tile_amx.h"
#include "unpack_bf16.h"

#if defined(__AMX_BF16__)

namespace jb {
namespace JB_ISA {

// Steps in the ring, and how long after its unpacking a step is used: a tile is loaded slowly from
// stores that have not left the core yet.
enum : int64_t { RING = 8, RING_LAG = 4 };

template <int KIND, bool TWO_BLOCKS>
static __attribute__((noinline)) void amx_unpacked_of(const char* x, int64_t stride, const char* at,
                                                      int64_t k, char* c) {
  alignas(64) char ring[RING * 2048];
  const Unit unit = matrix_unit(KIND);
  const int64_t steps = k / 32;
  int g = 0;
  _tile_zero(0);
  _tile_zero(1);
  if (TWO_BLOCKS) {
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int64_t step = 0; step < steps + RING_LAG; ++step) {
    if (step < steps) {
      unpack_step_bf16(KIND, at, g, ring + step % RING * 2048);
      if (++g == unit.k / 32) {
        g = 0;
        at += unit_bytes(unit);
      }
    }
    if (step >= RING_LAG) {
      const char* w = ring + (step - RING_LAG) % RING * 2048;
      _tile_loadd(6, w, 64);
      _tile_loadd(4, x, stride);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, w + 1024, 64);
      _tile_dpbf16ps(1, 4, 7);
      if (TWO_BLOCKS) {
        _tile_loadd(5, x + 16 * stride, stride);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
      }
      x += 64;
    }
  }
  _tile_stored(0, c, 128);
  _tile_stored(1, c + 64, 128);
  if (TWO_BLOCKS) {
    _tile_stored(2, c + 16 * 128, 128);
    _tile_stored(3, c + 16 * 128 + 64, 128);
  }
}

// c[rows][32] for at most 32 rows; x in bf16 with `stride` bytes between rows.
static __attribute__((unused)) void amx_unpacked(const Matrix* w, int64_t panel, int64_t rows,
                                                 const char* x, int64_t stride, char* c) {
  const char* at = panel_start(w, panel);
  switch (w->kind) {
#define KIND(name)                                                           \
  case name:                                                                 \
    if (rows > 16) {                                                         \
      amx_unpacked_of<name, true>(x, stride, at, w->k, c);                   \
    } else {                                                                 \
      amx_unpacked_of<name, false>(x, stride, at, w->k, c);                  \
    }                                                                        \
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

}  // namespace JB_ISA
}  // namespace jb

#endif
