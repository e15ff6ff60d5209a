"""The native library at every level of instruction sets that this machine can run."""

from __future__ import annotations

import functools
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

import pytest

from jubako.kernels.cpu import library
from jubako.kernels.cpu.library import Pool

LEVELS = library.isa_levels()


@functools.cache
def pool_at(level: str, num_threads: int) -> Pool:
    """A pool of a library of its own, which runs at `level`."""
    with tempfile.TemporaryDirectory() as folder:
        # A library decides once, and a copy under another name is another library.
        copy = Path(folder) / "copy.so"
        shutil.copy(library.PATH, copy)
        library.library.cache_clear()
        try:
            with (
                mock.patch.object(library, "PATH", copy),
                mock.patch.dict(os.environ, JUBAKO_CPU_ISA=level),
            ):
                pool = Pool(num_threads)
                assert library.isa_level() == level
        finally:
            library.library.cache_clear()
    return pool


@pytest.fixture(params=LEVELS or [pytest.param("", marks=pytest.mark.skip("no native library"))])
def level(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def native_pool(level: str) -> Pool:
    """Two threads at `level`."""
    return pool_at(level, 2)
