#include "dispatch.h"

#include <cstdlib>
#include <cstring>
#include <pthread.h>

#include "levels.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

// An area that has nothing for a level leaves its function undefined: the address is then null.
#define DECLARE(level, area) \
  namespace jb {             \
  namespace level {          \
  __attribute__((weak)) void fill_##area(OpTable& table); \
  }                          \
  }
#define DECLARE_LEVEL(level) JB_AREAS(DECLARE, level)
JB_LEVELS(DECLARE_LEVEL)

namespace jb {
namespace {

const char* const NAMES[] = {
#define NAME(level) #level,
    JB_LEVELS(NAME)
#undef NAME
};
constexpr int NUM_LEVELS = sizeof(NAMES) / sizeof(NAMES[0]);

#if defined(__x86_64__)

bool amx_permitted() {
  // Linux gives a process the tile registers' state only when it asks.
  constexpr long ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

int best_level() {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return 0;
  bool fma = c >> 12 & 1, osxsave = c >> 27 & 1, f16c = c >> 29 & 1;
  if (!osxsave || !fma || !f16c) return 0;
  unsigned xcr0, high;
  __asm__ volatile("xgetbv" : "=a"(xcr0), "=d"(high) : "c"(0));
  if ((xcr0 & 0x6) != 0x6) return 0;
  unsigned b7, c7, d7, a71 = 0, unused;
  if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7)) return 0;
  if (a >= 1) __get_cpuid_count(7, 1, &a71, &unused, &unused, &unused);
  bool avx2 = b7 >> 5 & 1, bmi1 = b7 >> 3 & 1, bmi2 = b7 >> 8 & 1;
  if (!avx2 || !bmi1 || !bmi2) return 0;
  constexpr unsigned F = 1u << 16, DQ = 1u << 17, CD = 1u << 28, BW = 1u << 30, VL = 1u << 31;
  constexpr unsigned ALL = F | DQ | CD | BW | VL;
  bool vnni = c7 >> 11 & 1;
  if ((b7 & ALL) != ALL || !vnni || (xcr0 & 0xe0) != 0xe0) return 1;
  if (!(a71 >> 5 & 1)) return 2;
  constexpr unsigned AMX = 1u << 22 | 1u << 24 | 1u << 25;
  bool vbmi = c7 >> 1 & 1;
  if ((d7 & AMX) != AMX || !vbmi || (xcr0 & 0x60000) != 0x60000 || !amx_permitted()) return 3;
  return 4;
}

#elif defined(__aarch64__)

int best_level() {
  unsigned long has = getauxval(AT_HWCAP), has2 = getauxval(AT_HWCAP2);
  constexpr unsigned long DOTPROD = 1ul << 20, HALF = 1ul << 10, BF16 = 1ul << 14, I8MM = 1ul << 13;
  if (!(has & DOTPROD) || !(has & HALF)) return 0;
  return (has2 & BF16) && (has2 & I8MM) ? 2 : 1;
}

#else

int best_level() { return 0; }

#endif

typedef void (*Fill)(OpTable&);

OpTable table;
int level = -1;
char names[256];
pthread_once_t once = PTHREAD_ONCE_INIT;

bool compiled(int wanted) {
  int i = 0;
#define COMPILED(name) \
  if (i++ == wanted) return name::fill_elementwise != nullptr;
  JB_LEVELS(COMPILED)
#undef COMPILED
  return false;
}

void choose() {
  int best = best_level();
  while (best > 0 && !compiled(best)) --best;
  const char* wanted = getenv("JUBAKO_CPU_ISA");
  level = wanted && *wanted ? -1 : best;
  for (int i = 0; i <= best; ++i) {
    if (!compiled(i)) continue;
    if (names[0]) strcat(names, " ");
    strcat(names, NAMES[i]);
    if (wanted && strcmp(wanted, NAMES[i]) == 0) level = i;
  }
  int i = 0;
#define FILL(name, area) \
  if (i <= level && name::fill_##area != nullptr) name::fill_##area(table);
#define FILL_LEVEL(name)  \
  JB_AREAS(FILL, name)    \
  ++i;
  JB_LEVELS(FILL_LEVEL)
}

}  // namespace

const OpTable& ops() {
  pthread_once(&once, choose);
  return table;
}

const char* level_name() {
  ops();
  return level < 0 ? nullptr : NAMES[level];
}

const char* level_names() {
  ops();
  return names;
}

}  // namespace jb
