// How are the gated activations and changes of dtype computed?

#include "../base/vec.h"
#include "args.h"
#include "rows.h"

namespace jb {
namespace JB_ISA {
namespace {

void gated_activation(Team& team, const void* p) {
  const GatedActivationArgs& a = *(const GatedActivationArgs*)p;
  Range part = team.range(*a.rows * pieces_of(a.size));
  for (int64_t item = part.begin; item < part.end; ++item) {
    const auto [row, start, size] = piece_of(item, a.size);
    const void* x = row_of(a.x, row, a.ldx, a.x_dtype);
    void* y = row_of(a.y, row, a.ldy, a.y_dtype);
    JB_FOR_16(i, n, size) {
      f32x16 gate = load_16(x, start + i, a.x_dtype, n);
      f32x16 up = load_16(x, a.size + start + i, a.x_dtype, n);
      f32x16 g = a.activation == SILU        ? v_silu(gate)
                 : a.activation == GELU_TANH ? v_gelu_tanh(gate)
                                             : v_gelu(gate);
      store_16(y, start + i, a.y_dtype, g * up, n);
    }
  }
}

void convert(Team& team, const void* p) {
  const ConvertArgs& a = *(const ConvertArgs*)p;
  Range part = team.range(*a.rows);
  for (int64_t row = part.begin; row < part.end; ++row) {
    const void* x = row_of(a.x, a.index ? a.index[row] : row, a.ldx, a.x_dtype);
    void* y = row_of(a.y, row, a.ldy, a.y_dtype);
    JB_FOR_16(i, n, a.size) {
      store_16(y, i, a.y_dtype, load_16(x, i, a.x_dtype, n) * a.scale, n);
    }
  }
}

}  // namespace

void fill_activation(OpTable& table) {
  table.fn[OP_GATED_ACTIVATION] = gated_activation;
  table.fn[OP_CONVERT] = convert;
}

void fill_norm(OpTable& table);
void fill_rope(OpTable& table);
void fill_kv_write(OpTable& table);
void fill_pointwise(OpTable& table);

void fill_elementwise(OpTable& table) {
  fill_norm(table);
  fill_rope(table);
  fill_kv_write(table);
  fill_pointwise(table);
  fill_activation(table);
}

}  // namespace JB_ISA
}  // namespace jb
