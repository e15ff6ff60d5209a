// How do rows, keys and values lie in scratch as operands of products on tile registers?
#pragma once

#include "loads.h"
#include "rows.h"

namespace jb {
namespace JB_ISA {

constexpr int64_t BLOCK = 32;    // rows at a time, and keys of one step of weights · values
constexpr int64_t TILE = 16;     // rows of a tile register
constexpr int64_t TILE_ELEMENTS = 512;  // bfloat16 in a tile register
// Rows apart by a power of two would share few lines of a cache.
constexpr int64_t SCORE_STRIDE = TILE_KEYS + 16, WEIGHT_STRIDE = 2 * SCORE_STRIDE;
constexpr int64_t MAX_SIZE = 1024;      // elements of a head
constexpr float LOG2_E = 1.44269504088896341f;

struct TileRows {
  int64_t count, blocks;
  int64_t q_size, value_size;  // padded
  int64_t acc_stride;
  uint16_t* q;       // [rows, q_size]
  uint16_t* keys;    // [TILE_KEYS / 16, q_size / 32] tiles of [16 pairs of d, 16 keys, 2]
  uint16_t* values;  // [TILE_KEYS / 32, value_size / 16] tiles of [16 pairs of keys, 16 d, 2]
  float* scores[2];   // [BLOCK, TILE_KEYS] of two blocks; weights take the place of a row's scores
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
  float* f = (float*)h;
  for (int i = 0; i < 2; ++i) rows.scores[i] = f, f += BLOCK * SCORE_STRIDE;
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

// `size` elements of a page times `scale`, rounded to bfloat16, zeros behind them to whole 32.
template <class Load>
JB_INLINE void expand(const char* from, float scale, int64_t size, uint16_t* to) {
  for (int64_t d = 0; d < size; d += 32) {
    vec x[2];
    for (int i = 0; i < 2; ++i) {
      int64_t n = size - d - 16 * i;
      if (n >= 16) {
        x[i] = Load::full(from, d + 16 * i);
      } else {
        load_some<Load>(x + i, from, d + 16 * i, n < 0 ? 0 : n);
      }
    }
    if (Load::SCALED) x[0] *= scale, x[1] *= scale;
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)x[1], (__m512)x[0]);
    memcpy(to + d, &both, 64);
  }
}

// 16 positions of the pages, as rows of bfloat16.
struct SixteenKeys {
  const char *key[16], *value[16];
  uint16_t expanded[2][16][MAX_SIZE];
};

// Find those at positions [from, from + 16) that lie within [begin, end); zeros stand for the
// others. What is at other positions is never read.
template <class Load>
static void find_sixteen(SixteenKeys& keys, const AttentionArgs& a, const Task& t, int64_t from,
                         int64_t begin, int64_t end) {
  static const char zeros[2 * MAX_SIZE] __attribute__((aligned(64))) = {};
  const int32_t* table = a.step->block_table + t.req * a.step->block_table_stride;
  const char* head = (const char*)a.pages + t.kv_head * a.head_stride;
  for (int i = 0; i < 16; ++i) {
    int64_t p = from + i;
    keys.key[i] = keys.value[i] = zeros;
    if (p < begin || p >= end) continue;
    int64_t column = p / a.block_size, offset = p - column * a.block_size;
    const char* slab = head + (int64_t)table[column] * a.block_stride;
    const char* key = slab + offset * a.row_stride;
    const char* value = key + a.value_offset;
    if (Load::STORED_BF16) {
      keys.key[i] = key, keys.value[i] = value;
      continue;
    }
    float scales[2] = {1, 1};
    if (Load::SCALED) {
      const char* scale = slab + a.scale_offset + 4 * offset;
      memcpy(scales, scale, 4);
      memcpy(scales + 1, scale + a.value_offset, 4);
    }
    expand<Load>(key, scales[0], a.head_size, keys.expanded[0][i]);
    expand<Load>(value, scales[1], a.value_size, keys.expanded[1][i]);
    keys.key[i] = (const char*)keys.expanded[0][i];
    keys.value[i] = (const char*)keys.expanded[1][i];
  }
}

// Lay out the keys and values at positions [begin, end) of the tile at position `at`, and zeros for
// the others of a BLOCK.
template <class Load>
static void lay_out(TileRows& rows, const AttentionArgs& a, const Task& t, int64_t at,
                    int64_t begin, int64_t end) {
  SixteenKeys keys;
  int64_t first = (begin - at) / BLOCK * BLOCK, last = round_up(end - at, BLOCK);
  int64_t key_steps = rows.q_size / 32, value_tiles = rows.value_size / 16;
  const __m512i order = _mm512_set_epi64(7, 3, 6, 2, 5, 1, 4, 0);
  for (int64_t j = first; j < last; j += 16) {
    find_sixteen<Load>(keys, a, t, at + j, begin, end);
    uint16_t* tiles = rows.keys + j / 16 * key_steps * TILE_ELEMENTS;
    for (int64_t k = 0; k < key_steps; ++k) {
      __mmask32 mask = elements(a.head_size - 32 * k);
      __m512i x[16];
      for (int i = 0; i < 16; ++i) x[i] = _mm512_maskz_loadu_epi16(mask, keys.key[i] + 64 * k);
      transpose_16(x);
      for (int i = 0; i < 16; ++i) _mm512_store_si512(tiles + k * TILE_ELEMENTS + 32 * i, x[i]);
    }
    for (int i = 0; i < 16; i += 2) {
      tiles = rows.values + j / 32 * value_tiles * TILE_ELEMENTS + (j + i) % 32 / 2 * 32;
      for (int64_t d = 0; d < rows.value_size; d += 32, tiles += 2 * TILE_ELEMENTS) {
        __mmask32 mask = elements(a.value_size - d);
        __m512i x = _mm512_maskz_loadu_epi16(mask, keys.value[i] + 2 * d);
        __m512i y = _mm512_maskz_loadu_epi16(mask, keys.value[i + 1] + 2 * d);
        x = _mm512_permutexvar_epi64(order, x);
        y = _mm512_permutexvar_epi64(order, y);
        _mm512_store_si512(tiles, _mm512_unpacklo_epi16(x, y));
        _mm512_store_si512(tiles + TILE_ELEMENTS, _mm512_unpackhi_epi16(x, y));
      }
    }
  }
}

}  // namespace JB_ISA
}  // namespace jb
