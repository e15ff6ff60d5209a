// The best token of each row, without writing logits.
//
// Each thread goes through its panels of the vocabulary and keeps, for each row and lane, the best
// so far; lanes and threads are merged at the end. The lowest id wins among equals: a lane sees its
// ids in ascending order and keeps the first, and the merges compare ids.

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
  alignas(64) float c[GROUP * PANEL];
  product_begin(rows);
  Range own = team.range(matrix_panels(w));
  for (int64_t panel = own.begin; panel < own.end; ++panel) {
    const char* opened = open_panel(x, w, panel, buffer);
    for (int64_t first = 0; first < rows;) {
      // Where groups overlap, looking at a row twice changes nothing.
      const RowGroup group = row_group(rows, first, rows);
      first += group.count - group.skip;
      const bool more = first >= rows && panel + 1 < own.end;
      product_rows(x, w, panel, opened, group.start, group.count, c, more);
      if (more) fetch_ahead(panel_start(w, panel + 1), group.count);
      for (int t = 0; t < 2; ++t) {
        int64_t id = panel * PANEL + TILE * t, valid = w->n - id;
        if (valid <= 0) break;
        f32x16 shift = v_set(0);
        if (a->bias) shift = valid >= TILE ? v_load(a->bias + id) : v_load_part(a->bias, id, F32, valid);
        for (int64_t r = 0; r < group.count; ++r) {
          f32x16 value = v_load(c + r * PANEL + TILE * t);
          if (a->bias) value += shift;
          value = round_to(value, a->round_dtype);
          if (valid < TILE) {
            for (int64_t j = valid; j < TILE; ++j) ((float*)&value)[j] = -__builtin_inff();
          }
          Best* row = best + group.start + r;
          f32x16 before = v_load(row->value + TILE * t);
          i32x16 old;
          memcpy(&old, row->panel + TILE * t, 64);
          i32x16 wins = value > before;
          v_store(row->value + TILE * t, wins ? value : before);
          old = wins ? v_seti((int32_t)panel) : old;
          memcpy(row->panel + TILE * t, &old, 64);
        }
      }
    }
  }
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
    // A row of nothing but NaN or minus infinity has no best: its first.
    a->ids[r] = winner.id == INT64_MAX ? 0 : winner.id;
    if (a->values) a->values[r] = winner.value;
  }
}

}  // namespace

void fill_head(OpTable& table) { table.fn[OP_HEAD_GREEDY] = greedy; }

}  // namespace JB_ISA
}  // namespace jb
