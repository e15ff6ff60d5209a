// How wide is a register of this level, and how are 16 lanes made of several?
//
// The kernels hold many sums at once: GCC keeps vectors wider than a register in memory, so 16 lanes
// are written as an array of registers here.
#pragma once

#include "../base/vec.h"

#if defined(__AVX512F__)
#define JB_WIDTH 16
#elif defined(__AVX2__)
#define JB_WIDTH 8
#else
#define JB_WIDTH 4
#endif

namespace jb {
namespace JB_ISA {

typedef float vf __attribute__((vector_size(4 * JB_WIDTH)));
typedef int32_t vi __attribute__((vector_size(4 * JB_WIDTH)));
typedef uint32_t vu __attribute__((vector_size(4 * JB_WIDTH)));

enum : int { WIDTH = JB_WIDTH, PARTS = 16 / JB_WIDTH };

JB_INLINE vf loadf(const void* p) {
  vf v;
  memcpy(&v, p, sizeof v);
  return v;
}

JB_INLINE vu loadu(const void* p) {
  vu v;
  memcpy(&v, p, sizeof v);
  return v;
}

JB_INLINE void storef(void* p, vf v) { memcpy(p, &v, sizeof v); }

JB_INLINE vf as_float(vu v) {
  vf f;
  memcpy(&f, &v, sizeof f);
  return f;
}

JB_INLINE vf to_float(vu v) { return __builtin_convertvector((vi)v, vf); }

}  // namespace JB_ISA
}  // namespace jb
