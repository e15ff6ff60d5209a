// The tokens among which a row's choice lies, without writing logits.
//
// Each thread goes through its panels of the vocabulary. For each row it keeps the tokens that reach
// a floor, which rises to the count-th best so far whenever the room is used up: after a few panels
// nearly every tile is done with one comparison. For a draw from the whole vocabulary it keeps those
// whose noisy logit may be the largest. A NaN is never below anything, so it is found as well.
//
// Which token wins is not decided here, but by the one definition that there is: the sampler's, on
// these candidates.

#include <cfloat>
#include <cmath>

#include "../matmul/product.h"
#include "args.h"

namespace jb {
namespace JB_ISA {
namespace {

struct Candidate {
  float value;
  int32_t id;
};

// The sum of exp(v - reference) of the logits so far: lanes for the latest tiles, a double for all
// before.
struct Sum {
  f32x16 lanes;
  double before;
  float reference;
  int32_t tiles;
};

// What a thread knows of a row.
struct alignas(64) State {
  Sum sums[2];
  float floor;      // what is below is out
  int32_t found;    // or HEAD_TOO_MANY, HEAD_NOT_NUMBERS
  double best;      // the best noisy logit
};
static_assert(sizeof(State) <= HEAD_ROW_BYTES, "args.h gives room");

constexpr int32_t FLUSH = 64;

// Two logits that a division by the temperature could make equal differ by less than this part.
constexpr float MERGED = 2.4e-7f;

// Noisy logits of this difference are told apart by the sampler.
constexpr double UNDECIDED = 1e-6;

// No noise is larger.
constexpr float MOST_NOISE = 23.0f;

// Bit j: lane j is true.
JB_INLINE uint32_t bits_of(i32x16 lanes) {
#if defined(__AVX512F__)
  return _mm512_movepi32_mask((__m512i)lanes);
#else
  uint32_t bits = 0;
  for (int j = 0; j < 16; ++j) bits |= (uint32_t)(lanes[j] & 1) << j;
  return bits;
#endif
}

// Lanes whose bit is not set become minus infinity.
JB_INLINE f32x16 only(f32x16 value, uint32_t bits) {
  const i32x16 own = {1,      1 << 1, 1 << 2,  1 << 3,  1 << 4,  1 << 5,  1 << 6,  1 << 7,
                      1 << 8, 1 << 9, 1 << 10, 1 << 11, 1 << 12, 1 << 13, 1 << 14, 1 << 15};
  const i32x16 kept = (own & (int32_t)bits) != 0;
  return kept ? value : v_set(-__builtin_inff());
}

// The count-th largest of values[n], which are rearranged.
float select_largest(float* values, int32_t n, int32_t count) {
  int32_t begin = 0, end = n, wanted = count - 1;
  while (end - begin > 1) {
    float pivot = values[begin + (end - begin) / 2];
    int32_t i = begin, j = end - 1;
    while (i <= j) {
      while (values[i] > pivot) ++i;
      while (values[j] < pivot) --j;
      if (i > j) break;
      float other = values[i];
      values[i++] = values[j];
      values[j--] = other;
    }
    if (wanted <= j) {
      end = j + 1;
    } else if (wanted >= i) {
      begin = i;
    } else {
      return pivot;
    }
  }
  return values[wanted];
}

// Keep only what the count-th best leaves, and let that be the floor.
void compact(State* state, Candidate* list, int32_t count) {
  if (state->found < count) return;
  float values[HEAD_CAPACITY];
  for (int32_t i = 0; i < state->found; ++i) values[i] = list[i].value;
  float least = select_largest(values, state->found, count);
  float margin = (least < 0 ? -least : least) * MERGED;
  float floor = least - margin;
  state->floor = floor < -FLT_MAX ? -FLT_MAX : floor;
  int32_t kept = 0;
  for (int32_t i = 0; i < state->found; ++i) {
    if (list[i].value >= state->floor) list[kept++] = list[i];
  }
  state->found = kept;
}

JB_INLINE void give_up(State* state, int32_t why) {
  state->found = why;
  state->floor = __builtin_inff();
}

JB_INLINE void keep(State* state, Candidate* list, Candidate one, int32_t count) {
  if (state->found == HEAD_CAPACITY) {
    compact(state, list, count);
    if (state->found > HEAD_CAPACITY - HEAD_CAPACITY / 8) return give_up(state, HEAD_TOO_MANY);
    if (one.value < state->floor) return;
  }
  list[state->found++] = one;
}

void take_best(State* state, Candidate* list, f32x16 value, int64_t id, int32_t count) {
  uint32_t hits = bits_of(~(value < v_set(state->floor)));
  for (; hits; hits &= hits - 1) {
    int lane = __builtin_ctz(hits);
    if (value[lane] != value[lane]) return give_up(state, HEAD_NOT_NUMBERS);
    if (state->found < 0) return;
    if (!(value[lane] < state->floor)) {
      keep(state, list, {value[lane], (int32_t)id + lane}, count);
    }
  }
}

JB_INLINE u32x16 noise_bits(const uint32_t* key, int64_t id) {
  const i32x16 lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  u32x16 x = (u32x16)(lanes + (int32_t)id) ^ key[0];
  x = (x ^ x >> 16) * 0x21f0aaadu ^ key[1];
  x = (x ^ x >> 15) * 0xd35a2d97u ^ key[2];
  return x ^ x >> 15;
}

double gumbel(uint32_t bits) {
  double uniform = (bits + 0.5) * 0x1p-32;
  if (uniform > 1 - 0x1p-24) uniform = 1 - 0x1p-24;
  return -log(-log1p(-uniform));
}

// With s a noisy logit, a token can have a larger one only if its uniform number is at most
// exp(logit - s).
void take_possible(State* state, Candidate* list, f32x16 value, int64_t id, const HeadRow* row) {
  f32x16 scaled = value / row->temperature;
  if (!bits_of(~(scaled < v_set(state->floor - MOST_NOISE)))) return;
  u32x16 bits = noise_bits(row->key, id);
  f32x16 chance = v_exp(scaled - state->floor) * (1.001f * 0x1p32f) + (1024 - 0x1p31f);
  f32x16 uniform = __builtin_convertvector((i32x16)(bits ^ 0x80000000u), f32x16);
  uint32_t hits = bits_of(~(uniform > chance));
  for (; hits; hits &= hits - 1) {
    int lane = __builtin_ctz(hits);
    if (value[lane] != value[lane]) return give_up(state, HEAD_NOT_NUMBERS);
    if (state->found < 0 || !(value[lane] >= -FLT_MAX)) continue;
    double score = (double)scaled[lane] + gumbel(bits[lane]);
    if (score < state->best - UNDECIDED) continue;
    if (score > state->best + UNDECIDED) state->found = 0;
    if (state->found == HEAD_CAPACITY) return give_up(state, HEAD_TOO_MANY);
    list[state->found++] = {value[lane], (int32_t)id + lane};
    if (score > state->best) {
      state->best = score;
      state->floor = (float)(score - UNDECIDED * (score < 0 ? 1 - score : 1 + score));
    }
  }
}

JB_INLINE void flush(Sum* sum) {
  sum->before += v_sum(sum->lanes);
  sum->lanes = v_set(0);
  sum->tiles = 0;
}

void add_to(Sum* sum, f32x16 value) {
  if (bits_of(value > v_set(sum->reference))) {
    flush(sum);
    float reference = sum->reference;
    for (int j = 0; j < 16; ++j) reference = value[j] > reference ? value[j] : reference;
    if (sum->before > 0) sum->before *= exp((double)sum->reference - reference);
    sum->reference = reference;
  }
  // Nothing but minus infinity so far: no sum.
  if (sum->reference == -__builtin_inff()) return;
  sum->lanes += v_exp(value - sum->reference);
  if (++sum->tiles == FLUSH) flush(sum);
}

double log_of(State* const* states, int32_t threads, int which) {
  float reference = -__builtin_inff();
  for (int32_t t = 0; t < threads; ++t) {
    float own = states[t]->sums[which].reference;
    reference = own > reference ? own : reference;
  }
  double total = 0;
  for (int32_t t = 0; t < threads; ++t) {
    Sum* sum = &states[t]->sums[which];
    flush(sum);
    if (sum->before != 0) total += sum->before * exp((double)sum->reference - reference);
  }
  return reference + log(total);
}

}  // namespace

void candidates(Team& team, const void* args) {
  const HeadCandidatesArgs* a = (const HeadCandidatesArgs*)args;
  const int64_t rows = *a->rows;
  if (rows <= 0) return;
  const Matrix* w = a->w;
  XRef ref{a->x, a->ldx, a->x_dtype, a->activation_bits, rows, w->k, (char*)a->scratch, 0};
  // After the product's scratch: all threads' states, then all threads' lists.
  ref.scratch_bytes = matmul_scratch_bytes(team.size, rows, w->k);
  State* all = (State*)round_up((int64_t)(ref.scratch + ref.scratch_bytes), 64);
  Candidate* lists = (Candidate*)(all + team.size * rows);
  State* states = all + team.rank * rows;
  Candidate* own_lists = lists + team.rank * rows * HEAD_CAPACITY;
  char* buffer = thread_scratch(ref, team);
  const int32_t form = product_form(w->kind, a->x_dtype, rows);
  RowsOfX x;
  prepare_rows(team, ref, form, &x);
  const Sum none{v_set(0), 0, -__builtin_inff(), 0};
  for (int64_t r = 0; r < rows; ++r) {
    const bool draws = a->wanted[r].flags & HEAD_DRAW;
    states[r] = State{{none, none}, draws ? -1e30f : -FLT_MAX, 0, -DBL_MAX};
  }
  alignas(64) float c[GROUP * PANEL];
  product_begin(rows);
  Range own = team.range(matrix_panels(w));
  for (int64_t panel = own.begin; panel < own.end; ++panel) {
    const char* opened = open_panel(x, w, panel, buffer);
    for (int64_t first = 0; first < rows;) {
      const RowGroup group = row_group(rows, first, rows);
      const int64_t wanted = group.count - group.skip;
      const bool more = first + wanted >= rows && panel + 1 < own.end;
      product_rows(x, w, panel, opened, group.start, group.count, c, more);
      if (more) fetch_ahead(panel_start(w, panel + 1), group.count);
      for (int t = 0; t < 2; ++t) {
        int64_t id = panel * PANEL + TILE * t, valid = w->n - id;
        if (valid <= 0) break;
        f32x16 shift = v_set(0);
        if (a->bias) shift = valid >= TILE ? v_load(a->bias + id) : v_load_part(a->bias, id, F32, valid);
        for (int64_t r = 0; r < wanted; ++r) {
          const uint32_t* mask = a->allowed ? a->allowed[first + r] : nullptr;
          const uint32_t allowed = mask ? mask[id / 32] >> id % 32 & 0xffff : 0xffff;
          if (!allowed) continue;
          f32x16 value = v_load(c + (group.skip + r) * PANEL + TILE * t);
          if (a->bias) value += shift;
          if (a->round_dtype == BF16) {
            uint16_t h[16];
            v_store_bf16(h, value);
            value = v_load_bf16(h);
          }
          for (int64_t j = valid; j < TILE; ++j) value[j] = -__builtin_inff();
          if (allowed != 0xffff) value = only(value, allowed);
          const HeadRow* row = a->wanted + first + r;
          State* state = states + first + r;
          Candidate* list = own_lists + (first + r) * HEAD_CAPACITY;
          if (row->flags & HEAD_DRAW) {
            take_possible(state, list, value, id, row);
          } else {
            take_best(state, list, value, id, row->count);
          }
          if (row->flags & HEAD_SUM) add_to(&state->sums[0], value);
          if (row->flags & HEAD_SUM_SCALED) add_to(&state->sums[1], value / row->temperature);
        }
      }
      first += wanted;
    }
  }
  product_end();
  team.barrier();
  Range merge = team.range(rows);
  for (int64_t r = merge.begin; r < merge.end; ++r) {
    const HeadRow* row = a->wanted + r;
    State* state = all + r;
    Candidate* list = lists + r * HEAD_CAPACITY;
    for (int32_t which = 0; which < 2; ++which) {
      if (!(row->flags & (which ? HEAD_SUM_SCALED : HEAD_SUM))) continue;
      State* of_threads[team.size];
      for (int t = 0; t < team.size; ++t) of_threads[t] = all + t * rows + r;
      a->sums[2 * r + which] = log_of(of_threads, team.size, which);
    }
    for (int t = 1; t < team.size; ++t) {
      const State* other = all + t * rows + r;
      const Candidate* others = lists + (t * rows + r) * HEAD_CAPACITY;
      // A NaN outweighs whatever else there is to say.
      if (other->found < 0 && state->found != HEAD_NOT_NUMBERS) give_up(state, other->found);
      for (int32_t i = 0; i < other->found && state->found >= 0; ++i) {
        if (row->flags & HEAD_DRAW) {
          if (state->found == HEAD_CAPACITY) {
            give_up(state, HEAD_TOO_MANY);
          } else {
            list[state->found++] = others[i];
          }
        } else if (others[i].value >= state->floor) {
          keep(state, list, others[i], row->count);
        }
      }
    }
    if (!(row->flags & HEAD_DRAW)) compact(state, list, row->count);
    a->found[r] = state->found;
    for (int32_t i = 0; i < state->found; ++i) {
      a->ids[r * HEAD_CAPACITY + i] = list[i].id;
      a->values[r * HEAD_CAPACITY + i] = list[i].value;
    }
  }
}

}  // namespace JB_ISA
}  // namespace jb
