// What can a program call? Mirrored in Python (jubako/kernels/cpu/library.py).

#include <cstdint>
#include <new>

#include "../base/arena.h"
#include "../base/dispatch.h"
#include "../base/pool.h"

#define JB_API extern "C" __attribute__((visibility("default")))

// Changes with every change of an args struct or of a function here.
JB_API int32_t jb_version() { return 2; }

// The level in use; null if JUBAKO_CPU_ISA names one that cannot run here.
JB_API const char* jb_isa() { return jb::level_name(); }

// The levels that can run here, separated by spaces, ascending.
JB_API const char* jb_isa_levels() { return jb::level_names(); }

JB_API int32_t jb_has_op(int32_t op) {
  return op >= 0 && op < jb::NUM_OPS && jb::ops().fn[op] != nullptr;
}

JB_API jb::Pool* jb_pool_create(int32_t size) { return new (std::nothrow) jb::Pool(size); }

// `workers` [size - 1] and `callers` are numbers of processors.
JB_API void jb_pool_pin(jb::Pool* pool, const int32_t* workers, const int32_t* callers,
                        int32_t num_callers) {
  pool->pin(workers, callers, num_callers);
}

JB_API void jb_pool_destroy(jb::Pool* pool) { delete pool; }

JB_API int32_t jb_pool_size(jb::Pool* pool) { return pool->size(); }

// One op on all threads; returns when it is done.
JB_API void jb_run(jb::Pool* pool, int32_t op, const void* args) {
  jb::ProgramOp one{op, args};
  pool->run(&one, 1, nullptr);
}

// A list of ops in one parallel region. `times` [count] takes each op's nanoseconds, or is null.
JB_API void jb_run_program(jb::Pool* pool, const jb::ProgramOp* ops, int64_t count,
                           int64_t* times) {
  pool->run(ops, count, times);
}

JB_API void* jb_alloc(int64_t bytes) { return jb::arena_alloc(bytes); }

JB_API void jb_free(void* start, int64_t bytes) { jb::arena_free(start, bytes); }
