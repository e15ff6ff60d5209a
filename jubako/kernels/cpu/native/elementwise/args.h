// What do the ops on single rows take? Mirrored in Python (jubako/kernels/cpu/elementwise.py).
//
// Strides (ld...) are in elements, dtypes F32 or BF16 unless said otherwise. `rows` points to the
// number of rows, since it changes from step to step.
#pragma once

#include <cstdint>

#include "../base/optable.h"

namespace jb {

enum : int32_t {
  OP_NORM = ELEMENTWISE_OPS + 0,
  OP_ADD_NORM = ELEMENTWISE_OPS + 1,
  OP_ROPE = ELEMENTWISE_OPS + 2,
  OP_GATED_ACTIVATION = ELEMENTWISE_OPS + 3,
  OP_CONVERT = ELEMENTWISE_OPS + 4,
  OP_ROTATION = ELEMENTWISE_OPS + 5,
  OP_KV_WRITE = ELEMENTWISE_OPS + 6,
  OP_POINTWISE = ELEMENTWISE_OPS + 16,
  OP_GATE = ELEMENTWISE_OPS + 17,
  OP_GATED_NORM = ELEMENTWISE_OPS + 18,
  OP_POSITION_SCALE = ELEMENTWISE_OPS + 19,
};

enum NormKind : int32_t { RMS_NORM = 0, LAYER_NORM = 1 };

// y = norm(x) · weight + bias, in float32, rounded once.
struct NormArgs {
  const int64_t* rows;
  const int64_t* index;  // y's row i is made of x's row index[i]; null: of row i
  const void* x;
  void* y;
  const float* weight;
  const float* bias;  // or null
  int64_t size, ldx, ldy;
  int32_t x_dtype, y_dtype, kind;
  float eps;
};

// stream += scale · norm(delta); y = norm(stream). Without a post_weight delta is added as it is;
// without a weight there is no y. Sums in float32.
struct AddNormArgs {
  const int64_t* rows;
  const void* delta;
  float* stream;
  void* y;
  const float* post_weight;  // or null
  const float* post_bias;    // or null
  const float* weight;       // or null
  const float* bias;         // or null
  int64_t size, ld_delta, ld_stream, ldy;
  int32_t delta_dtype, y_dtype, kind;
  float eps, scale;
};

// Per token: normalise each query and key head (with a weight), turn its first `rotary` elements,
// write queries to q_out and, with pages, keys and values into the pages; without pages, keys go to
// q_out behind the queries and values stay where they are.
struct RopeArgs {
  const int64_t* rows;
  const int64_t* positions;  // row of cos and sin of each token; null: the token's number
  const float* cos;          // [positions, rotary / 2], row stride ld_table; null: nothing turns
  const float* sin;
  const void* qkv;  // [rows, heads, D], query heads, key heads, value heads
  void* q_out;      // [rows, Hq, D], or without pages [rows, Hq + Hkv, D]; may be qkv
  const float* weight;  // [Hq + Hkv, D], or null
  const int64_t* const* slots;  // points to [rows]; negative: not written
  void* pages;                  // [blocks, Hkv, {K, V}, slab], or null
  int64_t ld_table, ld_token, ld_head, ld_out_token, block_stride;  // block_stride in bytes
  int32_t dtype, out_dtype, kv_dtype;
  int32_t num_heads, num_kv_heads, head_size, rotary, interleaved, block_size;
  float eps;
};

// cos[i] and sin[i] [size], each times factor, of the float32 angles positions[i] · frequencies.
struct RotationArgs {
  const int64_t* rows;
  const int64_t* positions;
  const float* frequencies;
  float* cos;
  float* sin;
  int64_t size, ld_table;
  float factor;
};

// Keys and values [rows, Hkv, D] into the pages [blocks, Hkv, {K, V}, slab]. A slab is [B, D] of
// kv_dtype, a DType or a KvType, with B float32 behind it where that needs them.
struct KvWriteArgs {
  const int64_t* rows;
  const void* key;
  const void* value;
  const int64_t* slots;  // [rows], negative: not written
  void* pages;
  int64_t key_token, key_head, value_token, value_head, block_stride;  // block_stride in bytes
  int32_t dtype, kv_dtype, num_kv_heads, head_size, block_size;
};

enum Activation : int32_t { SILU = 0, GELU_TANH = 1, GELU = 2 };

// y = act(x[:, :size]) · x[:, size:].
struct GatedActivationArgs {
  const int64_t* rows;
  const void* x;
  void* y;
  int64_t size, ldx, ldy;
  int32_t x_dtype, y_dtype, activation;
};

enum PlainFunction : int32_t {
  PLAIN_IDENTITY = 0,
  PLAIN_SILU = 1,
  PLAIN_GELU_TANH = 2,
  PLAIN_GELU = 3,
  PLAIN_RELU = 4,
  PLAIN_RELU_SQUARED = 5,
  PLAIN_TANH = 6,
  PLAIN_SIGMOID = 7,
  PLAIN_SOFTPLUS = 8,
};

// y = f(x + bias), not below `low` nor above `high`, times factor. y may be x.
struct PointwiseArgs {
  const int64_t* rows;
  const void* x;
  void* y;
  const float* bias;    // [size] or null
  const float* factor;  // [size] or null
  int64_t size, ldx, ldy;
  int32_t x_dtype, y_dtype, function;
  float low, high;
};

// y = x · f(gate), or y += it. y may be x.
struct GateArgs {
  const int64_t* rows;
  const void* x;
  const void* gate;
  void* y;
  int64_t size, ldx, ld_gate, ldy;
  int32_t x_dtype, gate_dtype, y_dtype, function;
  int32_t one;  // a row's gate is one number
  int32_t add;  // y is float32
};

// y = norm(x · silu(gate)) · weight, or norm(x) · weight · silu(gate) with `norm_first`: the root
// mean square norm over each `group` neighbours.
struct GatedNormArgs {
  const int64_t* rows;
  const void* x;
  const void* gate;
  void* y;
  const float* weight;  // [size]
  int64_t size, group, ldx, ld_gate, ldy;
  int32_t x_dtype, gate_dtype, y_dtype, norm_first;
  float eps;
};

// y[row] = 1 + scale · log(1 + floor((position + offset) / every)), float32.
struct PositionScaleArgs {
  const int64_t* rows;
  const int64_t* positions;
  float* y;
  int64_t ldy;
  float scale, offset, every;
};

// y = x · scale in another dtype.
struct ConvertArgs {
  const int64_t* rows;
  const int64_t* index;  // as in NormArgs
  const void* x;
  void* y;
  int64_t size, ldx, ldy;
  int32_t x_dtype, y_dtype;
  float scale;
};

}  // namespace jb
