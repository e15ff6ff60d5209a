#include "pool.h"

#include <cstdlib>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "dispatch.h"

namespace jb {
namespace {

constexpr int64_t SPIN_NS = 50000;

int64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

void pause_a_little() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// Return when `word` is no longer `old`: spin for a while, then sleep.
void wait_while_equal(std::atomic<int>& word, int old, std::atomic<int>& sleepers) {
  int64_t end = 0;
  for (int i = 0;; ++i) {
    if (word.load(std::memory_order_acquire) != old) return;
    pause_a_little();
    if (i % 64 == 63) {
      int64_t now = now_ns();
      if (end == 0) end = now + SPIN_NS;
      if (now > end) break;
    }
  }
  // The waker stores the word and then looks at the sleepers: both sides are sequentially
  // consistent, so it sees us, or the kernel sees its store.
  sleepers.fetch_add(1);
  while (word.load() == old) {
    syscall(SYS_futex, (int*)&word, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
  }
  sleepers.fetch_sub(1);
}

void wake(std::atomic<int>& word, std::atomic<int>& sleepers) {
  if (sleepers.load() > 0) {
    syscall(SYS_futex, (int*)&word, FUTEX_WAKE_PRIVATE, 1 << 30, nullptr, nullptr, 0);
  }
}

struct Start {
  Pool* pool;
  int rank;
};

}  // namespace

void Team::barrier() {
  if (size > 1) ((Pool*)barrier_state)->barrier();
}

Pool::Pool(int size)
    : size_(size < 1 ? 1 : size), owner_(getpid()), pinned_(false), epoch_(0), idle_(0),
      arrived_(0), phase_(0), waiting_(0) {
  pthread_mutex_init(&mutex_, nullptr);
  threads_ = (pthread_t*)calloc(size_, sizeof(pthread_t));
  for (int rank = 1; rank < size_; ++rank) {
    Start* start = new Start{this, rank};
    if (pthread_create(&threads_[rank], nullptr, worker, start) != 0) {
      delete start;
      size_ = rank;
    }
  }
}

void Pool::pin(const int32_t* workers, const int32_t* callers, int32_t num_callers) {
  if (size_ < 2 || num_callers < 1) return;
  for (int rank = 1; rank < size_; ++rank) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(workers[rank - 1], &one);
    if (pthread_setaffinity_np(threads_[rank], sizeof one, &one) != 0) return;
  }
  CPU_ZERO(&callers_);
  for (int i = 0; i < num_callers; ++i) CPU_SET(callers[i], &callers_);
  pinned_ = true;
}

Pool::~Pool() {
  if (getpid() == owner_) {
    quit_ = true;
    epoch_.fetch_add(1);
    wake(epoch_, idle_);
    for (int rank = 1; rank < size_; ++rank) pthread_join(threads_[rank], nullptr);
  }
  free(threads_);
  pthread_mutex_destroy(&mutex_);
}

void* Pool::worker(void* start) {
  Start own = *(Start*)start;
  delete (Start*)start;
  own.pool->work(own.rank);
  return nullptr;
}

void Pool::work(int rank) {
  int seen = 0;
  for (;;) {
    wait_while_equal(epoch_, seen, idle_);
    ++seen;
    if (quit_) return;
    walk(rank, job_ops_, job_count_, nullptr);
  }
}

void Pool::walk(int rank, const ProgramOp* program, int64_t count, int64_t* times) {
  Team team{rank, size_, this};
  const OpTable& table = ops();
  int64_t last = times ? now_ns() : 0;
  for (int64_t i = 0; i < count; ++i) {
    table.fn[program[i].op](team, program[i].args);
    barrier();
    if (times) {
      int64_t now = now_ns();
      times[i] = now - last;
      last = now;
    }
  }
}

void Pool::run(const ProgramOp* program, int64_t count, int64_t* times) {
  if (size_ == 1 || getpid() != owner_) {
    // A fork has no workers: its only thread does everything.
    Team team{0, 1, nullptr};
    const OpTable& table = ops();
    int64_t last = times ? now_ns() : 0;
    for (int64_t i = 0; i < count; ++i) {
      table.fn[program[i].op](team, program[i].args);
      if (times) {
        int64_t now = now_ns();
        times[i] = now - last;
        last = now;
      }
    }
    return;
  }
  pthread_mutex_lock(&mutex_);
  // Two system calls are nothing to a whole step; one op is worth them only when the caller sits
  // on a worker's core.
  bool move = pinned_ && (count > 8 || !CPU_ISSET(sched_getcpu(), &callers_));
  cpu_set_t before;
  if (move) {
    move = sched_getaffinity(0, sizeof before, &before) == 0 &&
           sched_setaffinity(0, sizeof callers_, &callers_) == 0;
  }
  job_ops_ = program;
  job_count_ = count;
  epoch_.fetch_add(1);
  wake(epoch_, idle_);
  walk(0, program, count, times);
  if (move) sched_setaffinity(0, sizeof before, &before);
  pthread_mutex_unlock(&mutex_);
}

void Pool::barrier() {
  int phase = phase_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size_) {
    arrived_.store(0, std::memory_order_relaxed);
    phase_.store(phase + 1);
    wake(phase_, waiting_);
    return;
  }
  wait_while_equal(phase_, phase, waiting_);
}

}  // namespace jb
