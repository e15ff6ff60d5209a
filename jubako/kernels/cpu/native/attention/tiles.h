// How do many rows attend with products on tile registers (AMX)?
//
// Keys come in tiles of TILE_KEYS positions, counted from position 0. The tile's keys and values are
// laid out once as right operands and then serve all rows of the task, 32 at a time, with an online
// softmax in float32 and weights rounded to bfloat16. A row's result does not depend on which rows
// it is computed with.
#pragma once

#include "rows.h"

namespace jb {
namespace JB_ISA {

constexpr int64_t BLOCK = 32;    // rows at a time, and keys of one step of weights · values
constexpr int64_t TILE = 16;     // rows of a tile register
constexpr int64_t TILE_ELEMENTS = 512;  // bfloat16 in a tile register
// Rows apart by a power of two would share few lines of a cache.
constexpr int64_t SCORE_STRIDE = TILE_KEYS + 16, WEIGHT_STRIDE = TILE_KEYS + 32;
constexpr float LOG2_E = 1.44269504088896341f;

// From how many rows on tiles are faster than streaming; 0: never.
static inline int64_t tile_rows_from(const AttentionArgs& a) {
  if (a.dtype != BF16 || a.kv_dtype != BF16 || a.head_size < 16) return 0;
  if (!(a.scale > 0)) return 0;
  return 24;
}

static inline void configure_tiles() {
  struct {
    uint8_t palette, start;
    uint8_t reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
  } config = {};
  config.palette = 1;
  for (int i = 0; i < 8; ++i) config.bytes[i] = 64, config.rows[i] = TILE;
  _tile_loadconfig(&config);
}

static inline void release_tiles() { _tile_release(); }

struct TileRows {
  int64_t count, blocks;
  int64_t q_size, value_size;  // padded
  int64_t acc_stride;
  uint16_t* q;       // [rows, q_size]
  uint16_t* keys;    // [TILE_KEYS / 16, q_size / 32] tiles of [16 pairs of d, 16 keys, 2]
  uint16_t* values;  // [TILE_KEYS / 32, value_size / 16] tiles of [16 pairs of keys, 16 d, 2]
  uint16_t* weights;  // [BLOCK, TILE_KEYS]
  float* scores;      // [BLOCK, TILE_KEYS]
  float* acc;         // [rows, value_size]
  float* m;           // [rows], in powers of 2
  float* l;           // [rows, 16] by lane
  int32_t *begin, *end;  // [rows], the keys that a row sees
};

static inline void place_tile_rows(TileRows& rows, const AttentionArgs& a, char* scratch) {
  rows.q_size = round_up(a.head_size, 32);
  rows.value_size = round_up(a.value_size, 32);
  rows.acc_stride = rows.value_size + 16;
  uint16_t* h = (uint16_t*)(((uintptr_t)scratch + 63) / 64 * 64);
  rows.q = h, h += TILE_ROWS * rows.q_size;
  rows.keys = h, h += TILE_KEYS * rows.q_size;
  rows.values = h, h += TILE_KEYS * rows.value_size;
  rows.weights = h, h += BLOCK * WEIGHT_STRIDE;
  float* f = (float*)h;
  rows.scores = f, f += BLOCK * SCORE_STRIDE;
  rows.acc = f, f += TILE_ROWS * rows.acc_stride;
  rows.m = f, f += TILE_ROWS;
  rows.l = f, f += 16 * TILE_ROWS;
  rows.begin = (int32_t*)f, f += TILE_ROWS;
  rows.end = (int32_t*)f;
}

static inline void load_tile_rows(TileRows& rows, const AttentionArgs& a, const Task& t) {
  const AttentionStep& step = *a.step;
  int64_t start = step.query_start_loc[t.req];
  int64_t seq_len = step.seq_lens[t.req];
  int64_t context = seq_len - (step.query_start_loc[t.req + 1] - start);
  rows.count = t.num_queries * t.num_heads;
  rows.blocks = (rows.count + BLOCK - 1) / BLOCK;
  int64_t r = 0;
  for (int64_t i = 0; i < t.num_queries; ++i) {
    int64_t token = start + t.first_query + i;
    KeyRange keys = visible_keys(a, token, context + t.first_query + i, seq_len);
    for (int64_t h = 0; h < t.num_heads; ++h, ++r) {
      int64_t head = t.kv_head * t.num_heads + h;
      const uint16_t* from = (const uint16_t*)a.q + token * a.q_stride + head * a.head_size;
      uint16_t* to = rows.q + r * rows.q_size;
      memcpy(to, from, a.head_size * 2);
      memset(to + a.head_size, 0, (rows.q_size - a.head_size) * 2);
      rows.begin[r] = keys.begin;
      rows.end[r] = keys.end;
      rows.m[r] = NOTHING;
      v_store(rows.l + 16 * r, v_set(0));
    }
  }
  for (; r < rows.blocks * BLOCK; ++r) {
    memset(rows.q + r * rows.q_size, 0, rows.q_size * 2);
    rows.begin[r] = rows.end[r] = 0;
  }
}

// Columns of 16 rows of 16 dwords become rows.
static inline void transpose_16(__m512i* r) {
  __m512i t[16];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
  for (int i = 0; i < 4; ++i) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
}

JB_INLINE __mmask32 elements(int64_t n) { return n >= 32 ? ~0u : n <= 0 ? 0 : (1u << n) - 1; }

// Lay out the keys and values at positions [begin, end) of the tile at position `at`; zeros stand
// for the others of a BLOCK. What is at other positions is never read.
static inline void lay_out(TileRows& rows, const AttentionArgs& a, const Task& t, int64_t at,
                           int64_t begin, int64_t end) {
  const int32_t* table = a.step->block_table + t.req * a.step->block_table_stride;
  const char* head = (const char*)a.pages + t.kv_head * a.head_stride;
  const char* row[TILE_KEYS];
  int64_t first = (begin - at) / BLOCK * BLOCK, last = round_up(end - at, BLOCK);
  for (int64_t j = first; j < last; ++j) row[j] = nullptr;
  for (int64_t p = begin; p < end;) {
    int64_t column = p / a.block_size, offset = p - column * a.block_size;
    const char* slab = head + (int64_t)table[column] * a.block_stride;
    int64_t n = a.block_size - offset < end - p ? a.block_size - offset : end - p;
    for (int64_t i = 0; i < n; ++i) row[p - at + i] = slab + (offset + i) * a.row_stride;
    p += n;
  }
  int64_t key_steps = rows.q_size / 32, value_tiles = rows.value_size / 16;
  for (int64_t j = first; j < last; j += 16) {
    uint16_t* tiles = rows.keys + j / 16 * key_steps * TILE_ELEMENTS;
    for (int64_t k = 0; k < key_steps; ++k) {
      __mmask32 mask = elements(a.head_size - 32 * k);
      __m512i x[16];
      for (int i = 0; i < 16; ++i) {
        const char* from = row[j + i];
        x[i] = from ? _mm512_maskz_loadu_epi16(mask, from + 64 * k) : _mm512_setzero_si512();
      }
      transpose_16(x);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tiles + k * TILE_ELEMENTS + 32 * i, x[i]);
    }
  }
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int64_t j = first; j < last; j += 2) {
    uint16_t* tiles = rows.values + j / 32 * value_tiles * TILE_ELEMENTS + j % 32 / 2 * 32;
    for (int64_t d = 0; d < rows.value_size; d += 32) {
      __mmask32 mask = elements(a.value_size - d);
      __m512i x[2];
      for (int i = 0; i < 2; ++i) {
        const char* from = row[j + i];
        x[i] = from ? _mm512_maskz_loadu_epi16(mask, from + a.value_offset + 2 * d)
                    : _mm512_setzero_si512();
        x[i] = _mm512_permutexvar_epi64(order, x[i]);
      }
      _mm512_store_si512(tiles + d / 16 * TILE_ELEMENTS, _mm512_unpacklo_epi16(x[0], x[1]));
      _mm512_store_si512(tiles + (d / 16 + 1) * TILE_ELEMENTS, _mm512_unpackhi_epi16(x[0], x[1]));
    }
  }
}

// Scores of 32 rows with the keys [first, last) of the tile, multiples of BLOCK.
static inline void score_tiles(TileRows& rows, const uint16_t* q, int64_t first, int64_t last) {
  int64_t steps = rows.q_size / 32, q_bytes = rows.q_size * 2;
  for (int64_t j = first; j < last; j += 32) {
    const uint16_t* left = rows.keys + j / 16 * steps * TILE_ELEMENTS;
    const uint16_t* right = left + steps * TILE_ELEMENTS;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t k = 0; k < steps; ++k) {
      _tile_loadd(4, q + 32 * k, q_bytes);
      _tile_loadd(6, left + k * TILE_ELEMENTS, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, right + k * TILE_ELEMENTS, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, q + TILE * rows.q_size + 32 * k, q_bytes);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    float* s = rows.scores + j;
    _tile_stored(0, s, SCORE_STRIDE * 4);
    _tile_stored(1, s + 16, SCORE_STRIDE * 4);
    _tile_stored(2, s + TILE * SCORE_STRIDE, SCORE_STRIDE * 4);
    _tile_stored(3, s + TILE * SCORE_STRIDE + 16, SCORE_STRIDE * 4);
  }
}

// 2^x for x <= 0 within 8e-5 of it, a fraction of what rounding the weights costs; 0 for -inf.
JB_INLINE __m512 exp2_negative(__m512 x) {
  __m512 r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  __m512 p = _mm512_set1_ps(0.0780245246f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.226067184f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.695833513f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.999925223f));
  return _mm512_scalef_ps(p, x);
}

// The largest lane in every lane.
JB_INLINE __m512 max_of_lanes(__m512 x) {
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
  return _mm512_max_ps(x, _mm512_permute_ps(x, 0xb1));
}

JB_INLINE void hide_unseen(float* scores, int64_t j, int64_t lo, int64_t hi) {
  int64_t from = lo - j, to = hi - j;
  from = from < 0 ? 0 : from > 16 ? 16 : from;
  to = to < 0 ? 0 : to > 16 ? 16 : to;
  __mmask16 unseen = (__mmask16)~(((1u << to) - 1) & ~((1u << from) - 1));
  _mm512_mask_storeu_ps(scores + j, unseen, _mm512_set1_ps(NOTHING));
}

// Scores to weights for one row: keys [first, last) of the tile at position `at`.
static inline void weigh_tile_row(TileRows& rows, const AttentionArgs& a, int64_t r, int64_t at,
                                  int64_t first, int64_t last) {
  float* s = rows.scores + r % BLOCK * SCORE_STRIDE;
  uint16_t* w = rows.weights + r % BLOCK * WEIGHT_STRIDE;
  int64_t lo = rows.begin[r] - at, hi = rows.end[r] - at;
  if (lo < first) lo = first;
  if (hi > last) hi = last;
  if (lo >= hi) lo = hi = first;
  int64_t begin = lo / 32 * 32, end = round_up(hi, 32);
  for (int64_t j = first; j < begin; j += 32) _mm512_storeu_si512(w + j, _mm512_setzero_si512());
  for (int64_t j = end; j < last; j += 32) _mm512_storeu_si512(w + j, _mm512_setzero_si512());
  if (lo == hi) return;
  if (a.soft_cap > 0) {
    float inner = a.scale / a.soft_cap, outer = a.soft_cap * LOG2_E;
    for (int64_t j = begin; j < end; j += 16) {
      v_store(s + j, v_tanh(v_load(s + j) * inner) * outer);
    }
  }
  if (lo > begin || hi < end) {
    hide_unseen(s, begin, lo, hi);
    hide_unseen(s, begin + 16, lo, hi);
    hide_unseen(s, end - 32, lo, hi);
    hide_unseen(s, end - 16, lo, hi);
  }
  __m512 top0 = _mm512_set1_ps(NOTHING), top1 = top0;
  for (int64_t j = begin; j < end; j += 32) {
    top0 = _mm512_max_ps(_mm512_loadu_ps(s + j), top0);
    top1 = _mm512_max_ps(_mm512_loadu_ps(s + j + 16), top1);
  }
  float unit = a.soft_cap > 0 ? 1.0f : a.scale * LOG2_E;
  __m512 factor = _mm512_set1_ps(unit);
  __m512 top = _mm512_mul_ps(max_of_lanes(_mm512_max_ps(top0, top1)), factor);
  float* l = rows.l + 16 * r;
  float old = rows.m[r];
  if (!(_mm512_cvtss_f32(top) <= old)) {
    rows.m[r] = _mm512_cvtss_f32(top);
    if (old != NOTHING) {
      __m512 f = exp2_negative(_mm512_sub_ps(_mm512_set1_ps(old), top));
      _mm512_store_ps(l, _mm512_mul_ps(_mm512_load_ps(l), f));
      float* acc = rows.acc + r * rows.acc_stride;
      for (int64_t d = 0; d < rows.value_size; d += 16) {
        _mm512_storeu_ps(acc + d, _mm512_mul_ps(_mm512_loadu_ps(acc + d), f));
      }
    }
  } else {
    top = _mm512_set1_ps(old);
  }
  __m512 sum0 = _mm512_load_ps(l), sum1 = _mm512_setzero_ps();
  for (int64_t j = begin; j < end; j += 32) {
    __m512 x = exp2_negative(_mm512_fmsub_ps(_mm512_loadu_ps(s + j), factor, top));
    __m512 y = exp2_negative(_mm512_fmsub_ps(_mm512_loadu_ps(s + j + 16), factor, top));
    sum0 = _mm512_add_ps(sum0, x);
    sum1 = _mm512_add_ps(sum1, y);
    __m512bh both = _mm512_cvtne2ps_pbh(y, x);
    memcpy(w + j, &both, 64);
  }
  _mm512_store_ps(l, _mm512_add_ps(sum0, sum1));
}

// acc += weights · values for 32 rows and the keys [first, last) of the tile; `fresh`: acc is zero.
static inline void value_tiles(TileRows& rows, float* acc, int64_t first, int64_t last,
                               bool fresh) {
  int64_t tiles = rows.value_size / 16, acc_bytes = rows.acc_stride * 4;
  for (int64_t d = 0; d < rows.value_size; d += 32) {
    float* upper = acc + d;
    float* lower = upper + TILE * rows.acc_stride;
    if (fresh) {
      _tile_zero(0);
      _tile_zero(1);
      _tile_zero(2);
      _tile_zero(3);
    } else {
      _tile_loadd(0, upper, acc_bytes);
      _tile_loadd(1, upper + 16, acc_bytes);
      _tile_loadd(2, lower, acc_bytes);
      _tile_loadd(3, lower + 16, acc_bytes);
    }
    for (int64_t j = first; j < last; j += 32) {
      const uint16_t* v = rows.values + (j / 32 * tiles + d / 16) * TILE_ELEMENTS;
      _tile_loadd(4, rows.weights + j, WEIGHT_STRIDE * 2);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + TILE_ELEMENTS, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, rows.weights + TILE * WEIGHT_STRIDE + j, WEIGHT_STRIDE * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, acc_bytes);
    _tile_stored(1, upper + 16, acc_bytes);
    _tile_stored(2, lower, acc_bytes);
    _tile_stored(3, lower + 16, acc_bytes);
  }
}

// The keys that any of rows [first, last) sees.
static inline KeyRange seen_by(const TileRows& rows, int64_t first, int64_t last) {
  KeyRange all = {INT32_MAX, 0};
  for (int64_t r = first; r < last; ++r) {
    if (rows.begin[r] >= rows.end[r]) continue;
    if (rows.begin[r] < all.begin) all.begin = rows.begin[r];
    if (rows.end[r] > all.end) all.end = rows.end[r];
  }
  if (all.begin > all.end) all.begin = all.end;
  return all;
}

static void attend_tiled(Plan& plan, const AttentionArgs& a, const Task& t) {
  TileRows rows;
  place_tile_rows(rows, a, plan.own());
  load_tile_rows(rows, a, t);
  configure_tiles();
  KeyRange blocks[TILE_ROWS / BLOCK];
  bool fresh[TILE_ROWS / BLOCK];
  for (int64_t b = 0; b < rows.blocks; ++b) {
    int64_t last = (b + 1) * BLOCK < rows.count ? (b + 1) * BLOCK : rows.count;
    blocks[b] = seen_by(rows, b * BLOCK, last);
    fresh[b] = true;
  }
  KeyRange all = seen_by(rows, 0, rows.count);
  for (int64_t at = all.begin / TILE_KEYS * TILE_KEYS; at < all.end; at += TILE_KEYS) {
    int64_t begin = all.begin > at ? all.begin : at;
    int64_t end = all.end < at + TILE_KEYS ? all.end : at + TILE_KEYS;
    lay_out(rows, a, t, at, begin, end);
    for (int64_t b = 0; b < rows.blocks; ++b) {
      int64_t first = blocks[b].begin > at ? (blocks[b].begin - at) / BLOCK * BLOCK : 0;
      int64_t last = blocks[b].end - at < TILE_KEYS ? round_up(blocks[b].end - at, BLOCK) : TILE_KEYS;
      if (blocks[b].end <= at || first >= last) continue;
      score_tiles(rows, rows.q + b * BLOCK * rows.q_size, first, last);
      int64_t end_row = (b + 1) * BLOCK < rows.count ? (b + 1) * BLOCK : rows.count;
      for (int64_t r = b * BLOCK; r < end_row; ++r) {
        weigh_tile_row(rows, a, r, at, first, last);
      }
      value_tiles(rows, rows.acc + b * BLOCK * rows.acc_stride, first, last, fresh[b]);
      fresh[b] = false;
    }
  }
  int64_t token = a.step->query_start_loc[t.req] + t.first_query;
  for (int64_t r = 0; r < rows.count; ++r) {
    int64_t head = t.kv_head * t.num_heads + r % t.num_heads;
    float m = rows.m[r] == NOTHING ? NOTHING : rows.m[r] / LOG2_E;
    finish_row(a, token + r / t.num_heads, head, m, v_sum(v_load(rows.l + 16 * r)),
               rows.acc + r * rows.acc_stride, sink_of(a, head));
  }
}

}  // namespace JB_ISA
}  // namespace jb
