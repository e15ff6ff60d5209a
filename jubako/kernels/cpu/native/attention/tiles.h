// How do many rows attend with products on tile registers (AMX)?
//
// Keys come in tiles of TILE_KEYS positions, counted from position 0. The tile's keys and values are
// laid out once as right operands and then serve all rows of the task, 32 at a time, with an online
// softmax in float32 and weights rounded to bfloat16. A row's result does not depend on which rows
// it is computed with.
#pragma once

#include "tile_layout.h"

namespace jb {
namespace JB_ISA {

// From how many rows on tiles are faster than streaming; 0: never.
static inline int64_t tile_rows_from(const AttentionArgs& a) {
  if (a.dtype != BF16 || a.head_size < 16) return 0;
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

// Rows of one block on their way from scores to weights, for the keys [first, last) of the tile at
// position `at`.
//
// Products on tile registers leave the vector units idle, and the other way round. So this work is
// cut into pieces, two a row, which are done between the steps of other blocks' products.
class Softmax {
 public:
  Softmax(TileRows& rows, const AttentionArgs& a, int64_t at) : rows_(rows), a_(a), at_(at) {}

  // To be done while products take `steps` steps.
  void begin(int64_t block, int64_t first, int64_t last, float* scores, int64_t steps) {
    row_ = base_ = block * BLOCK;
    end_ = row_ + BLOCK < rows_.count ? row_ + BLOCK : rows_.count;
    first_ = first, last_ = last;
    scores_ = scores;
    pieces_ = 2 * (end_ - row_);
    steps_ = steps > 0 ? steps : 1;
    due_ = 0;
  }

  // A step of products is under way.
  __attribute__((always_inline)) void advance() {
    due_ += pieces_;
    while (due_ >= steps_) {
      due_ -= steps_;
      piece();
    }
  }

  void finish() {
    while (row_ < end_) piece();
  }

 private:
  __attribute__((noinline)) void piece() {
    if (row_ >= end_) return;
    if (!found_) {
      find_top();
    } else {
      weigh();
      ++row_;
    }
    found_ = !found_;
  }

  float* scores() const { return scores_ + (row_ - base_) * SCORE_STRIDE; }

  void find_top() {
    float* s = scores();
    int64_t lo = rows_.begin[row_] - at_, hi = rows_.end[row_] - at_;
    if (lo < first_) lo = first_;
    if (hi > last_) hi = last_;
    if (lo >= hi) lo = hi = first_;
    begin_ = lo / 32 * 32, stop_ = round_up(hi, 32);
    if (begin_ == stop_) return;
    if (a_.soft_cap > 0) {
      float inner = a_.scale / a_.soft_cap, outer = a_.soft_cap * LOG2_E;
      for (int64_t j = begin_; j < stop_; j += 16) {
        v_store(s + j, v_tanh(v_load(s + j) * inner) * outer);
      }
    }
    if (lo > begin_ || hi < stop_) {
      hide_unseen(s, begin_, lo, hi);
      hide_unseen(s, begin_ + 16, lo, hi);
      hide_unseen(s, stop_ - 32, lo, hi);
      hide_unseen(s, stop_ - 16, lo, hi);
    }
    __m512 top0 = _mm512_set1_ps(NOTHING), top1 = top0;
    for (int64_t j = begin_; j < stop_; j += 32) {
      top0 = _mm512_max_ps(_mm512_loadu_ps(s + j), top0);
      top1 = _mm512_max_ps(_mm512_loadu_ps(s + j + 16), top1);
    }
    __m512 top = _mm512_mul_ps(max_of_lanes(_mm512_max_ps(top0, top1)), _mm512_set1_ps(unit()));
    float old = rows_.m[row_];
    if (_mm512_cvtss_f32(top) <= old) return;
    rows_.m[row_] = _mm512_cvtss_f32(top);
    if (old == NOTHING) return;
    __m512 f = exp2_negative(_mm512_sub_ps(_mm512_set1_ps(old), top));
    float* l = rows_.l + 16 * row_;
    _mm512_store_ps(l, _mm512_mul_ps(_mm512_load_ps(l), f));
    float* acc = rows_.acc + row_ * rows_.acc_stride;
    for (int64_t d = 0; d < rows_.value_size; d += 16) {
      _mm512_storeu_ps(acc + d, _mm512_mul_ps(_mm512_loadu_ps(acc + d), f));
    }
  }

  void weigh() {
    float* s = scores();
    uint16_t* w = (uint16_t*)s;
    float* l = rows_.l + 16 * row_;
    __m512 factor = _mm512_set1_ps(unit()), top = _mm512_set1_ps(rows_.m[row_]);
    __m512 sum0 = _mm512_load_ps(l), sum1 = _mm512_setzero_ps();
    // A weight is half as long as a score, so what is written has been read.
    for (int64_t j = first_; j < begin_; j += 32) _mm512_storeu_si512(w + j, __m512i{});
    for (int64_t j = begin_; j < stop_; j += 32) {
      __m512 x = exp2_negative(_mm512_fmsub_ps(_mm512_loadu_ps(s + j), factor, top));
      __m512 y = exp2_negative(_mm512_fmsub_ps(_mm512_loadu_ps(s + j + 16), factor, top));
      sum0 = _mm512_add_ps(sum0, x);
      sum1 = _mm512_add_ps(sum1, y);
      __m512bh both = _mm512_cvtne2ps_pbh(y, x);
      memcpy(w + j, &both, 64);
    }
    for (int64_t j = stop_; j < last_; j += 32) _mm512_storeu_si512(w + j, __m512i{});
    _mm512_store_ps(l, _mm512_add_ps(sum0, sum1));
  }

  // Scores are in powers of 2 from here on.
  float unit() const { return a_.soft_cap > 0 ? 1.0f : a_.scale * LOG2_E; }

  TileRows& rows_;
  const AttentionArgs& a_;
  int64_t at_;
  int64_t row_ = 0, base_ = 0, end_ = 0, first_ = 0, last_ = 0;
  float* scores_ = nullptr;
  int64_t pieces_ = 0, steps_ = 1, due_ = 0;
  bool found_ = false;              // whether the row's largest score is known
  int64_t begin_ = 0, stop_ = 0;    // the row's keys, to whole 32
};

// Scores of 32 rows with the keys [first, last) of the tile, multiples of BLOCK.
static inline void score_tiles(const TileRows& rows, const uint16_t* q, int64_t first, int64_t last,
                               float* scores, Softmax& meanwhile) {
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
      meanwhile.advance();
    }
    float* s = scores + j;
    _tile_stored(0, s, SCORE_STRIDE * 4);
    _tile_stored(1, s + 16, SCORE_STRIDE * 4);
    _tile_stored(2, s + TILE * SCORE_STRIDE, SCORE_STRIDE * 4);
    _tile_stored(3, s + TILE * SCORE_STRIDE + 16, SCORE_STRIDE * 4);
  }
}

// acc += weights · values for 32 rows and the keys [first, last) of the tile; `fresh`: acc is zero.
static inline void value_tiles(const TileRows& rows, const uint16_t* weights, float* acc,
                               int64_t first, int64_t last, bool fresh, Softmax& meanwhile) {
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
      _tile_loadd(4, weights + j, WEIGHT_STRIDE * 2);
      _tile_loadd(6, v, 64);
      _tile_dpbf16ps(0, 4, 6);
      _tile_loadd(7, v + TILE_ELEMENTS, 64);
      _tile_dpbf16ps(1, 4, 7);
      _tile_loadd(5, weights + TILE * WEIGHT_STRIDE + j, WEIGHT_STRIDE * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
      meanwhile.advance();
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

// A block of rows that sees some of a tile's keys, [first, last), whole 32.
struct Seeing {
  int64_t block, first, last;
};

template <class Load>
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
  int64_t key_steps = rows.q_size / 32, value_steps = rows.value_size / 32;
  for (int64_t at = all.begin / TILE_KEYS * TILE_KEYS; at < all.end; at += TILE_KEYS) {
    int64_t begin = all.begin > at ? all.begin : at;
    int64_t end = all.end < at + TILE_KEYS ? all.end : at + TILE_KEYS;
    lay_out<Load>(rows, a, t, at, begin, end);
    Seeing seeing[TILE_ROWS / BLOCK];
    int64_t count = 0;
    for (int64_t b = 0; b < rows.blocks; ++b) {
      int64_t first = blocks[b].begin > at ? (blocks[b].begin - at) / BLOCK * BLOCK : 0;
      int64_t last = round_up(blocks[b].end - at, BLOCK);
      if (last > TILE_KEYS) last = TILE_KEYS;
      if (first < last) seeing[count++] = {b, first, last};
    }
    // Three blocks are under way: scores of one, weights of the one before, values of the third.
    Softmax softmax(rows, a, at);
    for (int64_t i = 0; i < count + 2; ++i) {
      if (i >= 1 && i <= count) {
        const Seeing& s = seeing[i - 1];
        int64_t steps = 0;
        if (i < count) steps += (seeing[i].last - seeing[i].first) / BLOCK * key_steps;
        if (i >= 2) steps += (seeing[i - 2].last - seeing[i - 2].first) / BLOCK * value_steps;
        softmax.begin(s.block, s.first, s.last, rows.scores[(i - 1) % 2], steps);
      }
      if (i >= 2) {
        const Seeing& s = seeing[i - 2];
        value_tiles(rows, (const uint16_t*)rows.scores[i % 2], rows.acc + s.block * BLOCK * rows.acc_stride,
                    s.first, s.last, fresh[s.block], softmax);
        fresh[s.block] = false;
      }
      if (i < count) {
        const Seeing& s = seeing[i];
        score_tiles(rows, rows.q + s.block * BLOCK * rows.q_size, s.first, s.last,
                    rows.scores[i % 2], softmax);
      }
      softmax.finish();
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
