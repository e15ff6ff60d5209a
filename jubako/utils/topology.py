"""On which processors should threads that compute run?

One thread a physical core: a core's vector and matrix units, which hardware threads share, are busy
with one. Cores of one NUMA node before those of the next, so that few threads share its memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from jubako.utils.cpu import num_cores

SYSTEM = Path("/sys/devices/system")


@dataclass(frozen=True, slots=True)
class Processor:
    """A hardware thread, as the system numbers it."""

    number: int
    node: int
    core: tuple[int, int]
    """Package, and core within it."""


def processors(allowed: Iterable[int], system: Path = SYSTEM) -> list[Processor]:
    """Those of `allowed`; each is a core of its own on node 0 where the system tells nothing."""
    nodes = {
        number: int(folder.name.removeprefix("node"))
        for folder in sorted(system.glob("node/node[0-9]*"))
        for number in parse_cpu_list(_read(folder / "cpulist"))
    }
    found = []
    for number in sorted(allowed):
        topology = system / "cpu" / f"cpu{number}" / "topology"
        package, core = (_read(topology / f) for f in ("physical_package_id", "core_id"))
        place = (int(package or 0), int(core)) if core.isdecimal() else (-1, number)
        found.append(Processor(number, nodes.get(number, 0), place))
    return found


def thread_plan(num_threads: int, candidates: Iterable[Processor]) -> list[int]:
    """A processor for each thread, in the order in which neighbouring work is shared out.

    The node with the most cores comes first; further hardware threads of cores come when the cores
    are used up. Empty if there are fewer processors than threads: then none should be pinned.
    """
    taken: dict[tuple[int, int], int] = {}
    ranked: list[tuple[int, Processor]] = []
    for processor in candidates:
        turn = taken.get(processor.core, 0)
        taken[processor.core] = turn + 1
        ranked.append((turn, processor))
    size = {
        processor.node: len({p.core for _, p in ranked if p.node == processor.node})
        for _, processor in ranked
    }
    ranked.sort(key=lambda item: (item[0], -size[item[1].node], item[1].node, item[1].number))
    if len(ranked) < num_threads:
        return []
    chosen = [processor for _, processor in ranked[:num_threads]]
    chosen.sort(key=lambda processor: (-size[processor.node], processor.node, processor.number))
    return [processor.number for processor in chosen]


def callers_processors(plan: Sequence[int], candidates: Iterable[Processor]) -> list[int]:
    """Where the thread that hands out the work may run, which is the first of `plan` itself.

    Wherever no other thread of the plan is, nor a sibling of one.
    """
    everyone = list(candidates)
    busy = {processor.core for processor in everyone if processor.number in plan[1:]}
    return [p.number for p in everyone if p.core not in busy] or [plan[0]]


def compute_threads() -> int:
    """How many threads compute best: one a core that this process may use."""
    own = own_processors()
    cores = len({processor.core for processor in own})
    return min(num_cores(), cores) if own else num_cores()


def own_processors() -> list[Processor]:
    """Those that this process may use; empty where the system does not say."""
    if not hasattr(os, "sched_getaffinity"):
        return []
    return processors(os.sched_getaffinity(0))


def parse_cpu_list(text: str) -> list[int]:
    """Numbers from "0-3,8,10-11"."""
    numbers: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first.isdecimal():
            numbers += range(int(first), int(last or first) + 1)
    return numbers


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
