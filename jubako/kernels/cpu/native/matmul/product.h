// Which computation serves a matrix on this level, and what does it need of x?
//
// `RowsOfX` is x in the form that the computation takes; `product_rows` multiplies some of its rows
// with one panel. The ops put these together.
#pragma once

#include "../base/team.h"
#include "dot_bf16.h"
#include "dot_int.h"
#include "layout.h"
#include "quantise.h"
#include "tile_amx.h"
#include "tile_f32.h"
#include "tile_unpacked.h"
#include "unpack.h"
#include "unpack_bf16.h"

#if defined(__AMX_BF16__) && defined(__AMX_INT8__)
#define JB_AMX 1
#else
#define JB_AMX 0
#endif

namespace jb {
namespace JB_ISA {

// F32: x and panels as float32. BF16: both in bf16. GROUPS: x as 16-bit integers in groups of 32 for
// ggml's kinds. INT8: x as integers with one scale for each row.
enum Form : int32_t { FORM_NONE, FORM_F32, FORM_BF16, FORM_GROUPS, FORM_INT8 };

// GROUP rows of results are made at a time. The tile registers serve from one row on: they read the
// weights at 97 percent of the bandwidth of a plain loop, dot products of one row at 88.
enum : int64_t { BLOCK = 32, GROUP = 256, FEW_ROWS = 3 };

struct XRef {
  const void* x;
  int64_t ldx;
  int32_t dtype;
  int32_t activation_bits;
  int64_t rows, k;
  char* scratch;
  int64_t scratch_bytes;
};

struct RowsOfX {
  int32_t form;
  int32_t bits;
  int64_t rows, k;
  const void* x;
  int64_t ldx;
  const int8_t* low;     // INT8 with 16 bits
  const float* scales;   // INT8
  const int32_t* sums;   // INT8: two for each row, of high and of low
};

JB_INLINE int32_t product_form(int32_t kind, int32_t x_dtype, int64_t rows) {
  (void)rows;
  if (x_dtype == F32 || kind == MATRIX_F32) return FORM_F32;
#if defined(__AVX512VNNI__)
  if (kind == MATRIX_INT8) return FORM_INT8;
  if (kind != MATRIX_BF16 && rows <= ROWS_DOT_INT) return FORM_GROUPS;
#endif
#if defined(__AVX512BF16__)
  if (kind != MATRIX_INT8) return FORM_BF16;
#endif
  return FORM_F32;
}

JB_INLINE char* thread_scratch(const XRef& ref, const Team& team) {
  return ref.scratch + ref.scratch_bytes - (team.size - team.rank) * scratch_thread_bytes(ref.k);
}

#if defined(__AVX512VNNI__)
static void quantise_rows(const XRef& ref, int64_t begin, int64_t end, char* to, RowsOfX* out) {
  // An odd number of cache lines: rows of one column lie in different sets of the cache.
  const int64_t k = round_up(ref.k, 64), stride = k | 64;
  float* scales = (float*)to;
  int32_t* sums = (int32_t*)(scales + round_up(ref.rows, 16));
  int8_t* high = (int8_t*)(sums + 2 * round_up(ref.rows, 16));
  int8_t* low = high + ref.rows * stride;
  for (int64_t r = begin; r < end; ++r) {
    const uint16_t* row = (const uint16_t*)ref.x + r * ref.ldx;
    if (ref.activation_bits == 16) {
      scales[r] = quantise_row<16>(row, ref.k, k, high + r * stride, low + r * stride, sums + 2 * r);
    } else {
      scales[r] = quantise_row<8>(row, ref.k, k, high + r * stride, nullptr, sums + 2 * r);
    }
  }
  out->x = high;
  out->low = low;
  out->ldx = stride;
  out->scales = scales;
  out->sums = sums;
}
#endif

// x in the form that `form` takes. All threads call it together; it may wait for them.
static void prepare_rows(Team& team, const XRef& ref, int32_t form, RowsOfX* out) {
  *out = RowsOfX{form, ref.activation_bits, ref.rows, ref.k, ref.x, ref.ldx, nullptr, nullptr, nullptr};
  if (form == FORM_F32 && ref.dtype == F32) return;
  if (form == FORM_BF16 && ref.k % 32 == 0) return;
#if defined(__AVX512VNNI__)
  if (form == FORM_GROUPS) {
    // A few rows: every thread makes its own, which takes less time than waiting for another.
    IntGroup* groups = (IntGroup*)thread_scratch(ref, team);
    for (int64_t r = 0; r < ref.rows; ++r) {
      quantise_groups((const uint16_t*)ref.x + r * ref.ldx, ref.k, groups + r * (ref.k / 32));
    }
    out->x = groups;
    out->ldx = ref.k / 32;
    return;
  }
  if (form == FORM_INT8 && ref.rows <= FEW_ROWS) {
    quantise_rows(ref, 0, ref.rows, thread_scratch(ref, team), out);
    return;
  }
#endif
  Range own = team.range(ref.rows);
  const uint16_t* x = (const uint16_t*)ref.x;
  if (form == FORM_F32) {
    float* to = (float*)ref.scratch;
    for (int64_t r = own.begin; r < own.end; ++r) {
      for (int64_t i = 0; i < ref.k; ++i) to[r * ref.k + i] = load_f32(x + r * ref.ldx, i, ref.dtype);
    }
    out->x = to;
    out->ldx = ref.k;
  } else if (form == FORM_BF16) {
    // The products read whole steps of 32: what is beyond k must be numbers.
    int64_t k = round_up(ref.k, 32);
    uint16_t* to = (uint16_t*)ref.scratch;
    for (int64_t r = own.begin; r < own.end; ++r) {
      memcpy(to + r * k, x + r * ref.ldx, ref.k * 2);
      memset(to + r * k + ref.k, 0, (k - ref.k) * 2);
    }
    out->x = to;
    out->ldx = k;
  }
#if defined(__AVX512VNNI__)
  if (form == FORM_INT8) quantise_rows(ref, own.begin, own.end, ref.scratch, out);
#endif
  team.barrier();
}

// The panel in the form that product_rows takes; `buffer` is the thread's scratch. Null where the
// product unpacks it itself.
JB_INLINE const char* open_panel(const RowsOfX& x, const Matrix* w, int64_t panel, char* buffer) {
  const int32_t form = x.form;
  if (form == FORM_F32 && w->kind != MATRIX_F32) {
    unpack_panel(w, panel, (float*)buffer);
    return buffer;
  }
#if defined(__AVX512BF16__)
  if (form == FORM_BF16 && w->kind != MATRIX_BF16) {
    if (JB_AMX && x.rows <= BLOCK) return nullptr;
    unpack_panel_bf16(w, panel, buffer);
    return buffer;
  }
#endif
  return panel_start(w, panel);
}

// Around all product_rows of an op.
JB_INLINE void product_begin(int64_t rows) {
#if JB_AMX
  amx_configure(rows < BLOCK ? rows : BLOCK);
#else
  (void)rows;
#endif
}

JB_INLINE void product_end() {
#if JB_AMX
  amx_release();
#endif
}

// Fetch the beginning of the next panel, two lines for each row that is finished meanwhile.
JB_INLINE void fetch_ahead(const char* next, int64_t rows) {
  int64_t bytes = 128 * (rows < BLOCK ? rows : BLOCK);
  for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(next + 512 + at);
}

// Rows [start, start + count) are computed, of which the first `skip` are not wanted.
struct RowGroup {
  int64_t start, count, skip;
};

// The group for rows from `first` on, of which there are some before `end`. Blocks of BLOCK rows
// only, unless x has fewer: the last one overlaps.
JB_INLINE RowGroup row_group(int64_t rows, int64_t first, int64_t end) {
  int64_t left = end - first;
  if (rows < BLOCK) return {first, rows, 0};
  if (left < BLOCK) return {rows - BLOCK, BLOCK, first - (rows - BLOCK)};
  return {first, left < GROUP ? left / BLOCK * BLOCK : GROUP, 0};
}

#if defined(__AVX512VNNI__)
static void int8_rows(const RowsOfX& x, const Matrix* w, int64_t panel, const char* opened,
                      int64_t first, int64_t rows, float* c, int64_t next_bytes) {
  (void)next_bytes;
  alignas(64) int32_t low_sums[GROUP * PANEL];
  const int64_t k = round_up(x.k, 64);
  const int planes = x.bits == 16 ? 2 : 1;
  for (int plane = 0; plane < planes; ++plane) {
    const int8_t* from = (plane ? x.low : (const int8_t*)x.x) + first * x.ldx;
    int32_t* to = plane ? low_sums : (int32_t*)c;
#if JB_AMX
    amx_panel<false>(rows, (const char*)from, x.ldx, opened, k / 64, (char*)to,
                     panel_start(w, panel + 1), plane ? 0 : next_bytes);
#else
    dot_int8(rows, from, x.ldx, opened, k, to);
#endif
  }
  const float* scales = w->scales + panel * PANEL;
  for (int64_t r = 0; r < rows; ++r) {
    const int32_t* row_sums = x.sums + 2 * (first + r);
    for (int t = 0; t < 2; ++t) {
      int64_t at = r * PANEL + TILE * t;
      i32x16 high;
      memcpy(&high, c + at, 64);
      f32x16 value = __builtin_convertvector(high - 128 * row_sums[0], f32x16);
      if (planes == 2) {
        i32x16 low;
        memcpy(&low, low_sums + at, 64);
        value = value * 256.0f + __builtin_convertvector(low - 128 * row_sums[1], f32x16);
      }
      v_store(c + at, value * x.scales[first + r] * v_load(scales + TILE * t));
    }
  }
}
#endif

// c[rows][32] = rows `first` .. of x times a panel, as row_group says. `fetch`: the next panel is
// wanted soon.
JB_INLINE void product_rows(const RowsOfX& x, const Matrix* w, int64_t panel, const char* opened,
                            int64_t first, int64_t rows, float* c, bool fetch) {
  const int64_t next_bytes = fetch ? panel_bytes(w) : 0;
  (void)panel;
  (void)next_bytes;
  switch (x.form) {
    case FORM_F32:
      tile_f32(rows, (const float*)x.x + first * x.ldx, x.ldx, (const float*)opened, x.k, c);
      break;
#if defined(__AVX512BF16__)
    case FORM_BF16: {
      const uint16_t* from = (const uint16_t*)x.x + first * x.ldx;
      int64_t k = round_up(x.k, 32);
#if JB_AMX
      if (opened) {
        amx_panel<true>(rows, (const char*)from, 2 * x.ldx, opened, k / 32, (char*)c,
                        panel_start(w, panel + 1), next_bytes);
      } else {
        amx_unpacked(w, panel, rows, (const char*)from, 2 * x.ldx, (char*)c);
      }
#else
      dot_bf16(rows, from, x.ldx, opened, k, c);
#endif
      break;
    }
#endif
#if defined(__AVX512VNNI__)
    case FORM_GROUPS:
      dot_int(w->kind, rows, (const IntGroup*)x.x + first * x.ldx, x.ldx, opened, x.k, c);
      break;
    case FORM_INT8: int8_rows(x, w, panel, opened, first, rows, c, next_bytes); break;
#endif
  }
}

}  // namespace JB_ISA
}  // namespace jb
