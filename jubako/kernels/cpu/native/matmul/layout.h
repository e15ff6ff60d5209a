// How does a packed matrix lie in memory?
//
// Outputs come in panels of 32, two tiles of 16; a panel is one sequential stream: units of some
// elements of k one after another, in each unit the scales of tile 0 and 1, if there are, then the
// numbers of tile 0 and 1. So a core that owns neighbouring panels reads ahead in a straight line,
// both tiles' chains of sums run at once, and every 64 bytes of numbers are one cache line. Lane j
// below is output j of the tile.
//
// F32   unit 1:   16 floats.
// BF16  unit 32:  16 rows of 64 bytes; row r has for each lane the pair k = 2r, 2r + 1, as both
//                 VDPBF16PS and TDPBF16PS take it.
// INT8  unit 64:  16 rows of 64 bytes; row r has for each lane the four k = 4r .. 4r + 3, stored as
//                 value + 128, as both VPDPBUSD and TDPBSUD take it.
// The ggml types hold 32 elements in `quads`: 8 rows as of INT8. Q8_0 stores value + 128, the
// others the unsigned number as it is in the file.
//   low 4 bits   256 bytes: row r in the low halves of 64 bytes, row r + 4 in the high ones
//   fifth bit     64 bytes: bit r of byte i belongs to byte i of row r
//   bits 5 and 6 128 bytes: bits 2t, 2t + 1 of byte i of half v belong to byte i of row 4v + t
// Q8_0, Q4_0, Q4_1, Q5_0, Q5_1  unit 32. Scales: 16 halves d, 16 halves m. Numbers: 8 rows, or low
//             bits, fifth bit.
// Q4_K, Q5_K  unit 256. Scales: d, dmin (16 halves each); 16 words of the scales' low 4 bits
//             (sub-block s at 4s), 16 words of the minima's; 16 words of the high 2 bits (scale s
//             at 2s, minimum at 16 + 2s). Numbers: 8 times low bits, fifth bit.
// Q6_K  unit 256. Scales: d (16 halves), 16 rows of 16 signed bytes (scales of 16 elements each).
//             Numbers: 8 times low bits, bits 5 and 6.
// Each takes as many bytes as in the file.
#pragma once

#include "../base/types.h"
#include "args.h"

namespace jb {

enum : int64_t { PANEL = 32, TILE = 16 };

struct Unit {
  int64_t k;        // elements of k
  int64_t scales;   // bytes of a tile's scales
  int64_t numbers;  // bytes of a tile's numbers
};

JB_INLINE Unit matrix_unit(int32_t kind) {
  switch (kind) {
    case MATRIX_F32: return {1, 0, 64};
    case MATRIX_BF16: return {32, 0, 1024};
    case MATRIX_INT8: return {64, 0, 1024};
    case MATRIX_Q8_0: return {32, 32, 512};
    case MATRIX_Q4_0: return {32, 32, 256};
    case MATRIX_Q4_1: return {32, 64, 256};
    case MATRIX_Q5_0: return {32, 32, 320};
    case MATRIX_Q5_1: return {32, 64, 320};
    case MATRIX_Q4_K: return {256, 256, 8 * 256};
    case MATRIX_Q5_K: return {256, 256, 8 * 320};
    case MATRIX_Q6_K: return {256, 288, 8 * 384};
  }
  return {0, 0, 0};
}

// Bytes of a unit of both tiles.
JB_INLINE int64_t unit_bytes(Unit unit) { return 2 * (unit.scales + unit.numbers); }

JB_INLINE int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

JB_INLINE int64_t matrix_panels(const Matrix* w) {
  return w->interleaved ? (w->n / 2 + TILE - 1) / TILE : (w->n + PANEL - 1) / PANEL;
}

JB_INLINE int64_t panel_bytes(const Matrix* w) {
  Unit unit = matrix_unit(w->kind);
  return (w->k + unit.k - 1) / unit.k * unit_bytes(unit);
}

// Where row `row` of half `half` is; half is 0 unless interleaved.
struct Place {
  int64_t panel;
  int32_t tile, lane;
};

JB_INLINE Place matrix_place(const Matrix* w, int64_t row, int32_t half) {
  if (w->interleaved) return {row / TILE, half, (int32_t)(row % TILE)};
  return {row / PANEL, (int32_t)(row % PANEL / TILE), (int32_t)(row % TILE)};
}

// The units of a panel are one after another from here on.
JB_INLINE const char* panel_start(const Matrix* w, int64_t panel) {
  return (const char*)w->data + panel * panel_bytes(w);
}

JB_INLINE const char* unit_scales(Unit unit, const char* at, int tile) {
  return at + tile * unit.scales;
}

JB_INLINE const char* unit_numbers(Unit unit, const char* at, int tile) {
  return at + 2 * unit.scales + tile * unit.numbers;
}

// How many rows of x, of so many bytes, are worked on as one: as many as stay in a core's second-level
// cache beside panels and results.
JB_INLINE int64_t rows_in_cache(int64_t bytes) {
  int64_t rows = (3 << 18) / (bytes < 64 ? 64 : bytes) / 32 * 32;
  return rows < 32 ? 32 : rows;
}

// Scratch of the ops for at most `rows` rows: x in another form, then for each thread a panel and
// its own form of a few rows.
JB_INLINE int64_t scratch_rows_bytes(int64_t rows, int64_t k) {
  return round_up(rows, 32) * (round_up(k, 64) * 4 + 64);
}

JB_INLINE int64_t scratch_thread_bytes(int64_t k) { return round_up(k, 256) * 32 * 4 + 4096; }

JB_INLINE int64_t matmul_scratch_bytes(int32_t threads, int64_t rows, int64_t k) {
  return scratch_rows_bytes(rows, k) + threads * scratch_thread_bytes(k);
}

}  // namespace jb
