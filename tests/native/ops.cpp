// Do the native ops give what plain arithmetic gives, on a processor of another architecture?
//
//   ops LIBRARY     runs at the level that JUBAKO_CPU_ISA names; prints what differs; 0 if nothing
//
// Weights and inputs come from a fixed generator; expected results are computed here, in double.
// `tests/kernels/cpu` says much more of the same ops where Python runs.

#include <dlfcn.h>

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include "../../jubako/kernels/cpu/native/attention/args.h"
#include "../../jubako/kernels/cpu/native/base/optable.h"
#include "../../jubako/kernels/cpu/native/elementwise/args.h"
#include "../../jubako/kernels/cpu/native/head/args.h"
#include "../../jubako/kernels/cpu/native/matmul/args.h"

using namespace jb;

namespace {

struct Library {
  void* pool;
  void (*run)(void*, int32_t, const void*);
};

Library lib;
int failures = 0, checks = 0;

uint64_t state = 88172645463325252ull;

// Uniform in [-1, 1).
double uniform() {
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (double)(int64_t)state / 9223372036854775808.0;
}

uint16_t rounded(float x) { return f32_to_bf16(x); }

// An array of `dtype`, beginning on a cache line, of which the library sees the bytes.
struct Array {
  int32_t dtype;
  std::vector<float> values;  // as they are after rounding
  void* data;

  Array(int64_t size, int32_t dtype, double scale = 1) : dtype(dtype), values(size) {
    data = aligned_alloc(64, (size * 4 + 127) / 64 * 64);
    for (int64_t i = 0; i < size; ++i) set(i, (float)(uniform() * scale));
  }
  ~Array() { free(data); }
  Array(const Array&) = delete;

  void set(int64_t i, float x) {
    if (dtype == F32) {
      ((float*)data)[i] = values[i] = x;
    } else {
      ((uint16_t*)data)[i] = rounded(x);
      values[i] = bf16_to_f32(rounded(x));
    }
  }
  double at(int64_t i) const { return load_f32(data, i, dtype); }
};

struct Scratch {
  void* data;
  int64_t bytes;
  explicit Scratch(int64_t bytes) : data(aligned_alloc(64, (bytes + 127) / 64 * 64)), bytes(bytes) {
    memset(data, 0xff, bytes);
  }
  ~Scratch() { free(data); }
};

// `got` may differ from `wanted` by `tolerance` of the largest of its row.
void check(const std::string& what, double got, double wanted, double largest, double tolerance) {
  ++checks;
  if (std::fabs(got - wanted) <= tolerance * largest) return;
  if (++failures < 30) std::printf("%s: %g instead of %g\n", what.c_str(), got, wanted);
}

struct Packed {
  Matrix matrix{};
  std::vector<char> room;
  std::vector<float> scales;

  Packed(int32_t kind, int64_t n, int64_t k, const Array& weight) {
    matrix.kind = kind;
    matrix.n = n;
    matrix.k = k;
    room.resize(matrix_panels(&matrix) * panel_bytes(&matrix) + 128);
    scales.resize(matrix_panels(&matrix) * PANEL);
    matrix.data = (char*)(((uintptr_t)room.data() + 63) / 64 * 64);
    matrix.scales = scales.data();
    PackArgs args{};
    args.to = &matrix;
    args.from = weight.data;
    args.from_stride = k * dtype_size(weight.dtype);
    args.rows = n;
    args.from_kind = weight.dtype;
    lib.run(lib.pool, OP_PACK, &args);
  }
};

double largest_of(const std::vector<double>& values) {
  double most = 1e-30;
  for (double v : values) most = std::fmax(most, std::fabs(v));
  return most;
}

void matmul_and_heads(int32_t kind, int32_t dtype, double tolerance, const char* name) {
  const int64_t sizes[][2] = {{70, 64}, {33, 320}, {130, 96}};
  for (auto [n, k] : sizes) {
    Array weight(n * k, dtype);
    Packed packed(kind, n, k, weight);
    for (int64_t rows : {1, 2, 5, 16, 33, 70}) {
      Array x(rows * k, dtype);
      std::vector<float> y(rows * n, NAN);
      Scratch scratch(matmul_scratch_bytes(2, rows, k));
      MatmulArgs args{};
      args.rows = &rows;
      args.x = x.data;
      args.ldx = k;
      args.w = &packed.matrix;
      args.y = y.data();
      args.ldy = n;
      args.scratch = scratch.data;
      args.scratch_bytes = scratch.bytes;
      args.parts = 1;
      args.x_dtype = dtype;
      args.y_dtype = F32;
      args.activation_bits = 8;
      lib.run(lib.pool, OP_MATMUL, &args);
      for (int64_t r = 0; r < rows; ++r) {
        std::vector<double> exact(n);
        for (int64_t j = 0; j < n; ++j) {
          for (int64_t i = 0; i < k; ++i) exact[j] += (double)x.values[r * k + i] * weight.values[j * k + i];
        }
        double largest = largest_of(exact);
        for (int64_t j = 0; j < n; ++j) check(std::string("product ") + name, y[r * n + j], exact[j], largest, tolerance);
      }
      // What the heads choose must be the largest of these very products.
      std::vector<int64_t> best(rows);
      Scratch more(head_candidates_scratch_bytes(2, rows, k));
      HeadGreedyArgs greedy{};
      greedy.rows = &rows;
      greedy.x = x.data;
      greedy.ldx = k;
      greedy.w = &packed.matrix;
      greedy.ids = best.data();
      greedy.scratch = more.data;
      greedy.scratch_bytes = more.bytes;
      greedy.x_dtype = dtype;
      greedy.round_dtype = F32;
      greedy.activation_bits = 8;
      lib.run(lib.pool, OP_HEAD_GREEDY, &greedy);
      std::vector<HeadRow> wanted(rows, HeadRow{3, HEAD_SUM, 1.0f, {0, 0, 0}});
      std::vector<int32_t> found(rows), ids(rows * HEAD_CAPACITY);
      std::vector<float> values(rows * HEAD_CAPACITY);
      std::vector<double> sums(rows * 2);
      HeadCandidatesArgs some{};
      some.rows = &rows;
      some.x = x.data;
      some.ldx = k;
      some.w = &packed.matrix;
      some.wanted = wanted.data();
      some.found = found.data();
      some.ids = ids.data();
      some.values = values.data();
      some.sums = sums.data();
      some.scratch = more.data;
      some.scratch_bytes = more.bytes;
      some.x_dtype = dtype;
      some.round_dtype = F32;
      some.activation_bits = 8;
      lib.run(lib.pool, OP_HEAD_CANDIDATES, &some);
      for (int64_t r = 0; r < rows; ++r) {
        int64_t expected = 0;
        double sum = 0;
        for (int64_t j = 0; j < n; ++j) {
          if (y[r * n + j] > y[r * n + expected]) expected = j;
          sum += std::exp((double)y[r * n + j]);
        }
        check(std::string("greedy ") + name, (double)best[r], (double)expected, 1, 0);
        check(std::string("log of sum ") + name, sums[2 * r], std::log(sum), 1, 1e-4);
        bool has_best = false;
        for (int32_t i = 0; i < found[r]; ++i) has_best |= ids[r * HEAD_CAPACITY + i] == expected;
        check(std::string("candidates ") + name, found[r] >= 3 && has_best, 1, 1, 0);
      }
      std::vector<float> embedded(rows * k, NAN);
      std::vector<int64_t> tokens(rows);
      for (int64_t r = 0; r < rows; ++r) tokens[r] = (r * 7) % n;
      EmbedArgs embed{};
      embed.rows = &rows;
      embed.ids = tokens.data();
      embed.w = &packed.matrix;
      embed.y = embedded.data();
      embed.ldy = k;
      embed.scale = 1;
      embed.ids_bits = 64;
      embed.y_dtype = F32;
      lib.run(lib.pool, OP_EMBED, &embed);
      for (int64_t r = 0; r < rows; ++r) {
        for (int64_t i = 0; i < k; ++i) {
          check(std::string("embedding ") + name, embedded[r * k + i], weight.values[tokens[r] * k + i], 1, kind == MATRIX_F32 || kind == MATRIX_BF16 ? 0 : tolerance * 10);
        }
      }
    }
  }
}

void norms(int32_t dtype) {
  const int64_t rows = 5, size = 333;
  Array x(rows * size, F32);
  Array y(rows * size, dtype);
  std::vector<float> weight(size);
  for (float& w : weight) w = (float)uniform();
  NormArgs args{};
  args.rows = &rows;
  args.x = x.data;
  args.y = y.data;
  args.weight = weight.data();
  args.size = size;
  args.ldx = args.ldy = size;
  args.x_dtype = F32;
  args.y_dtype = dtype;
  args.kind = 0;
  args.eps = 1e-6f;
  lib.run(lib.pool, OP_NORM, &args);
  for (int64_t r = 0; r < rows; ++r) {
    double squares = 0;
    for (int64_t i = 0; i < size; ++i) squares += (double)x.values[r * size + i] * x.values[r * size + i];
    double factor = 1 / std::sqrt(squares / size + 1e-6);
    for (int64_t i = 0; i < size; ++i) {
      check("norm", y.at(r * size + i), x.values[r * size + i] * factor * weight[i], 2, dtype == F32 ? 1e-6 : 4e-3);
    }
  }
}

// Causal attention of one request whose `length` keys and values lie in pages, for its last `query`
// tokens.
void attention(int32_t dtype, int64_t query, int64_t length, int32_t window) {
  const int64_t heads = 4, kv_heads = 2, size = 64, block = 16;
  const int64_t blocks = (length + block - 1) / block;
  const int64_t slab = block * size, block_size = kv_heads * 2 * slab;
  Array pages(blocks * block_size, dtype), q(query * heads * size, dtype), out(query * heads * size, dtype);
  std::vector<int32_t> table(blocks), starts{0, (int32_t)query}, lengths{(int32_t)length};
  for (int64_t i = 0; i < blocks; ++i) table[i] = (int32_t)(blocks - 1 - i);
  std::vector<int64_t> slots(query, -1);
  AttentionStep step{};
  step.num_reqs = 1;
  step.num_tokens = query;
  step.query_start_loc = starts.data();
  step.seq_lens = lengths.data();
  step.block_table = table.data();
  step.block_table_stride = blocks;
  step.slot_mapping = slots.data();
  step.max_query_len = (int32_t)query;
  step.max_seq_len = (int32_t)length;
  Scratch scratch(8 << 20);
  memset(scratch.data, 0, scratch.bytes);
  const int64_t bytes = dtype_size(dtype);
  AttentionArgs args{};
  args.step = &step;
  args.q = q.data;
  args.q_stride = heads * size;
  args.out = out.data;
  args.out_stride = heads * size;
  args.dtype = args.kv_dtype = dtype;
  args.pages = pages.data;
  args.block_stride = block_size * bytes;
  args.head_stride = 2 * slab * bytes;
  args.row_stride = size * bytes;
  args.value_offset = slab * bytes;
  args.num_heads = (int32_t)heads;
  args.num_kv_heads = (int32_t)kv_heads;
  args.head_size = args.value_size = (int32_t)size;
  args.block_size = (int32_t)block;
  args.scale = 0.5f;
  args.window = window;
  args.causal = 1;
  args.scratch = scratch.data;
  args.scratch_bytes = scratch.bytes;
  lib.run(lib.pool, OP_PAGED_ATTENTION, &args);
  for (int64_t t = 0; t < query; ++t) {
    int64_t position = length - query + t;
    int64_t first = window && position - window + 1 > 0 ? position - window + 1 : 0;
    for (int64_t h = 0; h < heads; ++h) {
      auto key = [&](int64_t p, bool value) {
        return table[p / block] * block_size + (h * kv_heads / heads) * 2 * slab + value * slab + p % block * size;
      };
      std::vector<double> result(size);
      double total = 0;
      for (int64_t p = first; p <= position; ++p) {
        double score = 0;
        for (int64_t i = 0; i < size; ++i) score += (double)q.values[(t * heads + h) * size + i] * pages.values[key(p, false) + i];
        double weight = std::exp(score * 0.5);
        total += weight;
        for (int64_t i = 0; i < size; ++i) result[i] += weight * pages.values[key(p, true) + i];
      }
      for (int64_t i = 0; i < size; ++i) {
        check("attention", out.at((t * heads + h) * size + i), result[i] / total, 1, dtype == F32 ? 1e-5 : 1e-2);
      }
    }
  }
}

}  // namespace

int main(int count, char** arguments) {
  void* handle = count > 1 ? dlopen(arguments[1], RTLD_NOW) : nullptr;
  if (!handle) {
    std::printf("cannot load the library: %s\n", count > 1 ? dlerror() : "name it");
    return 2;
  }
  auto isa = (const char* (*)())dlsym(handle, "jb_isa");
  auto create = (void* (*)(int32_t))dlsym(handle, "jb_pool_create");
  lib.run = (void (*)(void*, int32_t, const void*))dlsym(handle, "jb_run");
  if (!isa()) {
    std::printf("this level cannot run here\n");
    return 2;
  }
  lib.pool = create(2);
  matmul_and_heads(MATRIX_F32, F32, 3e-6, "F32");
  matmul_and_heads(MATRIX_BF16, BF16, 3e-6, "BF16");
  matmul_and_heads(MATRIX_INT8, BF16, 3e-2, "INT8");
  matmul_and_heads(MATRIX_Q8_0, BF16, 3e-2, "Q8_0");
  matmul_and_heads(MATRIX_Q4_0, BF16, 3e-1, "Q4_0");
  for (int32_t dtype : {F32, BF16}) {
    norms(dtype);
    attention(dtype, 1, 1, 0);
    attention(dtype, 1, 100, 0);
    attention(dtype, 1, 100, 17);
    attention(dtype, 40, 75, 0);
    attention(dtype, 40, 75, 9);
  }
  std::printf("%s: %d of %d results differ\n", isa(), failures, checks);
  return failures > 0;
}
