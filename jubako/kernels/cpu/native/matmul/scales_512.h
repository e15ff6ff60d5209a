// The scales of a quantised group, in registers.
#pragma once

#if defined(__AVX512VNNI__)

#include "unpack.h"

namespace jb {
namespace JB_ISA {

// Of 16 lanes: the scales of elements 0 .. 15 and 16 .. 31, and what is added.
struct Scales512 {
  __m512 d[2];
  __m512 m;
};

JB_INLINE __m512 halves_512(const char* p) {
  return _mm512_cvtph_ps(_mm256_load_si256((const __m256i*)p));
}

JB_INLINE Scales512 scales_512(int32_t kind, const char* scales, int g) {
  const __m512 zero = _mm512_setzero_ps();
  if (kind == MATRIX_Q4_K || kind == MATRIX_Q5_K) {
    const __m512i low4 = _mm512_set1_epi32(15), two = _mm512_set1_epi32(0x30);
    const __m512i high = _mm512_load_si512(scales + 192);
    __m512i s = _mm512_srl_epi32(_mm512_load_si512(scales + 64), _mm_cvtsi32_si128(4 * g));
    __m512i n = _mm512_srl_epi32(_mm512_load_si512(scales + 128), _mm_cvtsi32_si128(4 * g));
    __m512i hs = _mm512_slli_epi32(_mm512_srl_epi32(high, _mm_cvtsi32_si128(2 * g)), 4);
    __m512i hn = _mm512_srl_epi32(high, _mm_cvtsi32_si128(12 + 2 * g));
    s = _mm512_or_si512(_mm512_and_si512(s, low4), _mm512_and_si512(hs, two));
    n = _mm512_or_si512(_mm512_and_si512(n, low4), _mm512_and_si512(hn, two));
    __m512 d = _mm512_mul_ps(halves_512(scales), _mm512_cvtepi32_ps(s));
    return {{d, d}, _mm512_sub_ps(zero, _mm512_mul_ps(halves_512(scales + 32), _mm512_cvtepi32_ps(n)))};
  }
  if (kind == MATRIX_Q6_K) {
    const __m128i* s = (const __m128i*)(scales + 32 + 32 * g);
    const __m512 d = halves_512(scales);
    return {{_mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(s)))),
             _mm512_mul_ps(d, _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_load_si128(s + 1))))},
            zero};
  }
  const __m512 d = halves_512(scales);
  return {{d, d}, has_minimum(kind) ? halves_512(scales + 32) : zero};
}

}  // namespace JB_ISA
}  // namespace jb

#endif
