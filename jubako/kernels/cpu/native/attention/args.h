// What do the attention ops take? Mirrored in Python (jubako/kernels/cpu/attention.py).
#pragma once

#include <cstdint>

#include "../base/optable.h"
#include "../base/types.h"

namespace jb {

enum : int32_t {
  OP_PAGED_ATTENTION = ATTENTION_OPS + 0,
};

// One step, seen by the attention layers of one KV cache group. Request i owns the tokens from
// query_start_loc[i] to query_start_loc[i + 1], the last ones of its seq_lens[i] positions.
struct AttentionStep {
  int64_t num_reqs;
  int64_t num_tokens;
  const int32_t* query_start_loc;  // [num_reqs + 1]
  const int32_t* seq_lens;         // [num_reqs]
  const int32_t* block_table;      // position p is in block block_table[i * stride + p / block_size]
  int64_t block_table_stride;
  const int64_t* slot_mapping;     // [num_tokens], not read by attention
  int32_t max_query_len;
  int32_t max_seq_len;
  // Null, or for each token the keys that it sees, [key_begin, key_end), instead of what window,
  // chunk and causal say. key_end is at most the request's length.
  const int32_t* key_begin;
  const int32_t* key_end;
};

// Query head h reads KV head h / (num_heads / num_kv_heads). Row j of KV head n in block b starts at
// pages + b * block_stride + n * head_stride + j * row_stride, its value value_offset bytes later.
struct AttentionArgs {
  const AttentionStep* step;
  const void* q;       // [tokens, num_heads, head_size]
  int64_t q_stride;    // elements between tokens
  void* out;           // [tokens, num_heads, value_size]
  int64_t out_stride;  // elements between tokens
  void* pages;
  int64_t block_stride;  // bytes
  int64_t head_stride;   // bytes
  int64_t row_stride;    // bytes
  int64_t value_offset;  // bytes from a key to its value; 0: the value is the key's first elements
  int64_t scale_offset;  // bytes from a slab to its float32 scales, for KvType
  int32_t dtype;         // of q and out: a DType
  int32_t kv_dtype;      // of the pages: a DType or a KvType
  int32_t num_heads;
  int32_t num_kv_heads;
  int32_t head_size;   // elements of a key
  int32_t value_size;  // elements of a value
  int32_t block_size;
  int32_t window;  // a query sees this many keys, itself included; 0: all
  int32_t chunk;   // a query sees its own chunk of positions only; 0: all
  int32_t causal;
  float scale;
  float soft_cap;      // 0: none
  const float* sinks;  // [num_heads] or null
  void* scratch;       // zeroed before its first use; ops that run one after another share it
  int64_t scratch_bytes;
};

// Scratch that lets any step of at most `max_reqs` requests run on `threads` threads, and split
// contexts of up to `max_seq_len` over them.
int64_t attention_scratch_bytes(int32_t threads, int32_t num_heads, int32_t head_size,
                                int32_t value_size, int64_t max_reqs, int64_t max_seq_len);

}  // namespace jb
