"""How the native library is found, and how its threads run ops."""

from __future__ import annotations

import ctypes
import gc
import logging
import mmap
import os
import threading
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from jubako.errors import ConfigError
from jubako.kernels import registry
from jubako.kernels.cpu import library
from jubako.kernels.cpu.elementwise import OP_CONVERT, ConvertArgs
from jubako.kernels.cpu.library import Arena, Memory, Pool, discard, program_array

needs_library = pytest.mark.skipif(library.library() is None, reason="no native library")


@pytest.fixture
def other_library(monkeypatch: pytest.MonkeyPatch):
    """Let a test look for the library anew."""
    library.library.cache_clear()
    yield monkeypatch
    library.library.cache_clear()
    monkeypatch.undo()
    library.library.cache_clear()


class TestFinding:
    def test_without_the_library_torch_computes(
        self,
        other_library: pytest.MonkeyPatch,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        other_library.setattr(library, "PATH", tmp_path / "none.so")
        logging.getLogger("jubako").propagate = True
        with caplog.at_level("INFO", logger="jubako"):
            assert registry.available() == ("reference",)
            assert registry.available() == ("reference",)
        assert caplog.text.count("was not built") == 1
        with pytest.raises(ConfigError, match=r"kernels='cpu' is not available here"):
            registry.set_kernels("cpu")
        assert registry.set_kernels("auto").name == "reference"

    def test_a_file_that_is_no_library(
        self, other_library: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        path = tmp_path / "broken.so"
        path.write_bytes(b"nothing")
        other_library.setattr(library, "PATH", path)
        assert library.library() is None

    @needs_library
    def test_a_library_of_another_version(self, other_library: pytest.MonkeyPatch) -> None:
        other_library.setattr(library, "VERSION", library.VERSION + 1)
        assert library.library() is None

    @needs_library
    def test_levels_ascend_from_generic(self) -> None:
        levels = library.isa_levels()
        assert levels[0] == "generic"
        assert library.isa_level() in levels

    @needs_library
    def test_another_device_than_the_cpu_gets_torch(self) -> None:
        assert registry.set_kernels("auto", "cuda").name == "reference"
        assert registry.set_kernels("auto", "cpu").name == "cpu"


class Doubling:
    """`y = 2 x` for a few numbers."""

    def __init__(self, x: np.ndarray, y: np.ndarray) -> None:
        self.rows = ctypes.c_int64(len(x))
        self.args = ConvertArgs(
            rows=ctypes.addressof(self.rows),
            x=x.ctypes.data,
            y=y.ctypes.data,
            size=x.shape[1],
            ldx=x.shape[1],
            ldy=x.shape[1],
            scale=2.0,
        )


@needs_library
class TestPool:
    @pytest.mark.parametrize("num_threads", [1, 2, 3, 7])
    def test_ops_of_a_program_follow_each_other(self, num_threads: int) -> None:
        """Each op reads what other threads wrote in the one before."""
        buffers = [np.ones((41, 5), dtype=np.float32)]
        buffers += [np.zeros((41, 5), dtype=np.float32) for _ in range(20)]
        # Rows in reverse: what one thread wrote another reads.
        steps = [Doubling(a[::1], b) for a, b in pairwise(buffers)]
        index = np.arange(41)[::-1].copy()
        for step in steps:
            step.args.index = index.ctypes.data
        pool = Pool(num_threads)
        assert pool.num_threads == num_threads
        program = program_array([(OP_CONVERT, step.args) for step in steps])
        times = np.zeros(20, dtype=np.int64)
        for _ in range(50):
            buffers[-1][:] = 0
            pool.run_program(program, 20, times.ctypes.data)
            assert (buffers[-1] == 2.0**20).all()
        assert (times >= 0).all()
        assert times.sum() > 0

    def test_a_program_can_be_cut_short(self) -> None:
        x, y, z = (np.full((3, 4), i, dtype=np.float32) for i in (1, 0, 0))
        steps = [Doubling(x, y), Doubling(y, z)]
        program = program_array([(OP_CONVERT, step.args) for step in steps])
        Pool(2).run_program(program, 1)
        assert (y == 2).all()
        assert not z.any()

    def test_callers_from_several_threads_queue(self) -> None:
        pool = Pool(2)
        wrong = []

        def work(value: float) -> None:
            x = np.full((64, 33), value, dtype=np.float32)
            y = np.zeros_like(x)
            step = Doubling(x, y)
            for _ in range(200):
                y[:] = 0
                pool.run(OP_CONVERT, step.args)
                if not (y == 2 * value).all():
                    wrong.append(value)

        threads = [threading.Thread(target=work, args=(float(i),)) for i in range(1, 4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong

    def test_after_a_fork_the_child_works_alone(self) -> None:
        pool = Pool(2)
        x, y = np.ones((9, 3), dtype=np.float32), np.zeros((9, 3), dtype=np.float32)
        step = Doubling(x, y)
        child = os.fork()
        if child == 0:
            pool.run(OP_CONVERT, step.args)
            os._exit(0 if (y == 2).all() else 1)
        _, status = os.waitpid(child, 0)
        assert status == 0
        pool.run(OP_CONVERT, step.args)
        assert (y == 2).all()

    def test_the_callers_affinity_is_left_as_it_was(self) -> None:
        pool = Pool(2)
        x, y = np.ones((9, 3), dtype=np.float32), np.zeros((9, 3), dtype=np.float32)
        step = Doubling(x, y)
        before = os.sched_getaffinity(0)
        pool.run_program(program_array([(OP_CONVERT, step.args)] * 50), 50)
        assert os.sched_getaffinity(0) == before

    def test_threads_end_with_the_pool(self) -> None:
        def count() -> int:
            return len(os.listdir("/proc/self/task"))

        gc.collect()
        before = count()
        pool = Pool(4)
        assert count() == before + 3
        del pool
        gc.collect()
        assert count() == before

    def test_as_many_threads_as_torch_has(self) -> None:
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(3)
            kernels = registry.set_kernels("cpu")
            assert kernels.pool.num_threads == 3
            torch.set_num_threads(1)
            assert registry.set_kernels("cpu").pool.num_threads == 1
        finally:
            torch.set_num_threads(before)
            registry.set_kernels("auto")


@needs_library
class TestMemory:
    @pytest.mark.parametrize("num_bytes", [0, 1, 5000, 3 << 20])
    def test_is_zeroed_and_aligned(self, num_bytes: int) -> None:
        memory = Memory(num_bytes)
        assert memory.address % (4096 if num_bytes < 2 << 20 else 2 << 20) == 0
        assert not any(memory.buffer().raw)

    def test_lives_as_long_as_its_buffer(self) -> None:
        buffer = Memory(3 << 20).buffer()
        gc.collect()
        buffer[0] = b"x"
        assert buffer[0] == b"x"


@needs_library
class TestScratch:
    def test_it_does_not_grow_under_an_op_that_runs(self) -> None:
        scratch, order = library.Scratch(), []

        class Args:
            scratch = scratch_bytes = 0

        class FakePool:
            def run(self, op: int, args: Args) -> None:
                order.append((op, args.scratch_bytes))
                if op == 1:
                    second.start()
                    second.join(0.2)  # it waits for this one to end
                    order.append((op, args.scratch_bytes))

        pool = FakePool()
        second = threading.Thread(target=scratch.run, args=(pool, 2, Args(), 1 << 20))
        scratch.run(pool, 1, Args(), 64)
        second.join()
        assert order == [(1, 64), (1, 64), (2, 1 << 20)]

    def test_what_fits_is_lent_again(self) -> None:
        scratch, seen = library.Scratch(), []

        class FakePool:
            def run(self, op: int, args: ctypes.Structure) -> None:
                seen.append((args.scratch, args.scratch_bytes))

        class Args:
            scratch = scratch_bytes = 0

        for num_bytes in (100, 64, 200, 100):
            scratch.run(FakePool(), 0, Args(), num_bytes)
        assert [size for _, size in seen] == [100, 100, 200, 200]
        assert seen[0] == seen[1]
        assert seen[2] == seen[3]


@needs_library
class TestArena:
    def test_pieces_are_zeroed_aligned_and_apart(self) -> None:
        arena = Arena(chunk_bytes=1 << 20)
        sizes = [1, 63, 64, 65, 100_000, 3 << 20, 0, 1 << 20, 500_000]
        pieces = [arena.take(size) for size in sizes]
        for value, (piece, size) in enumerate(zip(pieces, sizes, strict=True), start=1):
            assert piece.address % 64 == 0
            assert ctypes.string_at(piece.address, size) == bytes(size)
            ctypes.memset(piece.address, value, size)
        for value, (piece, size) in enumerate(zip(pieces, sizes, strict=True), start=1):
            assert ctypes.string_at(piece.address, size) == bytes([value]) * size

    def test_small_pieces_lie_beside_each_other(self) -> None:
        arena = Arena()
        first, second = arena.take(100), arena.take(1)
        assert second.address - first.address == 128

    def test_a_piece_outlives_its_arena(self) -> None:
        piece = Arena().take(4096)
        gc.collect()
        ctypes.memset(piece.address, 7, 4096)
        assert ctypes.string_at(piece.address, 2) == b"\7\7"


@needs_library
def test_discarding_takes_whole_pages_and_leaves_what_is_beside() -> None:
    memory = Memory(4 * mmap.PAGESIZE)
    ctypes.memset(memory.address, 7, memory.num_bytes)
    discard(memory.address + 1, 3 * mmap.PAGESIZE)
    content = ctypes.string_at(memory.address, memory.num_bytes)
    page = mmap.PAGESIZE
    assert content == b"\7" * page + bytes(2 * page) + b"\7" * page
