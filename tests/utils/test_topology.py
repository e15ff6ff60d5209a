"""Which processors threads are put on, on machines of several makes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jubako.utils import topology
from jubako.utils.topology import (
    callers_processors,
    compute_threads,
    parse_cpu_list,
    processors,
    thread_plan,
)


def machine(root: Path, nodes: dict[int, dict[int, list[int]]]) -> Path:
    """A /sys of nodes that are packages: node → core → its hardware threads."""
    for node, cores in nodes.items():
        cpus = [cpu for threads in cores.values() for cpu in threads]
        folder = root / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(",".join(map(str, sorted(cpus))) + "\n")
        for core, threads in cores.items():
            for cpu in threads:
                topology = root / "cpu" / f"cpu{cpu}" / "topology"
                topology.mkdir(parents=True)
                (topology / "core_id").write_text(f"{core}\n")
                (topology / "physical_package_id").write_text(f"{node}\n")
    return root


@pytest.fixture
def two_sockets(tmp_path: Path) -> Path:
    """Two nodes of two cores of two hardware threads; siblings are 4 apart, as often."""
    return machine(tmp_path, {0: {0: [0, 4], 1: [1, 5]}, 1: {0: [2, 6], 1: [3, 7]}})


@pytest.mark.parametrize(
    ("num_threads", "allowed", "plan"),
    [
        (1, range(8), [0]),
        (2, range(8), [0, 1]),
        (3, range(8), [0, 1, 2]),
        (4, range(8), [0, 1, 2, 3]),
        (6, range(8), [0, 1, 4, 5, 2, 3]),
        (8, range(8), [0, 1, 4, 5, 2, 3, 6, 7]),
        (9, range(8), []),
        # A container that was given the second node and one core of the first.
        (2, [0, 2, 3, 6, 7], [2, 3]),
        (3, [0, 2, 3, 6, 7], [2, 3, 0]),
        # Nothing but siblings.
        (2, [0, 4], [0, 4]),
    ],
)
def test_cores_of_a_node_come_first_and_siblings_last(
    two_sockets: Path, num_threads: int, allowed: list[int], plan: list[int]
) -> None:
    assert thread_plan(num_threads, processors(allowed, two_sockets)) == plan


@pytest.mark.parametrize(
    ("plan", "allowed", "callers"),
    [
        ([0, 1], range(8), [0, 2, 3, 4, 6, 7]),
        ([0, 1, 2, 3], range(8), [0, 4]),
        ([0, 4], [0, 4], [0]),  # nowhere is nobody
    ],
)
def test_the_caller_keeps_off_the_cores_of_the_workers(
    two_sockets: Path, plan: list[int], allowed: list[int], callers: list[int]
) -> None:
    assert callers_processors(plan, processors(allowed, two_sockets)) == callers


@pytest.mark.parametrize(("quota", "threads"), [(16, 4), (3, 3)])
def test_cores_are_counted_not_hardware_threads(
    two_sockets: Path, monkeypatch: pytest.MonkeyPatch, quota: int, threads: int
) -> None:
    monkeypatch.setattr(topology, "num_cores", lambda: quota)
    monkeypatch.setattr(topology, "own_processors", lambda: processors(range(8), two_sockets))
    assert compute_threads() == threads
    monkeypatch.setattr(topology, "own_processors", list)
    assert compute_threads() == quota


def test_where_the_system_tells_nothing_every_processor_is_a_core(tmp_path: Path) -> None:
    assert thread_plan(2, processors([3, 5], tmp_path)) == [3, 5]


def test_lists_of_processors() -> None:
    assert parse_cpu_list("0-3,8,10-11\n") == [0, 1, 2, 3, 8, 10, 11]
    assert parse_cpu_list("") == []
