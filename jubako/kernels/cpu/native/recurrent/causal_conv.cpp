// How does a short causal convolution run over requests that go on from a state?

#include "states.h"

namespace jb {
namespace JB_ISA {

// Each thread takes some channels of all tokens.
static void causal_conv(Team& team, const void* args) {
  const ConvArgs& a = *(const ConvArgs*)args;
  const RecurrentStep& step = *a.step;
  Range own = team.range(a.channels, 64);
  if (own.begin >= own.end) return;
  int64_t n = own.end - own.begin, padded = pad16(n), kept = a.width - 1;
  int64_t largest = pad16(((a.channels + 63) / 64 + team.size - 1) / team.size * 64);
  float* rows;
  Writes writes(step, own_part(step, a.scratch, (a.width + 1) * largest, team.rank, &rows));
  // The last `width` inputs, newest at `newest`, as a ring; then sums.
  float* sum = rows + a.width * padded;
  for (int64_t r = 0; r < step.num_reqs; ++r) {
    int64_t start = step.query_start_loc[r], end = step.query_start_loc[r + 1];
    for (int64_t j = 0; j < kept; ++j) {
      float* to = rows + j * padded;
      if (step.read_blocks[r] < 0) {
        memset(to, 0, padded * 4);
      } else {
        int64_t from = step.read_blocks[r] * a.state_stride + j * a.channels + own.begin;
        to_floats(to, a.state, from, n, a.state_dtype);
      }
    }
    int32_t write = writes.first[r];
    for (int64_t t = start; t < end; ++t) {
      // Input i of the request, the kept ones counted before, is in row i % width.
      int64_t i = t - start + kept;
      to_floats(rows + i % a.width * padded, a.x, t * a.x_stride + own.begin, n, a.dtype);
      for (int64_t c = 0; c < n; c += LANES) {
        int64_t here = n - c < LANES ? n - c : LANES;
        vec y = set_vec(0);
        for (int64_t j = 0; j < a.width; ++j) {
          const float* w = a.weight + j * a.channels + own.begin + c;
          vec taps;
          if (here == LANES) {
            taps = load_vec(w);
          } else {
            float part[LANES] = {0};
            memcpy(part, w, here * 4);
            taps = load_vec(part);
          }
          y = load_vec(rows + (i - kept + j) % a.width * padded + c) * taps + y;
        }
        store_vec(sum + c, y);
      }
      if (a.bias) {
        for (int64_t c = 0; c < n; ++c) sum[c] += a.bias[own.begin + c];
      }
      if (a.silu) {
        for (int64_t c = 0; c < padded; c += 16) v_store(sum + c, v_silu(v_load(sum + c)));
      }
      from_floats(a.out, t * a.out_stride + own.begin, sum, n, a.dtype);
      while (write >= 0 && step.write_tokens[write] == t) {
        for (int64_t j = 0; j < kept; ++j) {
          const float* from = rows + (i - kept + 1 + j) % a.width * padded;
          int64_t to = step.write_blocks[write] * a.state_stride + j * a.channels + own.begin;
          from_floats(a.state, to, from, n, a.state_dtype);
        }
        write = writes.next[write];
      }
    }
  }
}

void fill_scans(OpTable& table);

void fill_recurrent(OpTable& table) {
  table.fn[OP_CAUSAL_CONV] = causal_conv;
  fill_scans(table);
}

}  // namespace JB_ISA
}  // namespace jb
