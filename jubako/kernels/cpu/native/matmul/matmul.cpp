// y = x @ w.T with what follows it, and rows of a packed matrix.

#include "args.h"
#include "finish.h"
#include "pipeline_amx.h"
#include "product.h"

namespace jb {
namespace JB_ISA {
namespace {

#if JB_AMX

template <int EPILOGUE, int DTYPE, bool PAIRS>
struct FinishSink {
  const MatmulArgs* a;
  const RowsOfX* x;
  const Matrix* w;
  int64_t column;
  const float* bias;
  Outputs<EPILOGUE> outputs[2];
  SumScales<PAIRS> scales[2];

  JB_INLINE_MEMBER void open(int64_t panel, int64_t which) {
    outputs[which] = outputs_of<EPILOGUE>(w, panel, column, bias);
    scales[which].open(w, panel);
  }
  // Written lines must be read from memory first.
  JB_INLINE_MEMBER void fetch(int64_t which, int64_t r) const {
    const int64_t to = r * a->ldy + outputs[which].to;
    const char* y = (const char*)a->y + to * (DTYPE == F32 ? 4 : 2);
    __builtin_prefetch(y, 1);
    if (DTYPE == F32 && !Outputs<EPILOGUE>::GATED) __builtin_prefetch(y + 64, 1);
  }
  JB_INLINE_MEMBER void row(int64_t which, int64_t r, const float* c) const {
    const SumScales<PAIRS>& s = scales[which];
    finish_row<EPILOGUE, DTYPE>(a, outputs[which], r, s.value(*x, r, c, 0), s.value(*x, r, c, 1));
  }
};

template <int EPILOGUE, int DTYPE>
void finish_tiles(const MatmulArgs* a, const RowsOfX& x, const Matrix* w, int64_t column,
                  const float* bias, Range own, char* buffer) {
  if (x.form == FORM_INT8) {
    FinishSink<EPILOGUE, DTYPE, false> sink{a, &x, w, column, bias};
    run_tiles<false>(x, w, own, buffer, sink);
  } else {
    FinishSink<EPILOGUE, DTYPE, true> sink{a, &x, w, column, bias};
    run_tiles<true>(x, w, own, buffer, sink);
  }
}

#endif

void matmul(Team& team, const void* args) {
  const MatmulArgs* a = (const MatmulArgs*)args;
  const int64_t rows = *a->rows;
  if (rows <= 0) return;
  XRef ref{a->x, a->ldx, a->x_dtype, a->activation_bits, rows, a->w->k, (char*)a->scratch, a->scratch_bytes};
  char* buffer = thread_scratch(ref, team);
  RowsOfX x;
  x.form = FORM_NONE;
  int64_t column = 0, bias_at = 0;
  alignas(64) float c[GROUP * PANEL];
  product_begin(rows);
  for (int32_t part = 0; part < a->parts; ++part) {
    const Matrix* w = a->w + part;
    int32_t form = product_form(w->kind, a->x_dtype, rows);
    if (form != x.form) {
      // Others may still read x in the form before.
      if (x.form != FORM_NONE) team.barrier();
      prepare_rows(team, ref, form, &x);
    }
    Range own = team.range(matrix_panels(w));
    const float* bias = a->bias ? a->bias + bias_at : nullptr;
#if JB_AMX
    if (tiles_serve(x, w)) {
#define JB_TILES(EPILOGUE, DTYPE) finish_tiles<EPILOGUE, DTYPE>(a, x, w, column, bias, own, buffer)
      JB_EPILOGUES(a, JB_TILES)
#undef JB_TILES
      column += w->interleaved ? w->n / 2 : w->n;
      bias_at += w->n;
      continue;
    }
#endif
    int64_t chunk = rows_in_cache(2 * w->k);
    for (int64_t from = 0; from < rows; from += chunk) {
      int64_t to = from + chunk < rows ? from + chunk : rows;
      for (int64_t panel = own.begin; panel < own.end; ++panel) {
        const char* opened = open_panel(x, w, panel, buffer);
        for (int64_t first = from; first < to;) {
          RowGroup group = row_group(rows, first, to);
          int64_t wanted = group.count - group.skip;
          bool last = first + wanted >= to, more = panel + 1 < own.end;
          product_rows(x, w, panel, opened, group.start, group.count, c, last && more);
          // While results are finished, memory would have nothing to do.
          if (last && more) fetch_ahead(panel_start(w, panel + 1), wanted);
          finish(a, w, panel, column, bias, first, wanted, c + group.skip * PANEL);
          first += wanted;
        }
      }
    }
    column += w->interleaved ? w->n / 2 : w->n;
    bias_at += w->n;
  }
  product_end();
}

void embed(Team& team, const void* args) {
  const EmbedArgs* a = (const EmbedArgs*)args;
  const Matrix* w = a->w;
  // Pieces of rows, so that one token is divided, too.
  constexpr int64_t PIECE = 256;
  int64_t pieces = (w->k + PIECE - 1) / PIECE;
  Range own = team.range(*a->rows * pieces);
  for (int64_t i = own.begin; i < own.end; ++i) {
    int64_t row = i / pieces, begin = i % pieces * PIECE;
    int64_t end = begin + PIECE < w->k ? begin + PIECE : w->k;
    int64_t id = a->ids_bits == 64 ? ((const int64_t*)a->ids)[row] : ((const int32_t*)a->ids)[row];
    if (id < 0 || id >= w->n) id = 0;
    Place place = matrix_place(w, id, 0);
    for (int64_t k = begin; k < end; ++k) {
      float value = unpack_one(w, place.panel, place.tile, place.lane, k) * a->scale;
      if (a->y_dtype == F32) {
        ((float*)a->y)[row * a->ldy + k] = value;
      } else {
        ((uint16_t*)a->y)[row * a->ldy + k] = f32_to_bf16(value);
      }
    }
  }
}

}  // namespace

void pack(Team& team, const void* args);
void read(Team& team, const void* args);

void fill_matmul(OpTable& table) {
  table.fn[OP_PACK] = pack;
  table.fn[OP_MATMUL] = matmul;
  table.fn[OP_EMBED] = embed;
  table.fn[OP_READ] = read;
}

}  // namespace JB_ISA
}  // namespace jb
