// How do the recurrences of Mamba 1, Mamba 2 and gated delta nets run over a step?
//
// Token by token, in float32, for some heads of a request at a time: a result does not depend on
// how a prompt is cut into steps.

#include "states.h"

namespace jb {
namespace JB_ISA {

static inline bool writes_here(const RecurrentStep& step, int32_t write, int64_t token) {
  return write >= 0 && step.write_tokens[write] == token;
}

// A state of `rows` rows of `size` elements, kept padded.
static void read_state(float* s, int64_t rows, int64_t size, int64_t padded, const void* state,
                       int64_t from, int32_t dtype, bool zero) {
  if (zero) {
    memset(s, 0, rows * padded * 4);
    return;
  }
  for (int64_t p = 0; p < rows; ++p) to_floats(s + p * padded, state, from + p * size, size, dtype);
}

static void write_state(const float* s, int64_t rows, int64_t size, int64_t padded, void* state,
                        int64_t to, int32_t dtype) {
  for (int64_t p = 0; p < rows; ++p) from_floats(state, to + p * size, s + p * padded, size, dtype);
}

// S <- decay * S + new (x) b, y = S c: rows of S by 4.
static void ssd_token(float* s, int64_t rows, int64_t padded, float decay, const float* added,
                      const float* b, const float* c, float* y) {
  for (int64_t p = 0; p < rows; p += 4) {
    vec sum[4][PIECES];
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < PIECES; ++j) sum[i][j] = set_vec(0);
    }
    float* row = s + p * padded;
    vec f = set_vec(decay);
    for (int64_t n = 0; n < padded; n += 16) {
      for (int j = 0; j < PIECES; ++j) {
        vec bs = load_vec(b + n + j * LANES), cs = load_vec(c + n + j * LANES);
        for (int i = 0; i < 4; ++i) {
          float* at = row + i * padded + n + j * LANES;
          vec v = load_vec(at) * f + set_vec(added[p + i]) * bs;
          store_vec(at, v);
          sum[i][j] = v * cs + sum[i][j];
        }
      }
    }
    sum_four(sum, y + p);
  }
}

static void ssd_scan(Team& team, const void* args) {
  const ScanArgs& a = *(const ScanArgs*)args;
  const RecurrentStep& step = *a.step;
  int64_t rows = (a.rows + 3) / 4 * 4, padded = pad16(a.size), wide = pad16(rows);
  float* numbers;
  Writes writes(step, own_part(step, a.scratch, rows * padded + 2 * padded + 3 * wide, team.rank,
                               &numbers));
  float* s = numbers;
  float* b = s + rows * padded;
  float* c = b + padded;
  float* x = c + padded;
  float* added = x + wide;
  float* y = added + wide;
  memset(numbers, 0, (rows * padded + 2 * padded + 3 * wide) * 4);
  Range own = team.range(step.num_reqs * a.heads);
  for (int64_t item = own.begin; item < own.end; ++item) {
    int64_t r = item / a.heads, h = item % a.heads, group = h / (a.heads / a.groups);
    int64_t block = step.read_blocks[r], at = h * a.rows * a.size;
    read_state(s, a.rows, a.size, padded, a.state, block * a.state_stride + at, a.state_dtype,
               block < 0);
    int32_t write = writes.first[r];
    for (int64_t t = step.query_start_loc[r]; t < step.query_start_loc[r + 1]; ++t) {
      float dt = a.dt[t * a.dt_stride + h];
      to_floats(x, a.x, t * a.x_stride + h * a.rows, a.rows, a.dtype);
      to_floats(b, a.b, t * a.b_stride + group * a.size, a.size, a.dtype);
      to_floats(c, a.c, t * a.c_stride + group * a.size, a.size, a.dtype);
      for (int64_t p = 0; p < a.rows; ++p) added[p] = x[p] * dt;
      ssd_token(s, a.rows, padded, exp_of(dt * a.a[h]), added, b, c, y);
      for (int64_t p = 0; p < a.rows; ++p) y[p] += a.d[h] * x[p];
      from_floats(a.out, t * a.out_stride + h * a.rows, y, a.rows, a.dtype);
      for (; writes_here(step, write, t); write = writes.next[write]) {
        write_state(s, a.rows, a.size, padded, a.state,
                    step.write_blocks[write] * a.state_stride + at, a.state_dtype);
      }
    }
  }
}

constexpr int64_t CHANNELS = 16;  // of Mamba 1, computed at a time

static void selective_scan(Team& team, const void* args) {
  const ScanArgs& a = *(const ScanArgs*)args;
  const RecurrentStep& step = *a.step;
  int64_t padded = pad16(a.size), blocks = (a.heads + CHANNELS - 1) / CHANNELS;
  int64_t floats = 2 * CHANNELS * padded + 2 * padded + 2 * CHANNELS;
  float* numbers;
  Writes writes(step, own_part(step, a.scratch, floats, team.rank, &numbers));
  float* s = numbers;
  float* rates = s + CHANNELS * padded;
  float* b = rates + CHANNELS * padded;
  float* c = b + padded;
  float* x = c + padded;
  float* y = x + CHANNELS;
  memset(numbers, 0, floats * 4);
  Range own = team.range(step.num_reqs * blocks);
  for (int64_t item = own.begin; item < own.end; ++item) {
    int64_t r = item / blocks, first = item % blocks * CHANNELS;
    int64_t count = a.heads - first < CHANNELS ? a.heads - first : CHANNELS;
    int64_t block = step.read_blocks[r], at = first * a.size;
    read_state(s, count, a.size, padded, a.state, block * a.state_stride + at, a.state_dtype,
               block < 0);
    for (int64_t i = 0; i < count; ++i) {
      to_floats(rates + i * padded, a.a, (first + i) * a.size, a.size, F32);
    }
    int32_t write = writes.first[r];
    for (int64_t t = step.query_start_loc[r]; t < step.query_start_loc[r + 1]; ++t) {
      const float* dts = a.dt + t * a.dt_stride + first;
      to_floats(x, a.x, t * a.x_stride + first, count, a.dtype);
      to_floats(b, a.b, t * a.b_stride, a.size, a.dtype);
      to_floats(c, a.c, t * a.c_stride, a.size, a.dtype);
      for (int64_t i = 0; i < count; i += 4) {
        vec sum[4][PIECES];
        for (int k = 0; k < 4; ++k) {
          for (int j = 0; j < PIECES; ++j) sum[k][j] = set_vec(0);
          if (i + k >= count) continue;
          float dt = dts[i + k], added = dt * x[i + k];
          for (int64_t n = 0; n < padded; n += 16) {
            float* state = s + (i + k) * padded + n;
            float decay[16];
            v_store(decay, v_exp(v_load(rates + (i + k) * padded + n) * dt));
            for (int j = 0; j < PIECES; ++j) {
              vec v = load_vec(state + j * LANES) * load_vec(decay + j * LANES) +
                      set_vec(added) * load_vec(b + n + j * LANES);
              store_vec(state + j * LANES, v);
              sum[k][j] = v * load_vec(c + n + j * LANES) + sum[k][j];
            }
          }
        }
        sum_four(sum, y + i);
      }
      for (int64_t i = 0; i < count; ++i) y[i] += a.d[first + i] * x[i];
      from_floats(a.out, t * a.out_stride + first, y, count, a.dtype);
      for (; writes_here(step, write, t); write = writes.next[write]) {
        write_state(s, count, a.size, padded, a.state,
                    step.write_blocks[write] * a.state_stride + at, a.state_dtype);
      }
    }
  }
}

static float dot(const float* x, const float* y, int64_t padded) {
  vec sum[4][PIECES];
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < PIECES; ++j) sum[i][j] = set_vec(0);
  }
  for (int64_t n = 0; n < padded; n += 16) {
    for (int j = 0; j < PIECES; ++j) {
      sum[0][j] = load_vec(x + n + j * LANES) * load_vec(y + n + j * LANES) + sum[0][j];
    }
  }
  float out[4];
  sum_four(sum, out);
  return out[0];
}

// S <- decay S, S <- S + beta (v - S k) (x) k, y = S q, where q k is `along`.
static void delta_token(float* s, int64_t rows, int64_t padded, float decay, float beta,
                        const float* q, const float* k, float along, const float* v, float* y) {
  for (int64_t p = 0; p < rows; p += 4) {
    vec found[4][PIECES], asked[4][PIECES];
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < PIECES; ++j) found[i][j] = asked[i][j] = set_vec(0);
    }
    float* row = s + p * padded;
    for (int64_t n = 0; n < padded; n += 16) {
      for (int j = 0; j < PIECES; ++j) {
        vec ks = load_vec(k + n + j * LANES), qs = load_vec(q + n + j * LANES);
        for (int i = 0; i < 4; ++i) {
          vec x = load_vec(row + i * padded + n + j * LANES);
          found[i][j] = x * ks + found[i][j];
          asked[i][j] = x * qs + asked[i][j];
        }
      }
    }
    float sums[4], answers[4], written[4];
    sum_four(found, sums);
    sum_four(asked, answers);
    for (int i = 0; i < 4; ++i) {
      written[i] = beta * (v[p + i] - decay * sums[i]);
      y[p + i] = decay * answers[i] + written[i] * along;
    }
    vec f = set_vec(decay);
    for (int64_t n = 0; n < padded; n += LANES) {
      vec ks = load_vec(k + n);
      for (int i = 0; i < 4; ++i) {
        float* at = row + i * padded + n;
        store_vec(at, load_vec(at) * f + set_vec(written[i]) * ks);
      }
    }
  }
}

static void make_unit(float* x, int64_t padded, float factor) {
  float f = factor / __builtin_sqrtf(dot(x, x, padded) + 1e-6f);
  for (int64_t n = 0; n < padded; ++n) x[n] *= f;
}

static void gated_delta(Team& team, const void* args) {
  const DeltaArgs& a = *(const DeltaArgs*)args;
  const RecurrentStep& step = *a.step;
  int64_t rows = (a.value_size + 3) / 4 * 4, padded = pad16(a.key_size), wide = pad16(rows);
  int64_t floats = rows * padded + 2 * padded + 2 * wide;
  float* numbers;
  Writes writes(step, own_part(step, a.scratch, floats, team.rank, &numbers));
  float* s = numbers;
  float* q = s + rows * padded;
  float* k = q + padded;
  float* v = k + padded;
  float* y = v + wide;
  memset(numbers, 0, floats * 4);
  float shorten = 1.0f / __builtin_sqrtf((float)a.key_size);
  Range own = team.range(step.num_reqs * a.value_heads);
  for (int64_t item = own.begin; item < own.end; ++item) {
    int64_t r = item / a.value_heads, h = item % a.value_heads;
    int64_t key_head = h / (a.value_heads / a.key_heads);
    int64_t block = step.read_blocks[r], at = h * a.value_size * a.key_size;
    read_state(s, a.value_size, a.key_size, padded, a.state, block * a.state_stride + at,
               a.state_dtype, block < 0);
    int32_t write = writes.first[r];
    for (int64_t t = step.query_start_loc[r]; t < step.query_start_loc[r + 1]; ++t) {
      to_floats(q, a.q, t * a.q_stride + key_head * a.key_size, a.key_size, a.dtype);
      to_floats(k, a.k, t * a.k_stride + key_head * a.key_size, a.key_size, a.dtype);
      to_floats(v, a.v, t * a.v_stride + h * a.value_size, a.value_size, a.dtype);
      make_unit(q, padded, shorten);
      make_unit(k, padded, 1.0f);
      delta_token(s, a.value_size, padded, exp_of(a.g[t * a.g_stride + h]),
                  a.beta[t * a.beta_stride + h], q, k, dot(q, k, padded), v, y);
      from_floats(a.out, t * a.out_stride + h * a.value_size, y, a.value_size, a.dtype);
      for (; writes_here(step, write, t); write = writes.next[write]) {
        write_state(s, a.value_size, a.key_size, padded, a.state,
                    step.write_blocks[write] * a.state_stride + at, a.state_dtype);
      }
    }
  }
}

void fill_scans(OpTable& table) {
  table.fn[OP_SSD_SCAN] = ssd_scan;
  table.fn[OP_SELECTIVE_SCAN] = selective_scan;
  table.fn[OP_GATED_DELTA] = gated_delta;
}

}  // namespace JB_ISA
}  // namespace jb
