// How are activations made integers?
//
// A number becomes 256 * high + low, both signed bytes, in units of a 32512th of the largest of its
// group; with 8 bits high alone, in units of a 127th. The bytes of a group's quads lie as the
// products broadcast them. NaN and infinity make the whole group NaN.
#pragma once

#include "layout.h"
#include "native_width.h"

namespace jb {
namespace JB_ISA {

JB_INLINE float quantise_range(int bits) { return bits == 16 ? 32512.0f : 127.0f; }

// Units in 1; 0 where nothing is left of numbers so small, or they are not numbers.
JB_INLINE float quantise_inverse(float largest, int bits) {
  float inverse = largest > 0 && largest <= 3.0e38f ? quantise_range(bits) / largest : 0;
  return inverse <= 3.0e38f ? inverse : 0;
}

// x[n] to high[n] and, with 16 bits, low[n]; adds what they sum up to to sums[0] and sums[1].
JB_INLINE void quantise_run(const float* x, int64_t n, float inverse, int bits, int8_t* high,
                            int8_t* low, int32_t* sums) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  for (int64_t i = 0; i < n; ++i) {
    float scaled = x[i] * inverse + magic;
    int32_t value;
    memcpy(&value, &scaled, 4);
    value -= 0x4b400000;
    if (bits == 16) {
      int32_t upper = (value + 128) >> 8;
      high[i] = (int8_t)upper;
      low[i] = (int8_t)(value - upper * 256);
      sums[0] += upper;
      sums[1] += value - upper * 256;
    } else {
      high[i] = (int8_t)value;
      sums[0] += value;
    }
  }
}

#if defined(__AVX512VNNI__)

// 16 bf16 numbers as float32; of fewer than 16 the others are 0.
JB_INLINE __m512 load_bf16(const uint16_t* x, int64_t count) {
  __m256i h = count >= 16 ? _mm256_loadu_si256((const __m256i*)x)
                          : _mm256_maskz_loadu_epi16((__mmask16)((1u << (count > 0 ? count : 0)) - 1), x);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

// Makes NaN and infinity NaN, and anything else 0.
JB_INLINE __m512 poison_of(__m512 v) { return _mm512_mul_ps(v, _mm512_setzero_ps()); }

// 16 numbers to high and, with 16 bits, low; sums are added to.
template <int BITS>
JB_INLINE void quantise_16(__m512 v, __m512 inverse, int8_t* high, int8_t* low, __m512i* high_sum,
                           __m512i* low_sum) {
  __m512i value = _mm512_cvtps_epi32(_mm512_mul_ps(v, inverse));
  if (BITS == 16) {
    __m512i upper = _mm512_srai_epi32(_mm512_add_epi32(value, _mm512_set1_epi32(128)), 8);
    __m512i rest = _mm512_sub_epi32(value, _mm512_slli_epi32(upper, 8));
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(upper));
    _mm_storeu_si128((__m128i*)low, _mm512_cvtepi32_epi8(rest));
    *high_sum = _mm512_add_epi32(*high_sum, upper);
    *low_sum = _mm512_add_epi32(*low_sum, rest);
  } else {
    _mm_storeu_si128((__m128i*)high, _mm512_cvtepi32_epi8(value));
    *high_sum = _mm512_add_epi32(*high_sum, value);
  }
}

// A row x[k] to high[padded] and low[padded]; k up to `padded`, a multiple of 16, is 0. Returns the
// scale; sums[0] and sums[1] are what high and low add up to.
template <int BITS>
JB_INLINE float quantise_row(const uint16_t* x, int64_t k, int64_t padded, int8_t* high, int8_t* low,
                             int32_t* sums) {
  __m512 most = _mm512_setzero_ps(), poison = _mm512_setzero_ps();
  for (int64_t i = 0; i < k; i += 16) {
    __m512 v = load_bf16(x + i, k - i);
    most = _mm512_max_ps(_mm512_abs_ps(v), most);
    poison = _mm512_add_ps(poison, poison_of(v));
  }
  float largest = _mm512_reduce_max_ps(most);
  float inverse = quantise_inverse(largest, BITS);
  __m512i high_sum = _mm512_setzero_si512(), low_sum = _mm512_setzero_si512();
  for (int64_t i = 0; i < padded; i += 16) {
    quantise_16<BITS>(load_bf16(x + i, k - i), _mm512_set1_ps(inverse), high + i, low + i, &high_sum,
                      &low_sum);
  }
  sums[0] = _mm512_reduce_add_epi32(high_sum);
  sums[1] = _mm512_reduce_add_epi32(low_sum);
  return (inverse > 0 ? largest / quantise_range(BITS) : 0) + _mm512_reduce_add_ps(poison);
}

#endif

}  // namespace JB_ISA
}  // namespace jb
