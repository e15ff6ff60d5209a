"""A small sample of models at every lower level of instruction sets, and without the library.

`make isa` runs far more at each.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jubako.kernels.cpu import library

ROOT = Path(__file__).parents[2]

NATIVE = (
    "tests/models/test_native.py::test_as_a_program[gemma3]",
    "tests/models/test_native.py::test_chunks_and_neighbours_change_no_bit[llama]",
    "tests/sampling/test_head_sampler.py::test_a_row_does_not_depend_on_its_neighbours",
)
ANYWHERE = ("tests/models/test_exactness.py", "tests/models/test_native.py", "-k", "gemma3")


def passed(level: str, tests: tuple[str, ...]) -> str:
    """The last line of a run of `tests` at `level`."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *tests],
        cwd=ROOT,
        env=os.environ | {library.ISA_VARIABLE: level},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.parametrize("level", library.isa_levels()[:-1])
def test_models_at_lower_levels(level: str) -> None:
    assert f"{len(NATIVE)} passed" in passed(level, NATIVE)


def test_models_without_the_library() -> None:
    last = passed(library.WITHOUT, ANYWHERE)
    assert "passed" in last
    assert "skipped" in last


def test_a_level_that_does_not_exist_is_an_error() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "jubako.kernels.cpu.library"],
        cwd=ROOT,
        env=os.environ | {library.ISA_VARIABLE: "abacus"},
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0 or not library.PATH.exists()
    assert "abacus" in done.stderr or not library.PATH.exists()
