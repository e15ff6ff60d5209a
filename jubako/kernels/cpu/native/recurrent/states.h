// How do states come from blocks and go back to them, and which tokens keep them?
#pragma once

#include "../attention/loads.h"
#include "args.h"

namespace jb {
namespace JB_ISA {

JB_INLINE int64_t pad16(int64_t n) { return (n + 15) / 16 * 16; }

// n elements from element `from` on become floats, zeros up to a multiple of 16.
static inline void to_floats(float* to, const void* p, int64_t from, int64_t n, int32_t dtype) {
  int64_t i = 0;
  const char* at = (const char*)p;
  for (; i + LANES <= n; i += LANES) {
    vec v = dtype == F32    ? LoadF32::full(at, from + i)
            : dtype == BF16 ? LoadBF16::full(at, from + i)
                            : LoadF16::full(at, from + i);
    store_vec(to + i, v);
  }
  for (; i < n; ++i) to[i] = load_f32(p, from + i, dtype);
  for (; i % 16; ++i) to[i] = 0;
}

static inline void from_floats(void* p, int64_t to, const float* from, int64_t n, int32_t dtype) {
  if (dtype == F32) {
    memcpy((float*)p + to, from, n * 4);
    return;
  }
  int64_t i = 0;
  for (; i + 16 <= n; i += 16) v_store_bf16((uint16_t*)p + to + i, v_load(from + i));
  for (; i < n; ++i) ((uint16_t*)p)[to + i] = f32_to_bf16(from[i]);
}

// Which tokens of each request leave a state behind, as chains in the order of the tokens.
struct Writes {
  int32_t* first;  // [num_reqs]; -1: none
  int32_t* next;   // [num_writes]

  Writes(const RecurrentStep& step, char* memory) {
    first = (int32_t*)memory;
    next = first + step.num_reqs;
    for (int64_t i = 0; i < step.num_reqs; ++i) first[i] = -1;
    for (int64_t w = step.num_writes - 1; w >= 0; --w) {
      int64_t r = step.write_requests[w];
      next[w] = first[r];
      first[r] = (int32_t)w;
    }
  }
};

// A thread's part of the scratch: chains of writes, then `floats` floats.
JB_INLINE char* own_part(const RecurrentStep& step, void* scratch, int64_t floats, int rank,
                         float** numbers) {
  int64_t chains = (4 * (step.num_reqs + step.num_writes) + 127) / 64 * 64;
  char* own = (char*)scratch + rank * (chains + (4 * floats + 63) / 64 * 64);
  *numbers = (float*)(own + chains);
  return own;
}

// The sums of the lanes of 4 rows, each of 16 lanes in PIECES registers.
JB_INLINE void sum_four(vec (*x)[PIECES], float* out) {
#if defined(__AVX512F__)
  __m512 a = (__m512)x[0][0], b = (__m512)x[1][0], c = (__m512)x[2][0], d = (__m512)x[3][0];
  __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
  __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xee));
  __m512 s = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xdd));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0x4e));
  s = _mm512_add_ps(s, _mm512_permute_ps(s, 0xb1));
  __m512i pick = _mm512_set_epi32(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 12, 8, 4, 0);
  _mm_storeu_ps(out, _mm512_castps512_ps128(_mm512_permutexvar_ps(pick, s)));
#else
  for (int i = 0; i < 4; ++i) {
    float lanes[16], s[4];
    for (int c = 0; c < PIECES; ++c) store_vec(lanes + c * LANES, x[i][c]);
    for (int j = 0; j < 4; ++j) s[j] = (lanes[j] + lanes[j + 8]) + (lanes[j + 4] + lanes[j + 12]);
    out[i] = (s[0] + s[2]) + (s[1] + s[3]);
  }
#endif
}

static inline float exp_of(float x) {
  f32x16 y = v_exp(v_set(x));
  return ((const float*)&y)[0];
}

}  // namespace JB_ISA
}  // namespace jb
