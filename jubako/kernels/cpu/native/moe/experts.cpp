// The answers of a mixture of experts, weighted and summed.
//
// Rows are sorted by expert. Threads share the panels of all experts that have rows, as many to each
// as make about the same work; a panel is multiplied with all rows of its expert. In float32 an
// answer does not depend on how many rows there are, and a row's answers are summed in order of the
// experts' numbers.

#include "../matmul/finish.h"
#include "../matmul/product.h"
#include "layout.h"

namespace jb {
namespace JB_ISA {
namespace {

struct Pairs {
  int32_t* starts;  // [experts + 1]: an expert's first pair
  int32_t* tokens;  // [pairs]: row and place among its experts, row · k + place
  int32_t* places;  // [rows, k]: a row's pairs, in order of the experts
  int64_t count;
};

void sort_pairs(const ExpertsArgs& a, int64_t first, const Pairs& pairs) {
  const int32_t* ids = a.ids + first * a.k;
  memset(pairs.starts, 0, 4 * (a.experts + 1));
  for (int64_t i = 0; i < pairs.count; ++i) ++pairs.starts[ids[i] + 1];
  for (int64_t e = 0; e < a.experts; ++e) pairs.starts[e + 1] += pairs.starts[e];
  int32_t next[MAX_EXPERTS];
  memcpy(next, pairs.starts, 4 * a.experts);
  for (int64_t i = 0; i < pairs.count; ++i) pairs.tokens[next[ids[i]]++] = (int32_t)i;
  // Pairs are in order of the experts, so each row meets its own in that order.
  int32_t met[EXPERT_ROWS] = {};
  for (int64_t p = 0; p < pairs.count; ++p) {
    const int64_t row = pairs.tokens[p] / a.k;
    pairs.places[row * a.k + met[row]++] = (int32_t)p;
  }
}

// x of each pair, in the order of the pairs.
void gather(Team& team, const ExpertsArgs& a, int64_t first, const Pairs& pairs, char* to, int64_t ld) {
  const int64_t hidden = a.up->k, element = dtype_size(a.x_dtype);
  Range own = team.range(pairs.count);
  for (int64_t p = own.begin; p < own.end; ++p) {
    const int64_t pair = pairs.tokens[p], row = first + pair / a.k;
    const char* from = (const char*)a.x + row * a.ldx * element;
    char* out = to + p * ld * element;
    if (!a.weigh_input) {
      memcpy(out, from, hidden * element);
      continue;
    }
    const float weight = a.weights[first * a.k + pair];
    int64_t i = 0;
    for (; i + 16 <= hidden; i += 16) {
      v_store_any(out, i, a.x_dtype, v_load_any(from, i, a.x_dtype) * weight);
    }
    if (i < hidden) {
      f32x16 v = v_load_part(from, i, a.x_dtype, hidden - i) * weight;
      v_store_part(out, i, a.x_dtype, v, hidden - i);
    }
  }
}

// The rows of one expert.
RowsOfX rows_of(const RowsOfX& x, int64_t start, int64_t count) {
  RowsOfX own = x;
  const int64_t element = x.form == FORM_F32 ? 4 : x.form == FORM_BF16 ? 2 : 1;
  own.rows = count;
#if defined(__AVX512VNNI__)
  if (x.form == FORM_GROUPS) {
    own.x = (const IntGroup*)x.x + start * x.ldx;
    return own;
  }
#endif
  own.x = (const char*)x.x + start * x.ldx * element;
  if (x.low) own.low = x.low + start * x.ldx;
  if (x.scales) own.scales = x.scales + start;
  if (x.sums) own.sums = x.sums + 2 * start;
  return own;
}

// A panel's weights are read once, and then multiplied with each row.
JB_INLINE int64_t panel_cost(int64_t rows) { return 32 + rows; }

JB_INLINE int64_t pieces_before(int64_t work, int64_t cost, int64_t most) {
  if (work <= 0) return 0;
  const int64_t pieces = (work + cost - 1) / cost;
  return pieces < most ? pieces : most;
}

// Products of all pairs with their experts' matrices. `finish(expert, panel, first, rows, c)` takes
// the results of pairs first .. first + rows with a panel, c [rows][32].
template <typename Finish>
void products(Team& team, const ExpertsArgs& a, const Matrix* w, const Pairs& pairs, const XRef& ref,
              Finish finish) {
  RowsOfX x;
  prepare_rows(team, ref, product_form(w->kind, a.x_dtype, pairs.count), &x);
  char* buffer = thread_scratch(ref, team);
  const int64_t panels = matrix_panels(w);
  int64_t work = 0;
  for (int64_t e = 0; e < a.experts; ++e) {
    const int64_t rows = pairs.starts[e + 1] - pairs.starts[e];
    if (rows) work += panels * panel_cost(rows);
  }
  const int64_t from = work * team.rank / team.size, to = work * (team.rank + 1) / team.size;
  alignas(64) float c[GROUP * PANEL];
  int64_t before = 0;
  for (int64_t e = 0; e < a.experts && before < to; ++e) {
    const int64_t start = pairs.starts[e], rows = pairs.starts[e + 1] - start;
    if (!rows) continue;
    const int64_t cost = panel_cost(rows);
    const int64_t begin = pieces_before(from - before, cost, panels);
    const int64_t end = pieces_before(to - before, cost, panels);
    before += panels * cost;
    if (begin >= end) continue;
    RowsOfX own = rows_of(x, start, rows);
    product_begin(rows);
    for (int64_t panel = begin; panel < end; ++panel) {
      const char* opened = open_panel(own, w + e, panel, buffer);
      for (int64_t first = 0; first < rows;) {
        RowGroup group = row_group(rows, first, rows);
        const int64_t wanted = group.count - group.skip;
        const bool next = first + wanted >= rows && panel + 1 < end;
        product_rows(own, w + e, panel, opened, group.start, group.count, c, next);
        finish(e, panel, start + first, wanted, c + group.skip * PANEL);
        first += wanted;
      }
    }
  }
  product_end();
}

f32x16 gated(const ExpertsArgs& a, f32x16 gate, f32x16 up) {
  switch (a.activation) {
    case EXPERT_GELU_TANH: return v_gelu_tanh(gate) * up;
    case EXPERT_GELU: return v_gelu(gate) * up;
    case EXPERT_CLAMPED_SWIGLU:
      gate = v_min(gate, v_set(a.limit));
      up = v_max(v_min(up, v_set(a.limit)), v_set(-a.limit));
      return gate * v_sigmoid(gate * a.alpha) * (up + 1.0f);
    default: return v_silu(gate) * up;
  }
}

f32x16 plain(const ExpertsArgs& a, f32x16 x) {
  switch (a.activation) {
    case EXPERT_GELU_TANH: return v_gelu_tanh(x);
    case EXPERT_GELU: return v_gelu(x);
    case EXPERT_RELU_SQUARED: x = v_max(x, v_set(0)); return x * x;
    default: return v_silu(x);
  }
}

void write_16(void* y, int64_t at, int32_t dtype, f32x16 value, int64_t count) {
  if (dtype == F32) {
    write_part<false, F32>(y, at, value, count);
  } else {
    write_part<false, BF16>(y, at, value, count);
  }
}

// What lies between the matrices, from a panel's sums.
void finish_up(const ExpertsArgs& a, int64_t expert, int64_t panel, int64_t first, int64_t rows,
               const float* c, void* inner, int64_t ld) {
  const Matrix* w = a.up + expert;
  const float* bias = a.up_bias ? a.up_bias + expert * w->n : nullptr;
  const bool has_gate = w->interleaved;
  const int64_t size = has_gate ? w->n / 2 : w->n, at = panel * (has_gate ? TILE : PANEL);
  const int64_t count = size - at;
  const f32x16 shift0 = bias_of(bias, at, count);
  const f32x16 shift1 = has_gate ? bias_of(bias, size + at, count) : bias_of(bias, at + TILE, count - TILE);
  for (int64_t r = 0; r < rows; ++r) {
    const f32x16 v0 = v_load(c + r * PANEL) + shift0, v1 = v_load(c + r * PANEL + TILE) + shift1;
    const int64_t to = (first + r) * ld + at;
    if (has_gate) {
      write_16(inner, to, a.x_dtype, gated(a, v0, v1), count);
    } else {
      write_16(inner, to, a.x_dtype, plain(a, v0), count);
      write_16(inner, to + TILE, a.x_dtype, plain(a, v1), count - TILE);
    }
  }
}

void finish_down(const ExpertsArgs& a, int64_t expert, int64_t panel, int64_t first, int64_t rows,
                 const float* c, float* answers, int64_t ld) {
  const int64_t hidden = a.down->n, at = panel * PANEL, count = hidden - at;
  const float* bias = a.down_bias ? a.down_bias + expert * hidden : nullptr;
  const f32x16 shift0 = bias_of(bias, at, count), shift1 = bias_of(bias, at + TILE, count - TILE);
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t to = (first + r) * ld + at;
    write_16(answers, to, F32, v_load(c + r * PANEL) + shift0, count);
    write_16(answers, to + TILE, F32, v_load(c + r * PANEL + TILE) + shift1, count - TILE);
  }
}

// Each row's answers into y.
void combine(Team& team, const ExpertsArgs& a, int64_t first, int64_t rows, const Pairs& pairs,
             const float* answers, int64_t ld) {
  constexpr int64_t PIECE = 256;
  const int64_t hidden = a.down->n, pieces = (hidden + PIECE - 1) / PIECE;
  Range own = team.range(rows * pieces);
  for (int64_t item = own.begin; item < own.end; ++item) {
    const int64_t row = item / pieces, begin = item % pieces * PIECE;
    const int64_t end = begin + PIECE < hidden ? begin + PIECE : hidden;
    const int32_t* places = pairs.places + row * a.k;
    const int64_t to = (first + row) * a.ldy;
    for (int64_t i = begin; i < end; i += TILE) {
      const int64_t count = end - i < TILE ? end - i : TILE;
      f32x16 sum = v_set(0);
      for (int64_t j = 0; j < a.k; ++j) {
        // Rows of answers are padded.
        const f32x16 answer = v_load(answers + places[j] * ld + i);
        const float weight = a.weights[first * a.k + pairs.tokens[places[j]]];
        sum += a.weigh_input ? answer : answer * weight;
      }
      if (a.add) {
        write_part<true, F32>(a.y, to + i, sum, count);
      } else {
        write_16(a.y, to + i, a.y_dtype, sum, count);
      }
    }
  }
}

}  // namespace

void experts(Team& team, const void* args) {
  const ExpertsArgs& a = *(const ExpertsArgs*)args;
  const int64_t hidden = a.up->k, size = a.down->k, element = dtype_size(a.x_dtype);
  char* scratch = (char*)a.scratch;
  for (int64_t first = 0; first < *a.rows; first += EXPERT_ROWS) {
    const int64_t left = *a.rows - first, rows = left < EXPERT_ROWS ? left : EXPERT_ROWS;
    const ExpertsLayout l = experts_layout(team.size, rows, a.experts, a.k, hidden, size, element);
    Pairs pairs{(int32_t*)(scratch + l.starts), (int32_t*)(scratch + l.tokens),
                (int32_t*)(scratch + l.places), rows * a.k};
    void* inner = scratch + l.inner;
    float* answers = (float*)(scratch + l.answers);
    if (team.rank == 0) sort_pairs(a, first, pairs);
    team.barrier();
    gather(team, a, first, pairs, scratch + l.x, l.ld_x);
    team.barrier();
    const int64_t work_bytes = l.bytes - l.products;
    XRef x{scratch + l.x, l.ld_x, a.x_dtype, a.activation_bits, pairs.count, hidden, scratch + l.products,
           work_bytes};
    products(team, a, a.up, pairs, x, [&](int64_t e, int64_t panel, int64_t at, int64_t n, const float* c) {
      finish_up(a, e, panel, at, n, c, inner, l.ld_inner);
    });
    team.barrier();
    XRef y{inner, l.ld_inner, a.x_dtype, a.activation_bits, pairs.count, size, scratch + l.products,
           work_bytes};
    products(team, a, a.down, pairs, y, [&](int64_t e, int64_t panel, int64_t at, int64_t n, const float* c) {
      finish_down(a, e, panel, at, n, c, answers, l.ld_answer);
    });
    team.barrier();
    combine(team, a, first, rows, pairs, answers, l.ld_answer);
    if (rows < left) team.barrier();
  }
}

}  // namespace JB_ISA
}  // namespace jb
