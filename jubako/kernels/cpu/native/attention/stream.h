// How do a few rows attend to keys that are streamed from the pages once for all of them?
//
// Keys come in spans of 32 positions, counted from position 0, with an online softmax (Milakov and
// Gimelshein 2018, arXiv 1805.02867). Everything is summed in float32 in an order that depends on
// positions alone: a row has the same bits whether it is computed with others or by itself.
#pragma once

#include "loads.h"
#include "rows.h"

namespace jb {
namespace JB_ISA {

constexpr int64_t SPAN = 32;

// Rows and keys whose scores are in registers at a time, and registers of values of a row.
#if defined(__AVX512F__)
constexpr int MAX_ROWS = 4, KEYS = 4, VALUES = 4;
#elif defined(__aarch64__)
constexpr int MAX_ROWS = 2, KEYS = 2, VALUES = 4;
#elif defined(__AVX2__)
constexpr int MAX_ROWS = 2, KEYS = 2, VALUES = 4;
#else
constexpr int MAX_ROWS = 1, KEYS = 2, VALUES = 4;
#endif

// The sum of 16 lanes: lane i + 8 to lane i, then i + 4, i + 2, i + 1.
#if defined(__AVX512F__)
JB_INLINE void sum_keys(vec (*x)[PIECES], float* out) {
  __m512 a = (__m512)x[0][0], b = (__m512)x[1][0], c = (__m512)x[2][0], d = (__m512)x[3][0];
  __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
  __m512i pick = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(pick, s)));
}
#else
typedef float f32x4 __attribute__((vector_size(16)));

JB_INLINE void sum_keys(vec (*x)[PIECES], float* out) {
  for (int i = 0; i < KEYS; ++i) {
#if defined(__AVX2__)
    vec s8 = x[i][0] + x[i][1];
    f32x4 s = (f32x4)_mm_add_ps(_mm256_castps256_ps128((__m256)s8),
                                _mm256_extractf128_ps((__m256)s8, 1));
#else
    f32x4 s = (x[i][0] + x[i][2]) + (x[i][1] + x[i][3]);
#endif
    out[i] = (s[0] + s[2]) + (s[1] + s[3]);
  }
}
#endif

// Scores of R rows with the keys [first, end) of a span. `keys` may be read up to KEYS - 1 further.
template <class Load, int R>
static void score_rows(const float* q, int64_t q_size, int64_t size, const char* const* keys,
                       int64_t first, int64_t end, float* scores) {
  int64_t whole = size / 16 * 16, rest = size - whole;
  for (int64_t j = first; j < end; j += KEYS) {
    vec sum[R][KEYS][PIECES];
    for (int r = 0; r < R; ++r) {
      for (int c = 0; c < KEYS; ++c) {
        for (int i = 0; i < PIECES; ++i) sum[r][c][i] = set_vec(0);
      }
    }
    for (int64_t d = 0; d < whole; d += 16) {
      for (int i = 0; i < PIECES; ++i) {
        vec k[KEYS];
        for (int c = 0; c < KEYS; ++c) k[c] = Load::full(keys[j + c], d + i * LANES);
        for (int r = 0; r < R; ++r) {
          vec x = load_vec(q + r * q_size + d + i * LANES);
          for (int c = 0; c < KEYS; ++c) sum[r][c][i] = x * k[c] + sum[r][c][i];
        }
      }
    }
    if (rest) {
      for (int c = 0; c < KEYS; ++c) {
        vec k[PIECES];
        load_some<Load>(k, keys[j + c], whole, rest);
        for (int r = 0; r < R; ++r) {
          for (int i = 0; i < PIECES; ++i) {
            vec x = load_vec(q + r * q_size + whole + i * LANES);
            sum[r][c][i] = x * k[i] + sum[r][c][i];
          }
        }
      }
    }
    for (int r = 0; r < R; ++r) sum_keys(sum[r], scores + r * SPAN + j);
  }
}

// acc += weights · values for R rows, N registers from element d on, in order of the keys.
template <class Load, int R, int N>
JB_INLINE void add_values(float* acc, int64_t acc_size, const float* weights,
                          const char* const* values, int64_t first, int64_t end, int64_t d) {
  vec sum[R][N];
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < N; ++c) sum[r][c] = load_vec(acc + r * acc_size + d + LANES * c);
  }
  for (int64_t j = first; j < end; ++j) {
    vec v[N];
    for (int c = 0; c < N; ++c) v[c] = Load::full(values[j], d + LANES * c);
    for (int r = 0; r < R; ++r) {
      vec w = set_vec(weights[r * SPAN + j]);
      for (int c = 0; c < N; ++c) sum[r][c] = w * v[c] + sum[r][c];
    }
  }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < N; ++c) store_vec(acc + r * acc_size + d + LANES * c, sum[r][c]);
  }
}

template <class Load, int R>
static void value_rows(float* acc, int64_t acc_size, int64_t size, const float* weights,
                       const char* const* values, int64_t first, int64_t end) {
  int64_t d = 0;
  for (; d + LANES * VALUES <= size; d += LANES * VALUES) {
    add_values<Load, R, VALUES>(acc, acc_size, weights, values, first, end, d);
  }
  for (; d + LANES <= size; d += LANES) {
    add_values<Load, R, 1>(acc, acc_size, weights, values, first, end, d);
  }
  if (d == size) return;
  for (int64_t j = first; j < end; ++j) {
    vec v[PIECES];
    load_some<Load>(v, values[j], d, size - d);
    for (int r = 0; r < R; ++r) {
      float* to = acc + r * acc_size + d;
      store_vec(to, set_vec(weights[r * SPAN + j]) * v[0] + load_vec(to));
    }
  }
}

// The rows of one task, in a thread's scratch.
struct Rows {
  int64_t count;
  int64_t q_size, acc_size;
  float* q;       // [count, q_size], zeros beyond the head's size
  float* acc;     // [count, acc_size] of the part under way
  float* total;   // of the parts before it
  float* l;       // [count, 16] by lane, of the part under way
  float* scores;  // [count, SPAN], weights later
  const char** keys;    // [PART + 4] of the part under way
  const char** values;
  float* key_scales;    // [PART]
  float* value_scales;
  float m[STREAM_ROWS], total_m[STREAM_ROWS], total_l[STREAM_ROWS];
  int32_t begin[STREAM_ROWS], end[STREAM_ROWS];  // the keys that a row sees
};

static inline void place_rows(Rows& rows, const AttentionArgs& a, char* scratch) {
  rows.q_size = round_up(a.head_size, 16);
  rows.acc_size = round_up(a.value_size, 16);
  float* f = (float*)scratch;
  rows.q = f, f += STREAM_ROWS * rows.q_size;
  rows.acc = f, f += STREAM_ROWS * rows.acc_size;
  rows.total = f, f += STREAM_ROWS * rows.acc_size;
  rows.l = f, f += STREAM_ROWS * 16;
  rows.scores = f, f += STREAM_ROWS * SPAN;
  rows.keys = (const char**)f;
  rows.values = rows.keys + PART + 32;
  rows.key_scales = (float*)(rows.values + PART + 32);
  rows.value_scales = rows.key_scales + PART + 32;
}

static inline void load_rows(Rows& rows, const AttentionArgs& a, const Task& t) {
  const AttentionStep& step = *a.step;
  int64_t start = step.query_start_loc[t.req];
  int64_t seq_len = step.seq_lens[t.req];
  int64_t context = seq_len - (step.query_start_loc[t.req + 1] - start);
  int64_t group = a.num_heads / a.num_kv_heads;
  rows.count = t.num_queries * t.num_heads;
  int64_t r = 0;
  for (int64_t i = 0; i < t.num_queries; ++i) {
    int64_t token = start + t.first_query + i;
    KeyRange keys = visible_keys(a, token, context + t.first_query + i, seq_len);
    for (int64_t h = 0; h < t.num_heads; ++h, ++r) {
      int64_t head = t.kv_head * group + t.first_head + h;
      int64_t from = token * a.q_stride + head * a.head_size;
      float* to = rows.q + r * rows.q_size;
      for (int64_t d = 0; d < rows.q_size; d += 16) {
        int64_t n = a.head_size - d;
        f32x16 x;
        if (n < 16) {
          x = v_load_part(a.q, from + d, a.dtype, n);
        } else if (a.dtype == F16) {
          x = v_load_f16((const uint16_t*)a.q + from + d);
        } else {
          x = v_load_any(a.q, from + d, a.dtype);
        }
        v_store(to + d, x);
      }
      rows.begin[r] = keys.begin;
      rows.end[r] = keys.end;
      rows.total_m[r] = NOTHING;
      rows.total_l[r] = 0;
    }
  }
}

static inline float largest_lane(f32x16 v) {
#if defined(__AVX512F__)
  __m512 x = (__m512)v;
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0x4e));
  x = _mm512_max_ps(x, _mm512_shuffle_f32x4(x, x, 0xb1));
  x = _mm512_max_ps(x, _mm512_permute_ps(x, 0x4e));
  return _mm512_cvtss_f32(_mm512_max_ps(x, _mm512_permute_ps(x, 0xb1)));
#else
  return v_maximum(v);
#endif
}

// Scores to weights for one row of a span that begins at position `at`, with keys [first, end).
static inline void weigh_row(Rows& rows, const AttentionArgs& a, int64_t r, int64_t at,
                             int64_t first, int64_t end, bool scaled, const float* key_scales,
                             const float* value_scales) {
  float* s = rows.scores + r * SPAN;
  f32x16 x[2] = {v_load(s), v_load(s + 16)};
  const i32x16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  int64_t lo = rows.begin[r] - at, hi = rows.end[r] - at;
  if (lo < first) lo = first;
  if (hi > end) hi = end;
  bool cut = lo > 0 || hi < SPAN;
  for (int i = 0; i < 2; ++i) {
    if (scaled) x[i] *= v_load(key_scales + 16 * i);
    x[i] *= a.scale;
    if (a.soft_cap > 0) x[i] = v_tanh(x[i] / a.soft_cap) * a.soft_cap;
    if (cut) {
      i32x16 j = lane + 16 * i;
      x[i] = ((j >= (int32_t)lo) & (j < (int32_t)hi)) ? x[i] : v_set(NOTHING);
    }
  }
  float top = largest_lane(v_max(x[0], x[1]));
  float old = rows.m[r];
  if (!(top <= old)) {
    rows.m[r] = top;
    if (old != NOTHING) {
      float* acc = rows.acc + r * rows.acc_size;
      f32x16 f = v_exp(v_set(old - top));
      v_store(rows.l + 16 * r, v_load(rows.l + 16 * r) * f);
      for (int64_t d = 0; d < rows.acc_size; d += 16) v_store(acc + d, v_load(acc + d) * f);
    }
  } else {
    top = old;
  }
  if (top == NOTHING) {
    v_store(s, v_set(0));
    v_store(s + 16, v_set(0));
    return;
  }
  for (int i = 0; i < 2; ++i) x[i] = v_exp(x[i] - top);
  v_store(rows.l + 16 * r, v_load(rows.l + 16 * r) + x[0] + x[1]);
  for (int i = 0; i < 2; ++i) {
    if (scaled) x[i] *= v_load(value_scales + 16 * i);
    v_store(s + 16 * i, x[i]);
  }
}

// Addresses of the positions [begin, end), which lie in one part.
static inline void find_keys(Rows& rows, const AttentionArgs& a, const Task& t, int64_t begin,
                             int64_t end, bool scaled) {
  const int32_t* table = a.step->block_table + t.req * a.step->block_table_stride;
  const char* head = (const char*)a.pages + t.kv_head * a.head_stride;
  int64_t first = begin / PART * PART, column = begin / a.block_size;
  int64_t offset = begin - column * a.block_size;
  int64_t position = begin;
  while (position < end) {
    const char* slab = head + (int64_t)table[column] * a.block_stride;
    int64_t n = a.block_size - offset;
    if (n > end - position) n = end - position;
    const char* row = slab + offset * a.row_stride;
    for (int64_t i = 0; i < n; ++i, row += a.row_stride) {
      rows.keys[position - first + i] = row;
      rows.values[position - first + i] = row + a.value_offset;
    }
    if (scaled) {
      const char* scales = slab + a.scale_offset + offset * 4;
      memcpy(rows.key_scales + (position - first), scales, n * 4);
      memcpy(rows.value_scales + (position - first), scales + a.value_offset, n * 4);
    }
    position += n;
    ++column;
    offset = 0;
  }
  for (int i = 0; i < KEYS; ++i) rows.keys[end - first + i] = rows.keys[end - first - 1];
  // A span looks ahead to the next one's, for prefetching.
  for (int64_t i = end - first; i < PART + 32; ++i) {
    rows.values[i] = rows.values[end - first - 1];
    if (i >= end - first + KEYS) rows.keys[i] = rows.keys[end - first - 1];
  }
}

JB_INLINE void prefetch_row(const char* row, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) __builtin_prefetch(row + i, 0, 2);
}

template <class Load>
static void score_span(const Rows& rows, const AttentionArgs& a, const char* const* keys,
                       int64_t first, int64_t end) {
  int64_t r = 0;
  for (; r + MAX_ROWS <= rows.count; r += MAX_ROWS) {
    score_rows<Load, MAX_ROWS>(rows.q + r * rows.q_size, rows.q_size, a.head_size, keys, first,
                               end, rows.scores + r * SPAN);
  }
  const float* q = rows.q + r * rows.q_size;
  float* s = rows.scores + r * SPAN;
  switch (rows.count - r) {
    case 1: score_rows<Load, 1>(q, rows.q_size, a.head_size, keys, first, end, s); break;
    case 2: score_rows<Load, 2>(q, rows.q_size, a.head_size, keys, first, end, s); break;
    case 3: score_rows<Load, 3>(q, rows.q_size, a.head_size, keys, first, end, s); break;
  }
}

template <class Load>
static void value_span(const Rows& rows, const AttentionArgs& a, const char* const* values,
                       int64_t first, int64_t end) {
  int64_t r = 0;
  for (; r + MAX_ROWS <= rows.count; r += MAX_ROWS) {
    value_rows<Load, MAX_ROWS>(rows.acc + r * rows.acc_size, rows.acc_size, a.value_size,
                               rows.scores + r * SPAN, values, first, end);
  }
  float* acc = rows.acc + r * rows.acc_size;
  const float* w = rows.scores + r * SPAN;
  switch (rows.count - r) {
    case 1: value_rows<Load, 1>(acc, rows.acc_size, a.value_size, w, values, first, end); break;
    case 2: value_rows<Load, 2>(acc, rows.acc_size, a.value_size, w, values, first, end); break;
    case 3: value_rows<Load, 3>(acc, rows.acc_size, a.value_size, w, values, first, end); break;
  }
}

// Attend to the keys of one part: from nothing to m, l and acc.
template <class Load>
static void attend_part(Rows& rows, const AttentionArgs& a, const Task& t, int64_t part,
                        int64_t element_bytes) {
  for (int64_t r = 0; r < rows.count; ++r) {
    rows.m[r] = NOTHING;
    v_store(rows.l + 16 * r, v_set(0));
    float* acc = rows.acc + r * rows.acc_size;
    for (int64_t d = 0; d < rows.acc_size; d += 16) v_store(acc + d, v_set(0));
  }
  int64_t part_begin = part * PART, begin = part_begin + PART, end = part_begin;
  for (int64_t r = 0; r < rows.count; ++r) {
    if (rows.end[r] <= rows.begin[r]) continue;
    if (rows.begin[r] < begin) begin = rows.begin[r];
    if (rows.end[r] > end) end = rows.end[r];
  }
  if (begin < part_begin) begin = part_begin;
  if (end > part_begin + PART) end = part_begin + PART;
  if (begin >= end) return;
  find_keys(rows, a, t, begin, end, Load::SCALED);
  int64_t key_bytes = a.head_size * element_bytes, value_bytes = a.value_size * element_bytes;
  for (int64_t at = begin / SPAN * SPAN; at < end; at += SPAN) {
    int64_t first = begin > at ? begin - at : 0;
    int64_t last = end - at < SPAN ? end - at : SPAN;
    int64_t in_part = at - part_begin;
    // Memory is asked for a little at a time, as far ahead as a span.
    for (int64_t j = first; j < last; j += 4) {
      int64_t stop = j + 4 < last ? j + 4 : last;
      if (a.value_offset) {
        for (int64_t i = j; i < stop; ++i) prefetch_row(rows.values[in_part + i], value_bytes);
      }
      for (int64_t i = j; i < stop; ++i) prefetch_row(rows.keys[in_part + SPAN + i], key_bytes);
      score_span<Load>(rows, a, rows.keys + in_part, j, stop);
    }
    for (int64_t r = 0; r < rows.count; ++r) {
      weigh_row(rows, a, r, at, first, last, Load::SCALED, rows.key_scales + in_part,
                rows.value_scales + in_part);
    }
    value_span<Load>(rows, a, rows.values + in_part, first, last);
  }
}

template <class Load>
static void attend_streaming(Plan& plan, const Team& team, const AttentionArgs& a, const Task& t,
                             int64_t element_bytes) {
  Rows rows;
  place_rows(rows, a, plan.own());
  load_rows(rows, a, t);
  int64_t token = a.step->query_start_loc[t.req] + t.first_query;
  int64_t first_head = t.kv_head * (a.num_heads / a.num_kv_heads) + t.first_head;
  int64_t size = rows.acc_size;
  if (t.kept) {
    attend_part<Load>(rows, a, t, t.first_part, element_bytes);
    int64_t kept_size = kept_row_floats(a.value_size);
    float* kept = t.parts + (t.first_part - t.base_part) * t.part_floats;
    for (int64_t r = 0; r < rows.count; ++r, kept += kept_size) {
      for (int64_t d = 0; d < size; d += 16) v_store(kept + d, v_load(rows.acc + r * size + d));
      kept[size] = rows.m[r];
      kept[size + 1] = v_sum(v_load(rows.l + 16 * r));
    }
    if (!plan.last_part(team, t)) return;
    for (int64_t p = 0; p < t.total_parts; ++p) {
      const float* part = t.parts + p * t.part_floats;
      for (int64_t r = 0; r < rows.count; ++r, part += kept_size) {
        merge_row(&rows.total_m[r], &rows.total_l[r], rows.total + r * size, part[size],
                  part[size + 1], part, size);
      }
    }
  } else {
    for (int64_t p = t.first_part; p < t.first_part + t.num_parts; ++p) {
      attend_part<Load>(rows, a, t, p, element_bytes);
      for (int64_t r = 0; r < rows.count; ++r) {
        merge_row(&rows.total_m[r], &rows.total_l[r], rows.total + r * size, rows.m[r],
                  v_sum(v_load(rows.l + 16 * r)), rows.acc + r * size, size);
      }
    }
  }
  for (int64_t r = 0; r < rows.count; ++r) {
    int64_t head = first_head + r % t.num_heads;
    finish_row(a, token + r / t.num_heads, head, rows.total_m[r], rows.total_l[r],
               rows.total + r * size, sink_of(a, head));
  }
}

}  // namespace JB_ISA
}  // namespace jb
