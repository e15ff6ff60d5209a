"""What is read from the machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jubako.utils import cpu

X86 = "processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 amx_bf16\n\nflags\t: other\n"
ARM = "processor\t: 0\nFeatures\t: fp asimd bf16 sve\n"


def test_flags_of_the_first_processor() -> None:
    assert cpu.parse_flags(X86) == {"fpu", "avx2", "amx_bf16"}
    assert cpu.parse_flags(ARM) == {"fp", "asimd", "bf16", "sve"}
    assert cpu.parse_flags("") == frozenset()


@pytest.mark.parametrize(
    ("flags", "answer"),
    [
        ({"avx2"}, False),
        ({"avx512f", "avx512_vnni"}, False),
        ({"avx512_bf16"}, True),
        ({"amx_bf16"}, True),
        ({"asimd", "bf16"}, True),
        (set(), False),
    ],
)
def test_which_processors_compute_in_bfloat16(flags: set[str], answer: bool) -> None:
    assert cpu.computes_bfloat16(frozenset(flags)) is answer


def test_container_limits_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    everything = cpu.available_memory(), cpu.total_memory()
    assert everything[1] >= everything[0] > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("900000\n")
    (tmp_path / "memory.stat").write_text("anon 1\ninactive_file 50000\n")
    assert cpu.available_memory() == 150_000
    assert cpu.total_memory() == 1_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert cpu.total_memory() == everything[1]


def test_cores_within_the_quota(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu, "_CGROUP", tmp_path)
    usable = len(os.sched_getaffinity(0))
    assert cpu.num_cores() == usable
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert cpu.num_cores() == 1
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert cpu.num_cores() == usable


def test_this_machine_has_a_name() -> None:
    assert cpu.processor_name()
