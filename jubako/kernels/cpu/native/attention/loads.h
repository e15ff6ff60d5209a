// How do elements of pages become floats, as many as a register of the level holds?
#pragma once

#include "../base/vec.h"
#include "args.h"

namespace jb {
namespace JB_ISA {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX2__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

// Registers of 16 floats.
constexpr int PIECES = 16 / LANES;

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));

JB_INLINE vec load_vec(const float* p) {
  vec v;
  memcpy(&v, p, sizeof v);
  return v;
}

JB_INLINE void store_vec(float* p, vec v) { memcpy(p, &v, sizeof v); }

JB_INLINE vec set_vec(float x) { return x - (vec){}; }

// `full` loads LANES elements from element i on; `one` is element i.
struct LoadF32 {
  static constexpr bool SCALED = false;
  static constexpr bool STORED_BF16 = false;
  JB_INLINE vec full(const char* p, int64_t i) { return load_vec((const float*)p + i); }
  JB_INLINE float one(const char* p, int64_t i) { return ((const float*)p)[i]; }
};

struct LoadBF16 {
  static constexpr bool SCALED = false;
  static constexpr bool STORED_BF16 = true;
  JB_INLINE vec full(const char* p, int64_t i) {
    halves h;
    memcpy(&h, (const uint16_t*)p + i, sizeof h);
    uvec bits = __builtin_convertvector(h, uvec) << 16;
    vec v;
    memcpy(&v, &bits, sizeof v);
    return v;
  }
  JB_INLINE float one(const char* p, int64_t i) { return bf16_to_f32(((const uint16_t*)p)[i]); }
};

struct LoadF16 {
  static constexpr bool SCALED = false;
  static constexpr bool STORED_BF16 = false;
  JB_INLINE vec full(const char* p, int64_t i) {
    const uint16_t* h = (const uint16_t*)p + i;
#if defined(__AVX512F__)
    return (vec)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)h));
#elif defined(__F16C__)
    return (vec)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)h));
#else
    vec v;
    for (int j = 0; j < LANES; ++j) v[j] = f16_to_f32(h[j]);
    return v;
#endif
  }
  JB_INLINE float one(const char* p, int64_t i) { return f16_to_f32(((const uint16_t*)p)[i]); }
};

struct LoadI8 {
  static constexpr bool SCALED = true;
  static constexpr bool STORED_BF16 = false;
  JB_INLINE vec full(const char* p, int64_t i) {
#if defined(__AVX512F__)
    return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)(p + i))));
#elif defined(__AVX2__)
    return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + i))));
#else
    signed_bytes b;
    memcpy(&b, p + i, sizeof b);
    return __builtin_convertvector(__builtin_convertvector(b, ivec), vec);
#endif
  }
  JB_INLINE float one(const char* p, int64_t i) { return ((const int8_t*)p)[i]; }
};

// Sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinities.
struct LoadF8 {
  static constexpr bool SCALED = true;
  static constexpr bool STORED_BF16 = false;
  JB_INLINE vec full(const char* p, int64_t i) {
    // As a float16 it is 2^8 too small, and so never slow, though it may be subnormal there.
#if defined(__AVX512F__)
    __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i*)(p + i)));
    __m256i rest = _mm256_and_si256(w, _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_slli_epi16(_mm256_and_si256(w, _mm256_set1_epi16(0x80)), 8);
    __m512 y = _mm512_cvtph_ps(_mm256_or_si256(_mm256_slli_epi16(rest, 7), sign));
    y = _mm512_mul_ps(y, _mm512_set1_ps(256.0f));
    __mmask16 none = _mm256_cmpeq_epi16_mask(rest, _mm256_set1_epi16(0x7f));
    return (vec)_mm512_mask_mov_ps(y, none, _mm512_set1_ps(__builtin_nanf("")));
#elif defined(__AVX2__) && defined(__F16C__)
    __m128i w = _mm_cvtepu8_epi16(_mm_loadl_epi64((const __m128i*)(p + i)));
    __m128i rest = _mm_and_si128(w, _mm_set1_epi16(0x7f));
    __m128i sign = _mm_slli_epi16(_mm_and_si128(w, _mm_set1_epi16(0x80)), 8);
    __m256 y = _mm256_cvtph_ps(_mm_or_si128(_mm_slli_epi16(rest, 7), sign));
    y = _mm256_mul_ps(y, _mm256_set1_ps(256.0f));
    __m256i none = _mm256_cvtepi16_epi32(_mm_cmpeq_epi16(rest, _mm_set1_epi16(0x7f)));
    return (vec)_mm256_or_ps(y, _mm256_castsi256_ps(none));
#else
    bytes b;
    memcpy(&b, p + i, sizeof b);
    uvec bits = __builtin_convertvector(b, uvec);
    // As an exponent of float32 it is 120 too small, subnormals included.
    uvec magnitude = (bits & 0x7f) << 20;
    vec x;
    memcpy(&x, &magnitude, sizeof x);
    x *= 1.329227995784916e36f;
    uvec nan = (uvec)((bits & 0x7f) == 0x7f) & 0x7fc00000u;
    uvec whole;
    memcpy(&whole, &x, sizeof x);
    whole |= (bits & 0x80) << 24 | nan;
    memcpy(&x, &whole, sizeof x);
    return x;
#endif
  }
  JB_INLINE float one(const char* p, int64_t i) {
    uint32_t b = ((const uint8_t*)p)[i], bits = (b & 0x7f) << 20;
    if ((b & 0x7f) == 0x7f) bits = 0x7fc00000u;
    float x;
    memcpy(&x, &bits, 4);
    if ((b & 0x7f) != 0x7f) x *= 1.329227995784916e36f;
    return b & 0x80 ? -x : x;
  }
};

// n <= 16 elements from element i on, zeros after them.
template <class Load>
JB_INLINE void load_some(vec* v, const char* p, int64_t i, int64_t n) {
  float x[16] = {0};
  for (int64_t j = 0; j < n; ++j) x[j] = Load::one(p, i + j);
  for (int c = 0; c < PIECES; ++c) v[c] = load_vec(x + c * LANES);
}

}  // namespace JB_ISA
}  // namespace jb
