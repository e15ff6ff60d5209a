// How do keys and values that are computed already reach the pages?

#include "../base/vec.h"
#include "args.h"
#include "page_rows.h"

namespace jb {
namespace JB_ISA {
namespace {

void kv_write(Team& team, const void* p) {
  const KvWriteArgs& a = *(const KvWriteArgs*)p;
  int64_t D = a.head_size, Hkv = a.num_kv_heads;
  float x[MAX_HEAD_SIZE];
  Range part = team.range(*a.rows * Hkv * 2);
  for (int64_t item = part.begin; item < part.end; ++item) {
    int64_t token = item / (2 * Hkv), head = item / 2 % Hkv, kind = item % 2;
    int64_t slot = a.slots[token];
    if (slot < 0) continue;
    int64_t place = kind ? token * a.value_token + head * a.value_head
                         : token * a.key_token + head * a.key_head;
    const char* from = (const char*)(kind ? a.value : a.key) + place * dtype_size(a.dtype);
    JB_FOR_16(i, n, D) store_16(x, i, F32, load_16(from, i, a.dtype, n), n);
    write_page_row(x, page_row(a, slot, head, kind), a.kv_dtype, D);
  }
}

}  // namespace

void fill_kv_write(OpTable& table) { table.fn[OP_KV_WRITE] = kv_write; }

}  // namespace JB_ISA
}  // namespace jb
