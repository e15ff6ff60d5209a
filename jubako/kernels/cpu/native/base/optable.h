// Which ops are there, and which function runs each?
//
// An area numbers its ops from its base in its own args.h, mirrored in Python.
#pragma once

#include <cstdint>

#include "team.h"

namespace jb {

typedef void (*OpFn)(Team& team, const void* args);

enum : int32_t {
  ELEMENTWISE_OPS = 0,
  MATMUL_OPS = 32,
  HEAD_OPS = 64,
  ATTENTION_OPS = 96,
  RECURRENT_OPS = 128,
  MOE_OPS = 160,
  NUM_OPS = 192,
};

struct OpTable {
  OpFn fn[NUM_OPS];
};

}  // namespace jb
