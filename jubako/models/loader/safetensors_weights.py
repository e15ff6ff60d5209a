"""How is a safetensors file read without keeping its pages mapped?

The format (https://github.com/huggingface/safetensors): a uint64 length, a JSON object of that many
bytes with dtype, shape and offsets of each tensor, then the data. Reading it here instead of
mapping it keeps the resident memory to the weights themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
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
CHUNK_BYTES = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def safetensors_weights(
    files: Sequence[Path], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of the files, converted to `dtype` on `device`. See `load_weights`."""
    seen: set[str] = set()
    for path in files:
        try:
            fd = os.open(path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be opened: {error.strerror}.") from None
        try:
            for entry in _read_header(fd, path.name):
                if entry.name in seen:
                    raise CheckpointError(f"Tensor {entry.name!r} is in two weight files.")
                seen.add(entry.name)
                yield entry.name, _read_tensor(fd, path.name, entry, dtype).to(device)
        except OSError as error:
            raise CheckpointError(f"{path.name} cannot be read: {error.strerror}.") from None
        finally:
            os.close(fd)


def _read_header(fd: int, name: str) -> list[_Entry]:
    """Entries by their place in the file. Every defect of the header is a `CheckpointError`."""
    size = os.fstat(fd).st_size
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
        _entry(name, tensor, info, 8 + length, data_bytes)
        for tensor, info in header.items()
        if tensor != "__metadata__"
    ]
    return sorted(entries, key=lambda entry: entry.offset)


def _entry(file: str, name: str, info: Any, data_start: int, data_bytes: int) -> _Entry:
    try:
        kind, shape = info["dtype"], info["shape"]
        begin, end = info["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        numbers = [None]
    if any(type(n) is not int or n < 0 for n in numbers):
        raise CheckpointError(f"The header of {file} is damaged at tensor {name!r}.")
    if kind not in DTYPES:
        raise CheckpointError(
            f"Tensor {name!r} in {file} has dtype {kind}; weights must be one of "
            f"{', '.join(DTYPES)}."
        )
    nbytes = DTYPES[kind].itemsize
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
    return _Entry(name, DTYPES[kind], tuple(shape), data_start + begin, nbytes)


def _read_tensor(fd: int, file: str, entry: _Entry, dtype: torch.dtype) -> torch.Tensor:
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
