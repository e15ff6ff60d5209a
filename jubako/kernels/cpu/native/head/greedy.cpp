// The best token of each row, without writing logits.
//
// Each thread goes through its panels of the vocabulary and keeps, for each row and lane, the best
// so far; lanes and threads are merged at the end. The lowest id wins among equals: a lane sees its
// ids in ascending order and keeps the first, and the merges compare ids.
//
// A soft cap comes after the rounding, in float32, and grows with the logit: the largest rounded logit
// is the largest capped one, and equals stay equals. Only beyond eight times the cap, where it is flat,
// would different logits become equals.

#include "../matmul/pipeline_amx.h"
#include "../matmul/product.h"
#include "args.h"

namespace jb {
namespace JB_ISA {
namespace {

// Of one row: in each of 32 lanes the best value and the panel that it is in.
struct alignas(64) Best {
  float value[PANEL];
  int32_t panel[PANEL];
};

struct Winner {
  float value;
  int32_t unused;
  int64_t id;
};

JB_INLINE f32x16 round_to(f32x16 v, int32_t dtype) {
  if (dtype != BF16) return v;
  uint16_t h[16];
  v_store_bf16(h, v);
  return v_load_bf16(h);
}

JB_INLINE bool better(float value, int64_t id, const Winner& than) {
  return value > than.value || (value == than.value && id < than.id);
}

// What goes for a panel's logits.
struct Logits {
  f32x16 shift[2];
  i32x16 number;  // the panel's
  int64_t valid;  // outputs from here on
};

JB_INLINE Logits logits_of(const HeadGreedyArgs* a, int64_t panel) {
  Logits l{{v_set(0), v_set(0)}, v_seti((int32_t)panel), a->w->n - panel * PANEL};
  for (int t = 0; t < 2 && a->bias; ++t) {
    const int64_t at = panel * PANEL + TILE * t, count = l.valid - TILE * t;
    if (count > 0) {
      l.shift[t] = count >= TILE ? v_load(a->bias + at) : v_load_part(a->bias, at, F32, count);
    }
  }
  return l;
}

// A tile's logits of a row. Looking at a row twice changes nothing.
JB_INLINE void consider(const Logits& l, int t, f32x16 value, int32_t round_dtype, Best* best) {
  value = round_to(value + l.shift[t], round_dtype);
  for (int64_t j = l.valid - TILE * t; j < TILE; ++j) {
    if (j >= 0) ((float*)&value)[j] = -__builtin_inff();
  }
  const f32x16 before = v_load(best->value + TILE * t);
  i32x16 panel;
  memcpy(&panel, best->panel + TILE * t, 64);
  const i32x16 wins = value > before;
  v_store(best->value + TILE * t, wins ? value : before);
  panel = wins ? l.number : panel;
  memcpy(best->panel + TILE * t, &panel, 64);
}

#if JB_AMX

template <bool PAIRS>
struct BestSink {
  const HeadGreedyArgs* a;
  const RowsOfX* x;
  Best* best;
  Logits logits[2];
  SumScales<PAIRS> scales[2];

  JB_INLINE_MEMBER void open(int64_t panel, int64_t which) {
    logits[which] = logits_of(a, panel);
    scales[which].open(a->w, panel);
  }
  JB_INLINE_MEMBER void fetch(int64_t, int64_t) const {}
  JB_INLINE_MEMBER void row(int64_t which, int64_t r, const float* c) const {
    for (int t = 0; t < 2; ++t) {
      consider(logits[which], t, scales[which].value(*x, r, c, t), a->round_dtype, best + r);
    }
  }
};

#endif

// The best of each row among the panels of `own`.
void find(const HeadGreedyArgs* a, const RowsOfX& x, Range own, char* buffer, Best* best) {
#if JB_AMX
  if (tiles_serve(x, a->w)) {
    if (x.form == FORM_INT8) {
      BestSink<false> sink{a, &x, best};
      run_tiles<false>(x, a->w, own, buffer, sink);
    } else {
      BestSink<true> sink{a, &x, best};
      run_tiles<true>(x, a->w, own, buffer, sink);
    }
    return;
  }
#endif
  alignas(64) float c[GROUP * PANEL];
  for (int64_t panel = own.begin; panel < own.end; ++panel) {
    const char* opened = open_panel(x, a->w, panel, buffer);
    const Logits logits = logits_of(a, panel);
    for (int64_t first = 0; first < x.rows;) {
      const RowGroup group = row_group(x.rows, first, x.rows);
      first += group.count - group.skip;
      const bool more = first >= x.rows && panel + 1 < own.end;
      product_rows(x, a->w, panel, opened, group.start, group.count, c, more);
      if (more) fetch_ahead(panel_start(a->w, panel + 1), group.count);
      for (int64_t r = 0; r < group.count; ++r) {
        for (int t = 0; t < 2; ++t) {
          consider(logits, t, v_load(c + r * PANEL + TILE * t), a->round_dtype, best + group.start + r);
        }
      }
    }
  }
}

void greedy(Team& team, const void* args) {
  const HeadGreedyArgs* a = (const HeadGreedyArgs*)args;
  const int64_t rows = *a->rows;
  if (rows <= 0) return;
  const Matrix* w = a->w;
  XRef ref{a->x, a->ldx, a->x_dtype, a->activation_bits, rows, w->k, (char*)a->scratch, 0};
  // After the product's scratch: winners of all threads, then each thread's lanes.
  ref.scratch_bytes = matmul_scratch_bytes(team.size, rows, w->k);
  Winner* winners = (Winner*)(ref.scratch + ref.scratch_bytes);
  Best* best = (Best*)((char*)winners + round_up(team.size * rows * (int64_t)sizeof(Winner), 64)) +
               team.rank * rows;
  char* buffer = thread_scratch(ref, team);
  const int32_t form = product_form(w->kind, a->x_dtype, rows);
  RowsOfX x;
  prepare_rows(team, ref, form, &x);
  const f32x16 none = v_set(-__builtin_inff());
  for (int64_t r = 0; r < rows; ++r) {
    for (int t = 0; t < 2; ++t) {
      v_store(best[r].value + TILE * t, none);
      memset(best[r].panel + TILE * t, 0xff, 64);
    }
  }
  product_begin(rows);
  find(a, x, team.range(matrix_panels(w)), buffer, best);
  product_end();
  for (int64_t r = 0; r < rows; ++r) {
    Winner winner{-__builtin_inff(), 0, INT64_MAX};
    for (int lane = 0; lane < PANEL; ++lane) {
      if (best[r].panel[lane] < 0) continue;
      int64_t id = (int64_t)best[r].panel[lane] * PANEL + lane;
      if (better(best[r].value[lane], id, winner)) winner = {best[r].value[lane], 0, id};
    }
    winners[team.rank * rows + r] = winner;
  }
  team.barrier();
  Range merge = team.range(rows);
  for (int64_t r = merge.begin; r < merge.end; ++r) {
    Winner winner = winners[r];
    for (int other = 1; other < team.size; ++other) {
      const Winner& o = winners[other * rows + r];
      if (better(o.value, o.id, winner)) winner = o;
    }
    a->ids[r] = winner.id == INT64_MAX ? -1 : winner.id;
    if (a->values) a->values[r] = winner.value;
  }
}

}  // namespace

void candidates(Team& team, const void* args);

void fill_head(OpTable& table) {
  table.fn[OP_HEAD_GREEDY] = greedy;
  table.fn[OP_HEAD_CANDIDATES] = candidates;
}

}  // namespace JB_ISA
}  // namespace jb
