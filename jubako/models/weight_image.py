"""How do the weights of a model that is ready to run lie in a file?

Packed matrices and tensors one after another, then a table of them as JSON, then a trailer: magic,
the table's length and its digest. The table has a sum of every few megabytes of the data, so that
damage is found at the speed of memory. A reader maps the file, copying what is written to, which
weights never are: engines of one model share its pages.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import hashlib
import json
import mmap
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from jubako.kernels.cpu.library import Memory, MemoryPiece
from jubako.kernels.cpu.packed_matrix import PackedMatrix
from jubako.utils import huge_pages
from jubako.utils.cpu import num_cores

ALIGNMENT = 64
SUM_BYTES = 4 << 20
"""Bytes of data that one sum covers."""

_TRAILER = struct.Struct("<8sQ16s")
_MAGIC = b"JBKWGT01"
_POPULATE_READ = 22
"""MADV_POPULATE_READ, which Python's `mmap` does not name yet."""
_MAPPED_SHARE = 0.75
"""Less of a mapping than this on huge pages, and reading into memory that has them pays."""
_WORTH_HUGE_PAGES = 64 << 20
_PROBE_BYTES = 32 << 20
"""Where a mapping is tried."""


class DamagedImageError(Exception):
    """The file is not what was written, or does not fit the model."""


class WeightImage:
    """What a file is to hold of a model: every packed matrix, every parameter and buffer.

    Nothing is copied: the weights must stay as they are until they are written.
    """

    def __init__(self, model: nn.Module) -> None:
        self._entries: list[dict[str, Any]] = []
        self._sources: list[tuple[int, int, int, Any]] = []
        self.num_bytes = 0
        """Of the data."""
        self.num_matrices = 0
        done: set[int] = set()
        for module_name, module in model.named_modules():
            for attribute, packed in packed_matrices(module):
                if id(packed) not in done:
                    done.add(id(packed))
                    self._add_matrix(module_name, attribute, packed)
        for name, tensor in _tensors(model).items():
            self._add_tensor(name, tensor)

    def _add_matrix(self, module_name: str, attribute: str, packed: PackedMatrix) -> None:
        self.num_matrices += 1
        entry = {
            "module": module_name,
            "attribute": attribute,
            "kinds": packed.kinds,
            "sizes": packed.sizes,
            "k": packed.k,
            "interleaved": packed.interleaved,
            "activation_bits": packed.activation_bits,
            "regions": [self._place(m.address, m.num_bytes, m) for m in packed.memory],
        }
        self._entries.append(entry)

    def _add_tensor(self, name: str, tensor: torch.Tensor) -> None:
        stored = tensor.detach().contiguous()
        entry = {
            "tensor": name,
            "shape": list(stored.shape),
            "dtype": str(stored.dtype).removeprefix("torch."),
            "regions": [self._place(stored.data_ptr(), stored.nbytes, stored)],
        }
        self._entries.append(entry)

    def _place(self, address: int, num_bytes: int, owner: Any) -> tuple[int, int]:
        start = _aligned(self.num_bytes)
        self._sources.append((start, address, num_bytes, owner))
        self.num_bytes = start + num_bytes
        return start, num_bytes

    def write(self, descriptor: int) -> None:
        """Write it to a new file that can be read too. Raises OSError, on a full disk at once."""
        data_bytes = max(ALIGNMENT, _aligned(self.num_bytes))
        os.posix_fallocate(descriptor, 0, data_bytes)
        sums = []
        # In large aligned pieces, for which the system takes huge pages.
        chunk = Memory(min(SUM_BYTES, data_bytes))
        for place in range(0, data_bytes, SUM_BYTES):
            count = min(SUM_BYTES, data_bytes - place)
            ctypes.memset(chunk.address, 0, count)
            self._copy(place, count, chunk.address)
            words = np.frombuffer(chunk.buffer(), np.uint64, count // 8)
            sums.append(int(np.add.reduce(words)))
            _write_at(descriptor, words, place)
        table = {"entries": self._entries, "sums": sums}
        text = json.dumps(table).encode()
        digest = hashlib.blake2b(text, digest_size=16).digest()
        end = text + _TRAILER.pack(_MAGIC, len(text), digest)
        _write_at(descriptor, end, data_bytes)

    def _copy(self, begin: int, num_bytes: int, to: int) -> None:
        """Copy what lies in these bytes of the data."""
        first = bisect.bisect_right(self._sources, begin, key=lambda source: source[0])
        for start, address, size, _ in self._sources[max(0, first - 1) :]:
            if start >= begin + num_bytes:
                return
            low, high = max(start, begin), min(start + size, begin + num_bytes)
            if high > low:
                ctypes.memmove(to + low - begin, address + low - start, high - low)


def restore_weights(model: nn.Module, path: Path) -> None:
    """Give a model that was built, but not filled, the weights in the file.

    DamagedImageError, before the model is touched, if they are not whole or not this model's;
    OSError if the file cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        table, data_bytes = _read_table(file.fileno())
        data = _map(file.fileno(), data_bytes)
    if _sums(np.frombuffer(data, np.uint64)) != table["sums"]:
        raise DamagedImageError("its data has changed")
    try:
        matrices = [_matrix(e, data) for e in table["entries"] if "module" in e]
        tensors = {e["tensor"]: _tensor(e, data) for e in table["entries"] if "tensor" in e}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedImageError(f"its table is unknown ({error!r})") from None
    modules, own = dict(model.named_modules()), _tensors(model)
    packs = {module for module, _, _ in matrices}
    for name in own.keys() ^ tensors.keys():
        raise DamagedImageError(f"the model and the file do not both have {name}")
    for name, tensor in tensors.items():
        is_packed = not tensor.numel() and name.rpartition(".")[0] in packs
        if tensor.shape != own[name].shape and not is_packed:
            raise DamagedImageError(f"{name} has another shape in the model")
    for module, attribute, packed in matrices:
        if module not in modules:
            raise DamagedImageError(f"the model has no {module}")
        setattr(modules[module], attribute, packed)
    for name, tensor in tensors.items():
        own[name].data = tensor


def packed_matrices(module: nn.Module) -> Iterator[tuple[str, PackedMatrix]]:
    """The packed matrices that are attributes of a module, by name."""
    for name, value in vars(module).items():
        if isinstance(value, PackedMatrix):
            yield name, value


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _write_at(descriptor: int, data: Any, place: int) -> None:
    view = memoryview(data).cast("B")
    while view:
        count = os.pwrite(descriptor, view, place)
        place += count
        view = view[count:]


def _read_table(descriptor: int) -> tuple[dict[str, Any], int]:
    """The table, and how many bytes of data are before it."""
    size = os.fstat(descriptor).st_size
    end = size - _TRAILER.size
    trailer = os.pread(descriptor, _TRAILER.size, max(0, end))
    if len(trailer) < _TRAILER.size:
        raise DamagedImageError("it is cut short")
    magic, length, digest = _TRAILER.unpack(trailer)
    if magic != _MAGIC or length > end:
        raise DamagedImageError("it is cut short, or of another version")
    text = os.pread(descriptor, length, end - length)
    if hashlib.blake2b(text, digest_size=16).digest() != digest:
        raise DamagedImageError("its table has changed")
    table: dict[str, Any] = json.loads(text)
    return table, end - length


def _map(descriptor: int, num_bytes: int) -> Any:
    """The first bytes of a file as a ctypes array: mapped, or read if that makes reading faster."""
    mapping = mmap.mmap(
        descriptor, num_bytes, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE
    )
    array: Any = (ctypes.c_char * num_bytes).from_buffer(mapping)
    with contextlib.suppress(OSError):  # of a kernel that does not know it
        mapping.madvise(mmap.MADV_HUGEPAGE)
    if num_bytes >= _WORTH_HUGE_PAGES and huge_pages.can_ask():
        with contextlib.suppress(OSError):
            mapping.madvise(_POPULATE_READ, 0, _PROBE_BYTES)
        huge = huge_pages.bytes_on_huge_pages(ctypes.addressof(array))
        if huge < _MAPPED_SHARE * _PROBE_BYTES:
            return _read(descriptor, num_bytes)
    return array


def _read(descriptor: int, num_bytes: int) -> Any:
    array = Memory(num_bytes).buffer()
    view = memoryview(array).cast("B")

    def read(start: int) -> None:
        end = min(start + SUM_BYTES, num_bytes)
        while start < end:
            count = os.preadv(descriptor, [view[start:end]], start)
            if not count:
                raise DamagedImageError("it was cut short while it was read")
            start += count

    _in_parallel(read, range(0, num_bytes, SUM_BYTES))
    return array


def _sums(words: np.ndarray[Any, Any]) -> list[int]:
    step = SUM_BYTES // words.itemsize

    def of(start: int) -> int:
        return int(np.add.reduce(words[start : start + step]))

    return _in_parallel(of, range(0, len(words), step))


def _in_parallel(function: Any, arguments: range) -> list[Any]:
    # Both system calls and sums let other threads run.
    with ThreadPoolExecutor(num_cores()) as threads:
        return list(threads.map(function, arguments))


def _matrix(entry: dict[str, Any], data: Any) -> tuple[str, str, PackedMatrix]:
    regions = iter(entry["regions"])

    def take(num_bytes: int) -> MemoryPiece:
        start, size = next(regions)
        if size != num_bytes or start + size > len(data):
            raise ValueError("a matrix of another size")
        return MemoryPiece(data, ctypes.addressof(data) + start, num_bytes)

    packed = PackedMatrix(
        entry["kinds"], entry["sizes"], entry["k"], interleaved=entry["interleaved"], take=take
    )
    packed.activation_bits = entry["activation_bits"]
    return entry["module"], entry["attribute"], packed


def _tensor(entry: dict[str, Any], data: Any) -> torch.Tensor:
    [(start, size)] = entry["regions"]
    dtype: torch.dtype = getattr(torch, entry["dtype"])
    if not size:
        return torch.empty(entry["shape"], dtype=dtype)
    flat = torch.frombuffer(data, dtype=dtype, count=size // dtype.itemsize, offset=start)
    return flat.view(entry["shape"])
