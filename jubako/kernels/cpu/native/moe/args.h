// What do the ops of mixtures of experts take? Mirrored in Python (jubako/kernels/cpu/experts.py).
#pragma once

#include <cstdint>

#include "../base/optable.h"
#include "../matmul/args.h"

namespace jb {

enum : int32_t {
  OP_ROUTE = MOE_OPS + 0,
  OP_EXPERTS = MOE_OPS + 1,
};

enum : int64_t { MAX_EXPERTS = 1024 };

// What an expert counts for the choice: its softmax among all, its sigmoid, or its logit. In the last
// case weights are the softmax among the chosen, or their sigmoids.
enum Score : int32_t {
  SCORE_SOFTMAX = 0,
  SCORE_SIGMOID = 1,
  SCORE_LOGIT_SOFTMAX = 2,
  SCORE_LOGIT_SIGMOID = 3,
};

// The k experts of each row that score best, the lower number of two equal ones, and their weights.
// With fewer `chosen_groups` than `groups` of neighbouring experts, only those in the best groups; a
// group counts as much as its `group_best` best experts together.
struct RouteArgs {
  const int64_t* rows;
  const float* logits;  // [rows, experts]
  int64_t ld_logits;
  const float* bias;  // [experts], added to scores for the choice alone; or null
  float* weights;     // [rows, k]
  int32_t* ids;       // [rows, k]
  int32_t experts, k, groups, chosen_groups, group_best;
  int32_t score;
  int32_t normalise;  // weights of a row sum to 1, before the factor
  float factor;
};

enum ExpertActivation : int32_t {
  EXPERT_SILU = 0,
  EXPERT_GELU_TANH = 1,
  EXPERT_GELU = 2,
  EXPERT_CLAMPED_SWIGLU = 3,
  EXPERT_RELU_SQUARED = 4,
};

// y = the sum over a row's k experts, in order of their numbers, of weight · down · act(up · x).
struct ExpertsArgs {
  const int64_t* rows;
  const void* x;  // [rows, hidden]
  int64_t ldx;
  const float* weights;  // [rows, k]
  const int32_t* ids;    // [rows, k], none twice in a row
  // Interleaved gate and up [2 · size, hidden], act(gate) · up; or up alone [size, hidden], act(up).
  const Matrix* up;      // [experts]
  const Matrix* down;    // [experts], [hidden, size] each
  const float* up_bias;    // [experts, rows of up], gate's before up's; or null
  const float* down_bias;  // [experts, hidden]; or null
  void* y;  // [rows, hidden]
  int64_t ldy;
  void* scratch;  // experts_scratch_bytes(), 64-byte aligned
  int64_t scratch_bytes;
  int32_t experts, k;
  int32_t x_dtype;  // F32 or BF16, also of what lies between the matrices
  int32_t y_dtype;
  int32_t add;  // y, float32, += the sum
  int32_t activation;
  int32_t weigh_input;  // the weight multiplies x instead of the answer
  int32_t activation_bits;
  float limit, alpha;  // of the clamped SwiGLU
};

}  // namespace jb
