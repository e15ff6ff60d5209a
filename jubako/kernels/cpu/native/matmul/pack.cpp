// From rows of a checkpoint to the packed layout: numbers re-ordered, ggml's blocks taken apart
// without rounding, floats quantised where the matrix holds integers.

#include "args.h"
#include "layout.h"
#include "quantise.h"
#include "unpack.h"

namespace jb {
namespace JB_ISA {
namespace {

enum : int32_t { FROM_BLOCKS = 16 };

JB_INLINE uint32_t load32(const void* p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}

JB_INLINE void store32(void* p, uint32_t v) { memcpy(p, &v, 4); }

JB_INLINE uint16_t f32_to_f16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  uint32_t sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x47800000) return (uint16_t)(sign | 0x7c00);
  float rest;
  if (bits < 0x38800000) {
    // Subnormal: adding 0.5 leaves the integer multiple of 2^-24 in the last bits.
    memcpy(&rest, &bits, 4);
    rest += 0.5f;
    memcpy(&bits, &rest, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1) - (112u << 23);
  return (uint16_t)(sign | bits >> 13);
}

// 32 stored quants of one lane to a group.
JB_INLINE void put_group(int32_t kind, char* group, int lane, const uint8_t* q) {
  char* to = group + 4 * lane;
  if (kind == MATRIX_Q8_0) {
    for (int row = 0; row < 8; ++row) store32(to + 64 * row, load32(q + 4 * row));
    return;
  }
  for (int row = 0; row < 4; ++row) {
    store32(to + 64 * row, (load32(q + 4 * row) & 0x0f0f0f0fu) |
                               (load32(q + 4 * row + 16) & 0x0f0f0f0fu) << 4);
  }
  if (has_fifth_bit(kind)) {
    uint32_t high = 0;
    for (int row = 0; row < 8; ++row) high |= (load32(q + 4 * row) >> 4 & 0x01010101u) << row;
    store32(to + 256, high);
  } else if (kind == MATRIX_Q6_K) {
    for (int half = 0; half < 2; ++half) {
      uint32_t high = 0;
      for (int t = 0; t < 4; ++t) {
        high |= (load32(q + 4 * (4 * half + t)) >> 4 & 0x03030303u) << 2 * t;
      }
      store32(to + 256 + 64 * half, high);
    }
  }
}

JB_INLINE void put_half(char* scales, int index, int lane, const uint8_t* half) {
  memcpy(scales + 32 * index + 2 * lane, half, 2);
}

// One block of a row in ggml's format to lane `lane` of a tile's unit.
JB_INLINE void put_block(int32_t kind, const uint8_t* block, char* scales, char* numbers, int lane) {
  uint8_t q[256];
  switch (kind) {
    case MATRIX_Q8_0:
      put_half(scales, 0, lane, block);
      for (int i = 0; i < 32; ++i) q[i] = block[2 + i] ^ 0x80;
      break;
    case MATRIX_Q4_0:
    case MATRIX_Q4_1:
    case MATRIX_Q5_0:
    case MATRIX_Q5_1: {
      put_half(scales, 0, lane, block);
      block += 2;
      if (has_minimum(kind)) {
        put_half(scales, 1, lane, block);
        block += 2;
      }
      uint32_t high = 0;
      if (has_fifth_bit(kind)) {
        high = load32(block);
        block += 4;
      }
      for (int i = 0; i < 16; ++i) {
        q[i] = (uint8_t)((block[i] & 15) | (high >> i & 1) << 4);
        q[16 + i] = (uint8_t)(block[i] >> 4 | (high >> (16 + i) & 1) << 4);
      }
      break;
    }
    case MATRIX_Q4_K:
    case MATRIX_Q5_K: {
      put_half(scales, 0, lane, block);
      put_half(scales, 1, lane, block + 2);
      const uint8_t* packed = block + 4;
      uint32_t words[3] = {0, 0, 0};
      for (int g = 0; g < 8; ++g) {
        uint32_t scale, minimum;
        if (g < 4) {
          scale = packed[g] & 63;
          minimum = packed[4 + g] & 63;
        } else {
          scale = (packed[4 + g] & 15) | packed[g - 4] >> 6 << 4;
          minimum = packed[4 + g] >> 4 | packed[g] >> 6 << 4;
        }
        words[0] |= (scale & 15) << 4 * g;
        words[1] |= (minimum & 15) << 4 * g;
        words[2] |= scale >> 4 << 2 * g | minimum >> 4 << (16 + 2 * g);
      }
      for (int i = 0; i < 3; ++i) store32(scales + 64 * (1 + i) + 4 * lane, words[i]);
      const uint8_t* high = block + 16;
      const uint8_t* low = kind == MATRIX_Q5_K ? block + 48 : block + 16;
      for (int g = 0; g < 8; ++g) {
        for (int i = 0; i < 32; ++i) {
          int value = low[32 * (g / 2) + i] >> 4 * (g % 2) & 15;
          if (kind == MATRIX_Q5_K) value |= (high[i] >> g & 1) << 4;
          q[32 * g + i] = (uint8_t)value;
        }
      }
      break;
    }
    case MATRIX_Q6_K: {
      put_half(scales, 0, lane, block + 208);
      for (int i = 0; i < 16; ++i) scales[32 + 16 * i + lane] = (char)block[192 + i];
      for (int g = 0; g < 8; ++g) {
        const uint8_t* low = block + 64 * (g / 4) + 32 * (g % 2);
        const uint8_t* high = block + 128 + 32 * (g / 4);
        for (int i = 0; i < 32; ++i) {
          q[32 * g + i] = (uint8_t)((low[i] >> 4 * (g % 4 / 2) & 15) | (high[i] >> 2 * (g % 4) & 3) << 4);
        }
      }
      break;
    }
  }
  int groups = (int)(matrix_unit(kind).k / 32);
  for (int g = 0; g < groups; ++g) put_group(kind, numbers + g * group_bytes(kind), lane, q + 32 * g);
}

JB_INLINE int64_t block_bytes(int32_t kind) {
  Unit unit = matrix_unit(kind);
  return (unit.scales + unit.numbers) / TILE;
}

JB_INLINE float squared_error(const float* x, float d, float m, float inverse, int offset) {
  float error = 0;
  for (int i = 0; i < 32; ++i) {
    float q = (x[i] - m) * inverse + (float)offset;
    q = q < 0 ? 0 : q > 15 ? 15 : q;
    q = (q + 12582912.0f) - 12582912.0f;
    float e = x[i] - ((q - (float)offset) * d + m);
    error += e * e;
  }
  return error;
}

// Four bits for each of 32 floats: of a few scales near the one that spans them, the one with the
// least squared error.
JB_INLINE void put_floats_4_bits(int32_t kind, const float* x, char* scales, char* numbers, int lane) {
  float low = x[0], high = x[0];
  for (int i = 1; i < 32; ++i) {
    low = x[i] < low ? x[i] : low;
    high = x[i] > high ? x[i] : high;
  }
  bool minimum = has_minimum(kind);
  int offset = minimum ? 0 : 8;
  float m = minimum ? f16_to_f32(f32_to_f16(low)) : 0;
  // The largest number of the symmetric kind becomes -8, which has no opposite.
  float span = minimum ? (high - low) / 15 : (-low > high ? -low : -high) / 8;
  if (!minimum) span = -low > high ? -low / 8 : -high / 8;
  float best_d = 0, best_error = 0;
  bool found = false;
  for (int step = 0; step < 9; ++step) {
    float d = f16_to_f32(f32_to_f16(span * (1.04f - 0.03f * (float)step)));
    if (d == 0) break;
    float error = squared_error(x, d, m, 1.0f / d, offset);
    if (!found || error < best_error) {
      found = true;
      best_d = d;
      best_error = error;
    }
  }
  float inverse = best_d != 0 ? 1.0f / best_d : 0;
  uint8_t q[32];
  for (int i = 0; i < 32; ++i) {
    float value = (x[i] - m) * inverse + (float)offset;
    value = value < 0 ? 0 : value > 15 ? 15 : value;
    q[i] = (uint8_t)(int)((value + 12582912.0f) - 12582912.0f);
  }
  uint16_t h = f32_to_f16(best_d);
  put_half(scales, 0, lane, (const uint8_t*)&h);
  if (minimum) {
    h = f32_to_f16(m);
    put_half(scales, 1, lane, (const uint8_t*)&h);
  }
  put_group(kind, numbers, lane, q);
}

JB_INLINE void put_floats_q8_0(const float* x, char* scales, char* numbers, int lane) {
  float largest = 0;
  for (int i = 0; i < 32; ++i) {
    float a = __builtin_fabsf(x[i]);
    largest = a > largest ? a : largest;
  }
  uint16_t h = f32_to_f16(largest / 127);
  float d = f16_to_f32(h), inverse = d > 0 ? 1 / d : 0;
  uint8_t q[32];
  for (int i = 0; i < 32; ++i) {
    float value = (x[i] * inverse + 12582912.0f) - 12582912.0f;
    value = value < -127 ? -127 : value > 127 ? 127 : value;
    q[i] = (uint8_t)((int)value + 128);
  }
  put_half(scales, 0, lane, (const uint8_t*)&h);
  put_group(MATRIX_Q8_0, numbers, lane, q);
}

// Elements begin .. begin + count of a row of floats.
JB_INLINE void read_floats(const char* row, int32_t dtype, int64_t begin, int64_t count, float* to) {
  if (dtype == F32) {
    memcpy(to, (const float*)row + begin, count * 4);
  } else if (dtype == BF16) {
    const uint16_t* h = (const uint16_t*)row + begin;
    for (int64_t i = 0; i < count; ++i) to[i] = bf16_to_f32(h[i]);
  } else {
    const uint16_t* h = (const uint16_t*)row + begin;
    for (int64_t i = 0; i < count; ++i) to[i] = f16_to_f32(h[i]);
  }
}

JB_INLINE void put_floats(const Matrix* w, const char* row, int32_t dtype, int64_t begin, int64_t count,
                          float inverse, char* scales, char* numbers, int lane) {
  if (w->kind == MATRIX_BF16 && dtype == BF16 && count % 2 == 0) {
    const char* from = row + begin * 2;
    for (int64_t i = 0; i < count / 2; ++i) store32(numbers + 64 * i + 4 * lane, load32(from + 4 * i));
    return;
  }
  float x[64];
  read_floats(row, dtype, begin, count, x);
  switch (w->kind) {
    case MATRIX_F32: memcpy(numbers + 4 * lane, x, 4); break;
    case MATRIX_BF16:
      for (int64_t i = 0; i < count; ++i) {
        uint16_t h = f32_to_bf16(x[i]);
        memcpy(numbers + 64 * (i / 2) + 4 * lane + 2 * (i % 2), &h, 2);
      }
      break;
    case MATRIX_INT8: {
      int8_t q[64];
      int32_t sums[2] = {0, 0};
      for (int64_t i = count; i < 64; ++i) x[i] = 0;
      quantise_run(x, 64, inverse, 8, q, nullptr, sums);
      for (int64_t i = 0; i < 64; ++i) {
        numbers[64 * (i / 4) + 4 * lane + i % 4] = (char)((uint8_t)q[i] ^ 0x80);
      }
      break;
    }
    case MATRIX_Q8_0: put_floats_q8_0(x, scales, numbers, lane); break;
    case MATRIX_Q4_0:
    case MATRIX_Q4_1: put_floats_4_bits(w->kind, x, scales, numbers, lane); break;
  }
}

JB_INLINE float largest_of(const char* row, int32_t dtype, int64_t k) {
  float largest = 0;
  for (int64_t i = 0; i < k; ++i) {
    float a = __builtin_fabsf(load_f32(row, i, dtype));
    largest = a > largest ? a : largest;
  }
  return largest;
}

// Rows [begin, end) of the source, all in one tile.
void pack_tile(const PackArgs* a, int64_t begin, int64_t end) {
  const Matrix* w = a->to;
  const Unit unit = matrix_unit(w->kind);
  const Place place = matrix_place(w, a->row + begin, a->half);
  char* at = (char*)panel_start(w, place.panel);
  const bool blocks = a->from_kind >= FROM_BLOCKS;
  float inverse[TILE];
  if (w->kind == MATRIX_INT8) {
    for (int64_t r = begin; r < end; ++r) {
      float largest = largest_of((const char*)a->from + r * a->from_stride, a->from_kind, w->k);
      inverse[r - begin] = quantise_inverse(largest, 8);
      w->scales[place.panel * PANEL + TILE * place.tile + place.lane + (r - begin)] =
          inverse[r - begin] > 0 ? largest / quantise_range(8) : 0;
    }
  }
  // Unit by unit, as the rows of a tile share its cache lines.
  for (int64_t k = 0; k < w->k; k += unit.k, at += unit_bytes(unit)) {
    char* scales = (char*)unit_scales(unit, at, place.tile);
    char* numbers = (char*)unit_numbers(unit, at, place.tile);
    int64_t count = w->k - k < unit.k ? w->k - k : unit.k;
    for (int64_t r = begin; r < end; ++r) {
      const char* row = (const char*)a->from + r * a->from_stride;
      int lane = place.lane + (int)(r - begin);
      if (blocks) {
        put_block(w->kind, (const uint8_t*)row + k / unit.k * block_bytes(w->kind), scales, numbers, lane);
      } else {
        put_floats(w, row, a->from_kind, k, count, inverse[r - begin], scales, numbers, lane);
      }
    }
  }
}

}  // namespace

void pack(Team& team, const void* args) {
  const PackArgs* a = (const PackArgs*)args;
  if (a->rows <= 0) return;
  // Pieces that end where tiles do.
  int64_t before = a->row % TILE;
  Range own = team.range(before + a->rows, TILE);
  for (int64_t at = own.begin; at < own.end; at += TILE) {
    int64_t begin = at - before, end = begin + TILE;
    pack_tile(a, begin < 0 ? 0 : begin, end < a->rows ? end : a->rows);
  }
}

}  // namespace JB_ISA
}  // namespace jb
