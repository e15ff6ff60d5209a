// Which levels of instruction sets can the sources be compiled for?
//
// In ascending order: a processor that has one has those before it. `setup.py` names the compiler
// flags of each and defines JB_ISA as the level for sources that depend on it.
#pragma once

#if defined(__x86_64__)
#define JB_LEVELS(X) X(generic) X(avx2) X(avx512) X(avx512_bf16) X(amx)
#elif defined(__aarch64__)
#define JB_LEVELS(X) X(generic) X(neon) X(neon_bf16)
#else
#define JB_LEVELS(X) X(generic)
#endif

#define JB_AREAS(X, level) \
  X(level, elementwise)    \
  X(level, matmul)         \
  X(level, head)           \
  X(level, attention)      \
  X(level, recurrent)      \
  X(level, moe)
