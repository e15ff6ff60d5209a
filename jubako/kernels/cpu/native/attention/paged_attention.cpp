// Which way does each task of a step's paged attention go?

#include "stream.h"
#if defined(JB_ISA_amx)
#include "tiles.h"
#endif

namespace jb {
namespace JB_ISA {

template <class Load>
static void attend(Plan& plan, const Team& team, const AttentionArgs& a, const Task& t,
                   int64_t element_bytes) {
#if defined(JB_ISA_amx)
  if (t.tiled) return attend_tiled<Load>(plan, a, t);
#endif
  attend_streaming<Load>(plan, team, a, t, element_bytes);
}

static void run_task(Plan& plan, const Team& team, const AttentionArgs& a, const Task& t) {
  switch (a.kv_dtype) {
    case F32: return attend<LoadF32>(plan, team, a, t, 4);
    case BF16: return attend<LoadBF16>(plan, team, a, t, 2);
    case F16: return attend<LoadF16>(plan, team, a, t, 2);
    case KV_I8: return attend<LoadI8>(plan, team, a, t, 1);
    case KV_F8E4M3: return attend<LoadF8>(plan, team, a, t, 1);
  }
}

static void paged_attention(Team& team, const void* args) {
  const AttentionArgs& a = *(const AttentionArgs*)args;
  if (a.step->num_reqs == 0) return;
#if defined(JB_ISA_amx)
  Plan plan(a, team.size, team.rank, tile_rows_from(a));
#else
  Plan plan(a, team.size, team.rank, 0);
#endif
  for (int64_t number; (number = plan.claim(team)) < plan.num_tasks();) {
    run_task(plan, team, a, plan.task(number));
  }
#if defined(JB_ISA_amx)
  release_tiles();
#endif
  plan.finish(team);
}

void fill_attention(OpTable& table) { table.fn[OP_PAGED_ATTENTION] = paged_attention; }

}  // namespace JB_ISA
}  // namespace jb
