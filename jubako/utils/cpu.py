"""What can this machine's processor do, and how much memory is there?"""

from __future__ import annotations

import functools
import os
import platform
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
_CGROUP = Path("/sys/fs/cgroup")


@functools.cache
def instruction_sets() -> frozenset[str]:
    """Names of the instruction sets, as Linux spells them (`avx2`, `amx_bf16`, `asimd`, `bf16`).

    Empty where `/proc/cpuinfo` does not exist or names none.
    """
    return parse_flags(_read(CPUINFO))


def parse_flags(cpuinfo: str) -> frozenset[str]:
    """Flags of the first processor in `/proc/cpuinfo` (x86 `flags`, Arm `Features`)."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() in ("flags", "features"):
            return frozenset(value.split())
    return frozenset()


def computes_bfloat16(flags: frozenset[str] | None = None) -> bool:
    """Whether the processor multiplies bfloat16 itself; elsewhere float32 is faster and exact."""
    flags = instruction_sets() if flags is None else flags
    return bool(flags & {"amx_bf16", "avx512_bf16", "avx_ne_convert", "bf16", "svebf16"})


@functools.cache
def processor_name() -> str:
    """The processor's name for people, for example in `jubako doctor`."""
    for line in _read(CPUINFO).splitlines():
        name, _, value = line.partition(":")
        if name.strip().lower() == "model name":
            return value.strip()
    return platform.processor() or platform.machine()


def num_cores() -> int:
    """Cores that this process may use: its affinity mask, cut by the container's CPU quota."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:
        cores = os.cpu_count() or 1
    quota = _cgroup_cores()
    return max(1, cores if quota is None else min(cores, quota))


def available_memory() -> int:
    """Bytes that can be allocated without swapping, within the container's limit."""
    import psutil

    available = int(psutil.virtual_memory().available)
    limit, used = _cgroup_number("memory.max"), _cgroup_number("memory.current")
    if limit is not None and used is not None:
        available = min(available, max(0, limit - used + _reclaimable()))
    return available


def total_memory() -> int:
    """Bytes of memory of the machine, or of the container where that is less."""
    import psutil

    total = int(psutil.virtual_memory().total)
    limit = _cgroup_number("memory.max")
    return total if limit is None else min(total, limit)


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _cgroup_number(name: str) -> int | None:
    text = _read(_CGROUP / name).strip()
    return int(text) if text.isdecimal() else None


def _cgroup_cores() -> int | None:
    quota, _, period = _read(_CGROUP / "cpu.max").strip().partition(" ")
    if not quota.isdecimal() or not period.isdecimal() or int(period) == 0:
        return None
    return max(1, int(quota) // int(period))


def _reclaimable() -> int:
    """Bytes of page cache that count as used by the container but go when memory is asked for."""
    for line in _read(_CGROUP / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name == "inactive_file" and value.isdecimal():
            return int(value)
    return 0
