// How much scratch does attention need?
// levels: none

#include "args.h"
#include "layout.h"

namespace jb {

constexpr int64_t MAX_KEPT = 64 << 20;

int64_t attention_scratch_bytes(int32_t threads, int32_t num_heads, int32_t head_size,
                                int32_t value_size, int64_t max_reqs, int64_t max_seq_len) {
  int64_t needed = (int64_t)sizeof(ScratchHeader) +
                   threads * (thread_bytes(head_size, value_size) + plan_bytes(max_reqs));
  // A request is split when it is more than 1 / (8 · threads) of a step's work.
  int64_t parts = 8 * threads * (max_seq_len / PART + 1);
  int64_t kept = parts * num_heads * kept_row_floats(value_size) * 4;
  if (threads == 1) kept = 0;
  return round_up(needed + (kept < MAX_KEPT ? kept : MAX_KEPT), 4096);
}

}  // namespace jb

extern "C" __attribute__((visibility("default"))) int64_t jb_attention_scratch_bytes(
    int32_t threads, int32_t num_heads, int32_t head_size, int32_t value_size, int64_t max_reqs,
    int64_t max_seq_len) {
  return jb::attention_scratch_bytes(threads, num_heads, head_size, value_size, max_reqs,
                                     max_seq_len);
}
