"""How is a safetensors file read without keeping its pages mapped?

The format (https://github.com/huggingface/safetensors): a uint64 length, a JSON object of that many
bytes with dtype, shape and offsets of each tensor, then the data. Reading it here instead of
mapping it keeps the resident memory to the weights themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jubako.errors import CheckpointError

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
MAX_HEADER_BYTES = 100_000_000
_NO_WEIGHTS = ("embeddings.position_ids",)
"""Integers 0, 1, 2, ... that old checkpoints of encoders hold."""
_KEPT_IN_FLOAT32 = ("e_score_correction_bias",)
"""Offsets of scores that routers compare: what a smaller dtype rounds away decides."""
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor in a file."""

    name: str
    kind: str
    """Its dtype as the file spells it."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    path: Path
    offset: int
    """Of its data in the file, in bytes."""


class SafetensorsFiles:
    """All tensors of a checkpoint's files, of which one is open at a time.

    Only tensors of `dtypes` are accepted. Raises CheckpointError for a file that cannot be read or
    is damaged, and for a tensor of another dtype or in two files.
    """

    def __init__(self, files: Sequence[Path], dtypes: Mapping[str, torch.dtype]) -> None:
        self._path: Path | None = None
        self._fd = -1
        self.entries: dict[str, Entry] = {}
        """By name, in the order of the files and of the data within them."""
        try:
            for path in files:
                with self._open(path) as fd:
                    entries = _read_header(fd, path, dtypes)
                for entry in entries:
                    if entry.name in self.entries:
                        raise CheckpointError(f"Tensor {entry.name!r} is in two weight files.")
                    self.entries[entry.name] = entry
        except BaseException:
            self.close()
            raise

    def read(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor in new memory, converted to `dtype` if one is given."""
        entry = self.entries[name]
        with self._open(entry.path) as fd:
            return _read_tensor(fd, entry, dtype or entry.dtype)

    def read_rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor [..., size] seen as [n, size], as they are stored, in new memory."""
        entry = self.entries[name]
        size = entry.shape[-1]
        out = torch.empty((stop - start, size), dtype=entry.dtype)
        with self._open(entry.path) as fd:
            offset = entry.offset + start * size * entry.dtype.itemsize
            _read_into(fd, entry.path.name, offset, out)
        return out

    def close(self) -> None:
        """Close the file that is open."""
        if self._fd >= 0:
            os.close(self._fd)
        self._path, self._fd = None, -1

    @contextmanager
    def _open(self, path: Path) -> Iterator[int]:
        try:
            if path != self._path:
                self.close()
                self._fd, self._path = os.open(path, os.O_RDONLY), path
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be opened: {error.strerror}.") from None
        try:
            yield self._fd
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.") from None


def safetensors_weights(
    files: Sequence[Path], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the files on `device`, in `dtype` unless it is small. See `load_weights`."""
    tensors = SafetensorsFiles(files, DTYPES)
    try:
        for name, entry in tensors.entries.items():
            wanted = weight_dtype(name, dtype)
            if entry.dtype == torch.float32 and _is_small(entry):
                wanted = torch.float32
            yield name, tensors.read(name, wanted).to(device)
    finally:
        tensors.close()


def _is_small(entry: Entry) -> bool:
    """Whether it may be a parameter that models keep in float32, which rounding would not leave so.

    Norms, biases and the rates of recurrences are; a matrix of rates is told by its name.
    """
    return len(entry.shape) < 2 or entry.name.endswith("A_log")


def weight_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which a model of `dtype` wants the tensor `name`."""
    return torch.float32 if name.endswith(_KEPT_IN_FLOAT32) else dtype


def _read_header(fd: int, path: Path, dtypes: Mapping[str, torch.dtype]) -> list[Entry]:
    """Entries by their place in the file. Every defect of the header is a `CheckpointError`."""
    size, name = os.fstat(fd).st_size, path.name
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if size < 8 or length > min(size - 8, MAX_HEADER_BYTES):
        raise CheckpointError(
            f"{name} is no safetensors file or is cut short: its header would be {length} bytes, "
            f"the file has {size}."
        )
    try:
        header = json.loads(os.pread(fd, length, 8))
    except (ValueError, RecursionError):
        raise CheckpointError(f"The header of {name} is damaged: it is not valid JSON.") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"The header of {name} is damaged: it is not a JSON object.")
    data_bytes = size - 8 - length
    entries = [
        _entry(path, tensor, info, 8 + length, data_bytes, dtypes)
        for tensor, info in header.items()
        if tensor != "__metadata__" and not tensor.endswith(_NO_WEIGHTS)
    ]
    return sorted(entries, key=lambda entry: entry.offset)


def _entry(
    path: Path,
    name: str,
    info: Any,
    data_start: int,
    data_bytes: int,
    dtypes: Mapping[str, torch.dtype],
) -> Entry:
    file = path.name
    try:
        kind, shape = info["dtype"], info["shape"]
        begin, end = info["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        numbers = [None]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise CheckpointError(f"The header of {file} is damaged at tensor {name!r}.")
    if kind not in dtypes:
        raise CheckpointError(
            f"Tensor {name!r} in {file} has dtype {kind}; weights must be one of "
            f"{', '.join(dtypes)}."
        )
    nbytes = dtypes[kind].itemsize
    for dim in shape:
        nbytes *= dim
    if end - begin != nbytes:
        raise CheckpointError(
            f"The header of {file} is damaged: tensor {name!r} of shape {shape} and dtype {kind} "
            f"takes {nbytes} bytes, but {end - begin} are given."
        )
    if end > data_bytes:
        raise CheckpointError(
            f"{file} is cut short: tensor {name!r} would end at byte {data_start + end}, the file "
            f"has {data_start + data_bytes}. Download or copy it again."
        )
    return Entry(name, kind, dtypes[kind], tuple(shape), path, data_start + begin)


def _read_tensor(fd: int, entry: Entry, dtype: torch.dtype) -> torch.Tensor:
    file = entry.path.name
    out = torch.empty(entry.shape, dtype=dtype)
    if entry.dtype == dtype:
        _read_into(fd, file, entry.offset, out)
        return out
    flat = out.view(-1)
    step = CHUNK_BYTES // entry.dtype.itemsize
    chunk = torch.empty(min(step, flat.numel()), dtype=entry.dtype)
    for start in range(0, flat.numel(), step):
        piece = chunk[: min(step, flat.numel() - start)]
        _read_into(fd, file, entry.offset + start * entry.dtype.itemsize, piece)
        flat[start : start + len(piece)].copy_(piece)
    return out


def _read_into(fd: int, file: str, offset: int, tensor: torch.Tensor) -> None:
    if tensor.numel() == 0:
        return
    view = tensor.view(-1).view(torch.uint8).numpy().data
    done = 0
    while done < len(view):
        count = os.preadv(fd, [view[done:]], offset + done)
        if count == 0:
            raise CheckpointError(f"{file} was cut short while it was read.")
        done += count
