"""Where is the native library, and how is an op of it run?

Structures and names mirror `native/api/api.cpp`.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jubako.errors import ConfigError
from jubako.utils.logging import get_logger
from jubako.utils.topology import callers_processors, own_processors, thread_plan

PATH = Path(__file__).with_name("_native.so")
VERSION = 2

ELEMENTWISE_OPS = 0
MATMUL_OPS = 32
HEAD_OPS = 64
ATTENTION_OPS = 96
RECURRENT_OPS = 128
MOE_OPS = 160

F32 = 0
BF16 = 1
F16 = 2

ISA_VARIABLE = "JUBAKO_CPU_ISA"
"""The highest level to use; the library reads it too."""
WITHOUT = "none"
"""Instead of a level: as if the library had not been built."""

_LINE = 64
_HUGE = 2 << 20
_PAGE = mmap.PAGESIZE

logger = get_logger(__name__)


class ProgramOp(ctypes.Structure):
    """One line of a program: an op and the address of its arguments."""

    _fields_ = [("op", ctypes.c_int64), ("args", ctypes.c_void_p)]


@functools.cache
def library() -> ctypes.CDLL | None:
    """The native library; None, with one log line, where it is missing or cannot be used.

    Raises ConfigError if JUBAKO_CPU_ISA names a level that cannot run here.
    """
    if os.environ.get(ISA_VARIABLE) == WITHOUT:
        logger.info("Running on PyTorch's kernels: %s is %s.", ISA_VARIABLE, WITHOUT)
        return None
    try:
        lib = ctypes.CDLL(str(PATH))
    except OSError as error:
        reason = "was not built" if not PATH.exists() else f"cannot be loaded ({error})"
        logger.info("Running on PyTorch's kernels: the native library %s.", reason)
        return None
    if lib.jb_version() != VERSION:
        logger.warning(
            "Running on PyTorch's kernels: the native library is of another version; build it "
            "anew with `python setup.py build_ext --inplace`."
        )
        return None
    for name in ("jb_isa", "jb_isa_levels"):
        getattr(lib, name).restype = ctypes.c_char_p
    lib.jb_pool_create.restype = ctypes.c_void_p
    lib.jb_alloc.restype = ctypes.c_void_p
    lib.jb_alloc.argtypes = [ctypes.c_int64]
    lib.jb_free.argtypes = [ctypes.c_void_p, ctypes.c_int64]
    lib.jb_pool_destroy.argtypes = [ctypes.c_void_p]
    lib.jb_pool_destroy.restype = None
    lib.jb_pool_pin.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32]
    lib.jb_pool_pin.restype = None
    lib.jb_pool_size.argtypes = [ctypes.c_void_p]
    lib.jb_run.argtypes = [ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p]
    lib.jb_run.restype = None
    lib.jb_run_program.argtypes = [
        ctypes.c_void_p,
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_void_p,
    ]
    lib.jb_run_program.restype = None
    if lib.jb_isa() is None:
        levels = lib.jb_isa_levels().decode().replace(" ", ", ")
        raise ConfigError(
            f"{ISA_VARIABLE}={os.environ.get(ISA_VARIABLE)!r} cannot run on this machine; "
            f"choose one of {WITHOUT}, {levels}, or leave it unset."
        )
    return lib


def isa_level() -> str | None:
    """The level of instruction sets in use, as `native/base/levels.h` names it."""
    lib = library()
    return None if lib is None else lib.jb_isa().decode()


def isa_levels() -> tuple[str, ...]:
    """The levels that can run on this machine, ascending; empty without the library."""
    lib = library()
    return () if lib is None else tuple(lib.jb_isa_levels().decode().split())


class Pool:
    """Threads that run ops; the calling thread is one of them. Callers queue."""

    def __init__(self, num_threads: int) -> None:
        lib = library()
        assert lib is not None, "there is no native library"
        self._lib = lib
        self.handle = lib.jb_pool_create(num_threads)
        self._run = lib.jb_run
        self._run_program = lib.jb_run_program
        self.num_threads = int(lib.jb_pool_size(self.handle))
        self._pin()
        self._end = weakref.finalize(self, lib.jb_pool_destroy, self.handle)
        # At exit threads end with the process: joining them could wait for a running step.
        self._end.atexit = False

    def _pin(self) -> None:
        own = own_processors()
        plan = thread_plan(self.num_threads, own)
        if len(plan) < 2:
            return
        workers = (ctypes.c_int32 * (len(plan) - 1))(*plan[1:])
        free = callers_processors(plan, own)
        callers = (ctypes.c_int32 * len(free))(*free)
        self._lib.jb_pool_pin(self.handle, workers, callers, len(free))

    def run(self, op: int, args: ctypes.Structure) -> None:
        """Run one op on all threads; returns when it is done."""
        self._run(self.handle, op, ctypes.addressof(args))

    def run_program(self, ops: Any, count: int, times: Any = None) -> None:
        """Run `count` ops of the array `ops` of ProgramOp in one parallel region.

        `times`, an array of int64, takes each op's nanoseconds.
        """
        self._run_program(self.handle, ops, count, times)


@functools.lru_cache(maxsize=8)
def pool(num_threads: int) -> Pool:
    """The process's pool of that many threads."""
    return Pool(num_threads)


def program_array(ops: Sequence[tuple[int, ctypes.Structure]]) -> Any:
    """What `Pool.run_program` walks; the caller keeps the arguments alive."""
    return (ProgramOp * len(ops))(*(ProgramOp(op, ctypes.addressof(args)) for op, args in ops))


class Memory:
    """Zeroed memory on huge pages, given back when the object dies."""

    def __init__(self, num_bytes: int) -> None:
        lib = library()
        assert lib is not None, "there is no native library"
        self.num_bytes = max(1, num_bytes)
        address = lib.jb_alloc(self.num_bytes)
        if not address:
            raise MemoryError(f"{num_bytes} bytes cannot be allocated")
        self.address: int = address
        weakref.finalize(self, lib.jb_free, address, self.num_bytes).atexit = False

    def buffer(self) -> Any:
        """The memory as a ctypes array of bytes, which keeps it alive."""
        array: Any = (ctypes.c_char * self.num_bytes).from_address(self.address)
        array._memory = self
        return array


class MemoryPiece:
    """Some bytes of a larger memory, which they keep alive."""

    def __init__(self, owner: Any, address: int, num_bytes: int) -> None:
        self._owner = owner
        self.address = address
        self.num_bytes = num_bytes


class Arena:
    """Gives pieces of large memories, so that pieces beside each other fill whole huge pages.

    A memory is given back when nothing of it is in use any more.
    """

    def __init__(self, chunk_bytes: int = 64 << 20) -> None:
        self._chunk_bytes = chunk_bytes
        self._memory: Memory | None = None
        self._used = 0
        self._lock = threading.Lock()

    def take(self, num_bytes: int) -> MemoryPiece:
        """Zeroed memory at a multiple of 64 bytes; what nobody has written to takes no room."""
        size = -(-max(1, num_bytes) // _LINE) * _LINE
        with self._lock:
            left = 0 if self._memory is None else self._memory.num_bytes - self._used
            if left >= size:
                memory, start = self._memory, self._used
                self._used += size
            else:
                memory, start = Memory(-(-max(size, self._chunk_bytes) // _HUGE) * _HUGE), 0
                if memory.num_bytes - size > left:
                    self._memory, self._used = memory, size
        assert memory is not None
        return MemoryPiece(memory, memory.address + start, num_bytes)


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def discard(address: int, num_bytes: int) -> None:
    """Give the system back the whole pages of this memory, whose content is lost."""
    start = -(-address // _PAGE) * _PAGE
    end = (address + num_bytes) // _PAGE * _PAGE
    if end > start:
        _libc().madvise(start, end - start, mmap.MADV_DONTNEED)


class Scratch:
    """Memory that the ops of one pool borrow while they run; it grows when one needs more.

    Ops that borrow the same run one after another, so that it does not grow under a running one.
    """

    def __init__(self) -> None:
        self._memory: Memory | None = None
        self._lock = threading.Lock()

    def run(self, pool: Pool, op: int, args: Any, num_bytes: int) -> None:
        """Run `op` on `pool` with at least `num_bytes`: its `scratch` and `scratch_bytes`."""
        with self._lock:
            if self._memory is None or self._memory.num_bytes < num_bytes:
                self._memory = Memory(num_bytes)
            args.scratch = self._memory.address
            args.scratch_bytes = self._memory.num_bytes
            pool.run(op, args)


if __name__ == "__main__":
    # For scripts that go through all levels.
    print(*isa_levels())
