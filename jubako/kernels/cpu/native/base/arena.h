// Where do packed weights, pages and buffers live?
#pragma once

#include <cstdint>

namespace jb {

// `bytes` of zeroed memory on huge pages where the system has them, or null. Anonymous, since file
// mappings do not get huge pages.
void* arena_alloc(int64_t bytes);
void arena_free(void* start, int64_t bytes);

}  // namespace jb
