// What do the ops of recurrent layers take? Mirrored in Python (jubako/kernels/cpu/recurrent.py).
#pragma once

#include <cstdint>

#include "../base/optable.h"

namespace jb {

enum : int32_t {
  OP_CAUSAL_CONV = RECURRENT_OPS + 0,
  OP_SSD_SCAN = RECURRENT_OPS + 1,
  OP_SELECTIVE_SCAN = RECURRENT_OPS + 2,
  OP_GATED_DELTA = RECURRENT_OPS + 3,
};

// One step, as `StateSlots` (jubako/kernels/state_slots.py) describes it.
struct RecurrentStep {
  int64_t num_reqs;
  int64_t num_writes;
  const int64_t* query_start_loc;  // [num_reqs + 1]
  const int64_t* read_blocks;      // [num_reqs]; negative: from zeros
  const int64_t* write_requests;   // [num_writes]
  const int64_t* write_tokens;
  const int64_t* write_blocks;
};

// Strides count elements, from token to token or from block to block.
struct ConvArgs {
  const RecurrentStep* step;
  const void* x;        // [T, channels]
  int64_t x_stride;
  const float* weight;  // [width, channels]
  const float* bias;    // [channels] or null
  void* out;            // [T, channels]
  int64_t out_stride;
  void* state;          // [blocks, width - 1, channels]
  int64_t state_stride;
  int32_t dtype;  // of x and out
  int32_t state_dtype;
  int32_t channels;
  int32_t width;
  int32_t silu;
  void* scratch;
  int64_t scratch_bytes;
};

// Mamba 2: x [T, H, P], b and c [T, G, N], state [blocks, H, P, N]. Mamba 1: H channels with P = 1
// and G = 1, where a is [H, N].
struct ScanArgs {
  const RecurrentStep* step;
  const void* x;
  const float* dt;  // [T, H]
  const float* a;   // [H], or [H, N]
  const void* b;
  const void* c;
  const float* d;   // [H]
  void* out;        // like x
  void* state;
  int64_t x_stride, dt_stride, b_stride, c_stride, out_stride, state_stride;
  int32_t dtype;  // of x, b, c and out
  int32_t state_dtype;
  int32_t heads;
  int32_t groups;
  int32_t rows;  // P
  int32_t size;  // N
  void* scratch;
  int64_t scratch_bytes;
};

// q and k [T, Hk, Dk], v and out [T, Hv, Dv], g and beta [T, Hv], state [blocks, Hv, Dv, Dk].
struct DeltaArgs {
  const RecurrentStep* step;
  const void* q;
  const void* k;
  const void* v;
  const float* g;
  const float* beta;
  void* out;
  void* state;
  int64_t q_stride, k_stride, v_stride, g_stride, beta_stride, out_stride, state_stride;
  int32_t dtype;  // of q, k, v and out
  int32_t state_dtype;
  int32_t key_heads;
  int32_t value_heads;
  int32_t key_size;    // Dk
  int32_t value_size;  // Dv
  void* scratch;
  int64_t scratch_bytes;
};

}  // namespace jb
