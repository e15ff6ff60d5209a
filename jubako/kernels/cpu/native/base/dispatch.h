// Which level's functions run on this processor?
#pragma once

#include "optable.h"

namespace jb {

// The ops for this processor, or for the level that JUBAKO_CPU_ISA names if the processor has it.
// Decided at the first call.
const OpTable& ops();

// The chosen level's name; null if JUBAKO_CPU_ISA names none that can run here.
const char* level_name();

// Names of the levels that can run here, separated by spaces, ascending.
const char* level_names();

}  // namespace jb
