// Which experts does a token go to, and how much does each count?

#include "../base/vec.h"
#include "args.h"

namespace jb {
namespace JB_ISA {
namespace {

// e^(x - max) of n values padded to 16, which end in padding that is not looked at.
void exponentials(float* x, int64_t n) {
  float largest = x[0];
  for (int64_t i = 1; i < n; ++i) largest = x[i] > largest ? x[i] : largest;
  for (int64_t i = 0; i < n; i += 16) v_store(x + i, v_exp(v_load(x + i) - largest));
}

float sum_of(const float* x, int64_t n) {
  float sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += x[i];
  return sum;
}

// The best that is not taken, which then is: the first one if no number is larger than another.
int64_t take_best(const float* choice, bool* taken, int64_t count) {
  int64_t best = -1;
  for (int64_t i = 0; i < count; ++i) {
    if (!taken[i] && (best < 0 || choice[i] > choice[best] || choice[best] != choice[best])) best = i;
  }
  taken[best] = true;
  return best;
}

// Experts outside of the best groups count as taken.
void keep_best_groups(const RouteArgs& a, const float* choice, bool* taken) {
  float groups[MAX_EXPERTS];
  bool kept[MAX_EXPERTS] = {}, counted[MAX_EXPERTS] = {};
  const int64_t size = a.experts / a.groups;
  for (int64_t g = 0; g < a.groups; ++g) {
    groups[g] = 0;
    for (int64_t i = 0; i < a.group_best && i < size; ++i) {
      groups[g] += choice[g * size + take_best(choice + g * size, counted + g * size, size)];
    }
  }
  for (int64_t i = 0; i < a.chosen_groups; ++i) take_best(groups, kept, a.groups);
  for (int64_t e = 0; e < a.experts; ++e) taken[e] = !kept[e / size];
}

void route_row(const RouteArgs& a, const float* logits, float* weights, int32_t* ids) {
  alignas(64) float scores[MAX_EXPERTS + 16], choice[MAX_EXPERTS + 16];
  const int64_t experts = a.experts;
  memcpy(scores, logits, experts * 4);
  memset(scores + experts, 0, 64);
  if (a.score == SCORE_SIGMOID) {
    for (int64_t e = 0; e < experts; e += 16) v_store(scores + e, v_sigmoid(v_load(scores + e)));
  } else if (a.score == SCORE_SOFTMAX) {
    exponentials(scores, experts);
    const float sum = sum_of(scores, experts);
    for (int64_t e = 0; e < experts; ++e) scores[e] /= sum;
  }
  for (int64_t e = 0; e < experts; ++e) choice[e] = scores[e] + (a.bias ? a.bias[e] : 0.0f);
  bool taken[MAX_EXPERTS] = {};
  if (a.chosen_groups < a.groups) keep_best_groups(a, choice, taken);
  alignas(64) float chosen[MAX_EXPERTS + 16];
  for (int64_t i = 0; i < a.k; ++i) {
    ids[i] = (int32_t)take_best(choice, taken, experts);
    chosen[i] = scores[ids[i]];
  }
  memset(chosen + a.k, 0, 64);
  float factor = a.factor;
  if (a.score == SCORE_LOGIT_SIGMOID) {
    for (int64_t i = 0; i < a.k; i += 16) v_store(chosen + i, v_sigmoid(v_load(chosen + i)));
  }
  if (a.score == SCORE_LOGIT_SOFTMAX) {
    exponentials(chosen, a.k);
    factor /= sum_of(chosen, a.k);
  } else if (a.normalise) {
    // All sigmoids may underflow.
    factor /= sum_of(chosen, a.k) + 1e-20f;
  }
  for (int64_t i = 0; i < a.k; ++i) weights[i] = chosen[i] * factor;
}

void route(Team& team, const void* args) {
  const RouteArgs& a = *(const RouteArgs*)args;
  Range own = team.range(*a.rows);
  for (int64_t row = own.begin; row < own.end; ++row) {
    route_row(a, a.logits + row * a.ld_logits, a.weights + row * a.k, a.ids + row * a.k);
  }
}

}  // namespace

void experts(Team& team, const void* args);

void fill_moe(OpTable& table) {
  table.fn[OP_ROUTE] = route;
  table.fn[OP_EXPERTS] = experts;
}

}  // namespace JB_ISA
}  // namespace jb
