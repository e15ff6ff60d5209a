// Into which tasks does a step's attention fall, and who does which?
//
// Every thread makes the same plan. Tasks are then taken from a shared counter, since cores may not
// be equally fast; a result does not depend on who computes it.
#pragma once

#include "args.h"
#include "layout.h"

namespace jb {
namespace JB_ISA {

struct KeyRange {
  int32_t begin, end;
};

// The keys that the query at position `at` of a request of `seq_len` positions sees.
static inline KeyRange visible_keys(const AttentionArgs& a, int64_t token, int64_t at,
                                    int64_t seq_len) {
  const AttentionStep& step = *a.step;
  if (step.key_end) return {step.key_begin ? step.key_begin[token] : 0, step.key_end[token]};
  int64_t begin = 0, end = seq_len;
  if (a.causal && at + 1 < end) end = at + 1;
  if (a.window > 0) {
    if (at - a.window + 1 > begin) begin = at - a.window + 1;
    if (!a.causal && at + a.window < end) end = at + a.window;
  }
  if (a.chunk > 0) {
    int64_t first = at / a.chunk * a.chunk;
    if (first > begin) begin = first;
    if (first + a.chunk < end) end = first + a.chunk;
  }
  if (end < begin) end = begin;
  return {(int32_t)begin, (int32_t)end};
}

// One task: rows of one KV head of one request over a range of its keys.
struct Task {
  int64_t req;
  int64_t kv_head;
  int64_t first_query, num_queries;  // within the request
  int64_t first_head, num_heads;     // within the KV head's group
  int64_t first_part, num_parts;     // of keys
  int64_t base_part;                 // the first one of the request's
  bool tiled;                        // computed on tile registers
  bool kept;                         // a split request: the part's result is kept to be merged
  int64_t counter;                   // of the parts that are done
  int64_t total_parts;
  float* parts;                      // where part 0 of these rows is kept
  int64_t part_floats;               // from one part to the next
};

struct RequestPlan {
  int64_t first_task;
  int64_t keep_at;        // floats from the kept area's beginning; -1: not split
  int32_t first_counter;
  int32_t first_part, num_parts;
  int32_t req;
};
static_assert(sizeof(RequestPlan) <= PLAN_BYTES_PER_REQUEST, "a plan must fit its scratch");

class Plan {
 public:
  // `tile_rows`: from how many rows on a request is computed on tile registers; 0: never.
  Plan(const AttentionArgs& a, int threads, int rank, int64_t tile_rows) : a_(a) {
    char* scratch = (char*)a.scratch;
    header_ = (ScratchHeader*)scratch;
    int64_t own = thread_bytes(a.head_size, a.value_size);
    int64_t plans = plan_bytes(a.step->num_reqs);
    char* areas = scratch + sizeof(ScratchHeader);
    own_ = areas + rank * (own + plans);
    requests_ = (RequestPlan*)(own_ + own);
    kept_ = (float*)(areas + threads * (own + plans));
    int64_t left = (scratch + a.scratch_bytes - (char*)kept_) / 4;
    group_ = a.num_heads / a.num_kv_heads;
    head_splits_ = (group_ + STREAM_ROWS - 1) / STREAM_ROWS;
    heads_per_split_ = (group_ + head_splits_ - 1) / head_splits_;
    head_splits_ = (group_ + heads_per_split_ - 1) / heads_per_split_;
    stream_queries_ = STREAM_ROWS / heads_per_split_;
    tile_rows_ = group_ <= FEW_TILE_ROWS ? tile_rows : 0;
    tile_queries_ = (enough_rows(threads) ? TILE_ROWS : FEW_TILE_ROWS) / group_;
    make(threads, left);
  }

  int64_t num_tasks() const { return num_tasks_; }
  char* own() const { return own_; }

  // The next task that nobody has; num_tasks() or more if there is none.
  int64_t claim(const Team& team) {
    if (team.size == 1) return next_++;
    return __atomic_fetch_add(&header_->next_task, 1, __ATOMIC_RELAXED);
  }

  // To be called once by every thread when it finds no task any more.
  void finish(const Team& team) {
    if (team.size == 1) return;
    if (__atomic_fetch_add(&header_->threads_done, 1, __ATOMIC_ACQ_REL) == team.size - 1) {
      header_->next_task = 0;
      header_->threads_done = 0;
    }
  }

  // Whether all parts of a split request's rows are there, with this one.
  bool last_part(const Team& team, const Task& task) {
    int32_t* done = &header_->parts_done[task.counter];
    if (__atomic_add_fetch(done, 1, __ATOMIC_ACQ_REL) < task.total_parts) return false;
    *done = 0;
    return true;
  }

  Task task(int64_t number) const {
    int64_t low = 0, high = num_requests_ - 1;
    while (low < high) {
      int64_t middle = (low + high + 1) / 2;
      if (requests_[middle].first_task <= number) {
        low = middle;
      } else {
        high = middle - 1;
      }
    }
    const RequestPlan& r = requests_[low];
    int64_t rest = number - r.first_task;
    int64_t queries = query_len(r.req);
    Task t = {};
    t.req = r.req;
    t.first_part = t.base_part = r.first_part;
    t.num_parts = t.total_parts = r.num_parts;
    t.tiled = is_tiled(queries);
    int64_t splits = t.tiled ? 1 : head_splits_;
    if (r.keep_at >= 0) {
      int64_t part = rest % r.num_parts;
      rest /= r.num_parts;
      t.kept = true;
      t.first_part = r.first_part + part;
      t.num_parts = 1;
      t.counter = r.first_counter + rest;
      t.part_floats = heads_per_split_ * queries * kept_row_floats(a_.value_size);
      t.parts = kept_ + r.keep_at + rest * r.num_parts * t.part_floats;
    }
    int64_t split = rest % splits;
    rest /= splits;
    t.kv_head = rest % a_.num_kv_heads;
    rest /= a_.num_kv_heads;
    // The last queries see most keys: they come first.
    int64_t per_tile = t.tiled ? tile_queries_ : stream_queries_;
    int64_t tiles = (queries + per_tile - 1) / per_tile;
    t.first_query = (tiles - 1 - rest) * per_tile;
    t.num_queries = queries - t.first_query < per_tile ? queries - t.first_query : per_tile;
    t.first_head = t.tiled ? 0 : split * heads_per_split_;
    t.num_heads = t.tiled ? group_ : heads_per_split_;
    if (t.first_head + t.num_heads > group_) t.num_heads = group_ - t.first_head;
    return t;
  }

 private:
  int64_t query_len(int64_t i) const {
    return a_.step->query_start_loc[i + 1] - a_.step->query_start_loc[i];
  }
  bool is_tiled(int64_t queries) const {
    return tile_rows_ > 0 && queries * group_ >= tile_rows_;
  }

  // Whether every thread gets several tasks even if they are large.
  bool enough_rows(int threads) const {
    if (tile_rows_ <= 0) return false;
    int64_t rows = 0;
    for (int64_t i = 0; i < a_.step->num_reqs; ++i) {
      if (is_tiled(query_len(i))) rows += query_len(i) * a_.num_heads;
    }
    return threads == 1 || rows >= 8 * threads * TILE_ROWS;
  }

  // The parts of the keys that any query of a request sees.
  void set_parts(RequestPlan& r) const {
    int64_t queries = query_len(r.req), seq_len = a_.step->seq_lens[r.req];
    int64_t token = a_.step->query_start_loc[r.req];
    int64_t begin, end;
    if (a_.step->key_end) {
      begin = seq_len, end = 0;
      for (int64_t i = 0; i < queries; ++i) {
        KeyRange keys = visible_keys(a_, token + i, 0, seq_len);
        if (keys.begin < begin) begin = keys.begin;
        if (keys.end > end) end = keys.end;
      }
      if (end < begin) end = begin;
    } else {
      begin = visible_keys(a_, token, seq_len - queries, seq_len).begin;
      end = visible_keys(a_, token + queries - 1, seq_len - 1, seq_len).end;
    }
    r.first_part = begin / PART;
    r.num_parts = (end + PART - 1) / PART - r.first_part;
    if (r.num_parts < 1) r.num_parts = 1;
  }

  void make(int threads, int64_t left) {
    const AttentionStep& step = *a_.step;
    // Requests of many tasks first, whose ends are then filled up with small ones.
    num_requests_ = 0;
    int64_t work = 0;
    for (int pass = 0; pass < 2; ++pass) {
      for (int64_t i = 0; i < step.num_reqs; ++i) {
        int64_t queries = query_len(i);
        if (queries <= 0 || (queries > stream_queries_ ? 0 : 1) != pass) continue;
        RequestPlan& r = requests_[num_requests_++];
        r.req = i;
        set_parts(r);
        int64_t tiles = (queries + stream_queries_ - 1) / stream_queries_;
        work += r.num_parts * tiles;
      }
    }
    int64_t counters = 0, keep_at = 0;
    num_tasks_ = 0;
    for (int64_t i = 0; i < num_requests_; ++i) {
      RequestPlan& r = requests_[i];
      int64_t queries = query_len(r.req);
      bool tiled = is_tiled(queries);
      int64_t per_tile = tiled ? tile_queries_ : stream_queries_;
      int64_t tiles = (queries + per_tile - 1) / per_tile;
      int64_t units = tiles * a_.num_kv_heads * (tiled ? 1 : head_splits_);
      r.first_task = num_tasks_;
      r.keep_at = -1;
      int64_t floats = units * r.num_parts * heads_per_split_ * queries *
                       kept_row_floats(a_.value_size);
      if (threads > 1 && !tiled && tiles == 1 && r.num_parts > 1 &&
          r.num_parts * 8 * threads > work * a_.num_kv_heads &&
          keep_at + floats <= left && counters + units <= MERGE_COUNTERS) {
        r.keep_at = keep_at;
        r.first_counter = counters;
        keep_at += floats;
        counters += units;
        units *= r.num_parts;
      }
      num_tasks_ += units;
    }
  }

  const AttentionArgs& a_;
  ScratchHeader* header_;
  char* own_;
  RequestPlan* requests_;
  float* kept_;
  int64_t num_requests_;
  int64_t num_tasks_;
  int64_t next_ = 0;
  int64_t group_;
  int64_t head_splits_;
  int64_t heads_per_split_;
  int64_t stream_queries_;
  int64_t tile_queries_;
  int64_t tile_rows_;
};

}  // namespace JB_ISA
}  // namespace jb
