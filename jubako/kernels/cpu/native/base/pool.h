// Which threads run the ops, and how do they wait for work and for each other?
#pragma once

#include <atomic>
#include <pthread.h>
#include <sched.h>
#include <sys/types.h>

#include "optable.h"

namespace jb {

struct ProgramOp {
  int64_t op;
  const void* args;
};

// A team of threads; the calling thread is rank 0. One job at a time: callers queue.
class Pool {
 public:
  explicit Pool(int size);
  ~Pool();

  int size() const { return size_; }

  // Put each worker on a processor of its own, by rank from 1 on, and callers on these while a
  // program runs. At most once, before the first run.
  void pin(const int32_t* workers, const int32_t* callers, int32_t num_callers);

  // Walk `ops` on all threads with a barrier after each. `times`, if not null, takes the
  // nanoseconds of each op as rank 0 sees them.
  void run(const ProgramOp* ops, int64_t count, int64_t* times);

  void barrier();

 private:
  static void* worker(void* start);
  void work(int rank);
  void walk(int rank, const ProgramOp* ops, int64_t count, int64_t* times);

  int size_;
  pid_t owner_;
  pthread_t* threads_;
  cpu_set_t callers_;
  bool pinned_;
  pthread_mutex_t mutex_;

  // The job; written before `epoch_` says that it is there.
  const ProgramOp* job_ops_ = nullptr;
  int64_t job_count_ = 0;
  bool quit_ = false;

  alignas(64) std::atomic<int> epoch_;
  std::atomic<int> idle_;
  alignas(64) std::atomic<int> arrived_;
  alignas(64) std::atomic<int> phase_;
  std::atomic<int> waiting_;
};

}  // namespace jb
