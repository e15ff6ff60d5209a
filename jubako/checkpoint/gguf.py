"""What is in a GGUF file? Its metadata, and where each tensor lies; nothing is decoded ahead.

The format is specified at https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Integers are
little endian, a string is a uint64 length and UTF-8 bytes, an array is its element type, a uint64
count and the elements. A vocabulary of 262,144 strings is walked in about 20 ms, because only the
lengths are read; strings and numbers of arrays are decoded when somebody asks for them.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jubako.errors import CheckpointError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_DIMS = 4

_STRING, _ARRAY = 8, 9
_SCALARS: dict[int, tuple[str, str]] = {
    0: ("B", "u1"),
    1: ("b", "i1"),
    2: ("H", "<u2"),
    3: ("h", "<i2"),
    4: ("I", "<u4"),
    5: ("i", "<i4"),
    6: ("f", "<f4"),
    7: ("?", "?"),
    10: ("Q", "<u8"),
    11: ("q", "<i8"),
    12: ("d", "<f8"),
}
"""Metadata value type → format of `struct`, NumPy dtype."""

TENSOR_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
"""ggml's number of a tensor type → name, elements in a block, bytes of a block."""


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Where a tensor lies. `shape` is outermost first, the reverse of the file's order."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    """From the beginning of the file, in bytes."""
    nbytes: int

    @property
    def numel(self) -> int:
        """Elements of the tensor."""
        count = 1
        for size in self.shape:
            count *= size
        return count


class GGUFArray(Sequence[Any]):
    """An array in the metadata, read from the file when it is used.

    Of strings, or of numbers; `numpy()` is for the latter. Raises `CheckpointError` where a string
    is not UTF-8, or the file has been cut short since it was opened.
    """

    def __init__(
        self, file: GGUFFile, key: str, dtype: str | None, offset: int, nbytes: int, count: int
    ) -> None:
        self._file = file
        self._key = key
        self._dtype = dtype
        self._offset = offset
        self._nbytes = nbytes
        self._count = count
        self._starts: list[int] | None = None
        """Offsets of the strings' lengths within the array; None for numbers."""

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: Any) -> Any:
        return self.tolist()[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.tolist())

    def __repr__(self) -> str:
        return f"GGUFArray({self._key!r}, {self._count} of {self._dtype or 'string'})"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GGUFArray | list | tuple):
            return self.tolist() == list(other)
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def raw(self) -> bytearray:
        """The array as it lies in the file, without its element type and count."""
        return self._file.pread(self._offset, self._nbytes)

    def tolist(self) -> list[Any]:
        """All elements as Python values."""
        if self._starts is None:
            return self.numpy().tolist()
        data = self.raw()
        starts = self._starts
        ends = [*starts[1:], self._nbytes]
        try:
            return [data[a + 8 : b].decode() for a, b in zip(starts, ends)]
        except UnicodeDecodeError:
            raise CheckpointError(
                f"GGUF metadata {self._key!r} holds a string that is not UTF-8."
            ) from None

    def numpy(self) -> np.ndarray:
        """All elements of an array of numbers."""
        assert self._dtype is not None, f"{self._key} is not an array of numbers"
        return np.frombuffer(self.raw(), self._dtype)

    def find(self, texts: Sequence[str]) -> dict[str, int]:
        """Index of the first string equal to each of `texts`; those that do not occur are left out.

        Searches the raw bytes for length and text together, far faster than decoding all strings.
        """
        assert self._starts is not None, f"{self._key} is not an array of strings"
        data = self.raw()
        starts = np.asarray(self._starts, np.int64)
        found: dict[str, int] = {}
        for text in texts:
            encoded = text.encode()
            needle = struct.pack("<Q", len(encoded)) + encoded
            at = data.find(needle)
            while at >= 0:
                index = int(np.searchsorted(starts, at))
                if index < len(starts) and starts[index] == at:
                    found[text] = index
                    break
                at = data.find(needle, at + 1)
        return found

    @property
    def is_strings(self) -> bool:
        """Whether the elements are strings."""
        return self._starts is not None


class GGUFFile:
    """A GGUF file's header, parsed, and access to its bytes.

    `metadata` maps keys to numbers, truth values, strings and `GGUFArray`s; `tensors` maps names to
    `GGUFTensor`s in file order. Versions 2 and 3, little endian. Every defect of the file, tensor
    data that ends early included, is a `CheckpointError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, GGUFTensor] = {}
        try:
            self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{self.path.name} cannot be opened: {error.strerror}.") from None
        try:
            self.size = os.fstat(self._fd).st_size
            if self.size < 24:
                self._check_magic(os.pread(self._fd, 24, 0))
                raise self._cut_short("the header", 24)
            with mmap.mmap(self._fd, 0, prot=mmap.PROT_READ) as data:
                self._check_magic(data[:24])
                with memoryview(data) as view:
                    self.header_bytes = _HeaderParser(self, view).parse()
        except BaseException:
            os.close(self._fd)
            self._fd = -1
            raise

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; arrays and tensors cannot be read any more."""
        if getattr(self, "_fd", -1) >= 0:
            os.close(self._fd)
            self._fd = -1

    def pread(self, offset: int, nbytes: int) -> bytearray:
        """`nbytes` bytes from `offset`. They are copied, so no mapped page stays resident."""
        data = bytearray(nbytes)
        self.read_into(offset, data)
        return data

    def read_into(self, offset: int, buffer: bytearray | memoryview | np.ndarray) -> None:
        """Fill `buffer` (contiguous, of bytes) from `offset` on."""
        data = buffer.data if isinstance(buffer, np.ndarray) else buffer
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            count = os.preadv(self._fd, [view[done:]], offset + done)
            if count == 0:
                raise self._cut_short("data", offset + len(view))
            done += count

    def read(self, name: str) -> np.ndarray:
        """A tensor's bytes as a new uint8 array `[nbytes]`, quantised as they are in the file."""
        tensor = self.tensors[name]
        data = np.empty(tensor.nbytes, np.uint8)
        self.read_into(tensor.offset, data)
        return data

    def _check_magic(self, head: bytes) -> None:
        if head[:4] != MAGIC:
            raise CheckpointError(
                f"{self.path.name} is not a GGUF file: it begins with {head[:4]!r}, not {MAGIC!r}."
            )
        if len(head) < 8:
            return
        version = struct.unpack_from("<I", head, 4)[0]
        if version in VERSIONS:
            return
        swapped = struct.unpack_from(">I", head, 4)[0]
        if swapped in VERSIONS:
            raise CheckpointError(
                f"{self.path.name} is a big-endian GGUF file; only little endian can be read."
            )
        raise CheckpointError(
            f"{self.path.name} has GGUF version {version}; versions 2 and 3 can be read. "
            "Convert the model again with a current tool."
        )

    def _cut_short(self, what: str, needed: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path.name} is cut short: {what} would end at byte {needed}, "
            f"the file has {self.size}. Download or copy it again."
        )


class _HeaderParser:
    """Walks the header once, checking every count against the bytes that are left."""

    def __init__(self, file: GGUFFile, data: memoryview) -> None:
        self.file = file
        self.data = data
        self.pos = 8
        self.what = "the header"

    def parse(self) -> int:
        """Fill the file's `metadata` and `tensors`; returns the header's length in bytes."""
        num_tensors, num_keys = self._unpack("QQ")
        # The least that an entry can take bounds the counts, so a damaged one cannot run away.
        self._check_count("tensors", num_tensors, 24)
        self._check_count("metadata entries", num_keys, 13)
        for _ in range(num_keys):
            self.what = "the metadata"
            key = self._string("a metadata key")
            self.what = f"metadata {key!r}"
            (kind,) = self._unpack("I")
            if key in self.file.metadata:
                raise self._bad(f"has metadata {key!r} twice")
            self.file.metadata[key] = self._value(key, kind)
        self.what = "the list of tensors"
        infos = [self._tensor_info() for _ in range(num_tensors)]
        end = self.pos
        self._place(infos, end)
        return end

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._unpack(_SCALARS[kind][0])[0]
        if kind == _STRING:
            return self._string(f"metadata {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        raise self._bad(f"has metadata {key!r} of unknown type {kind}")

    def _array(self, key: str) -> GGUFArray:
        kind, count = self._unpack("IQ")
        start = self.pos
        if kind == _STRING:
            self._check_count(f"strings in metadata {key!r}", count, 8)
            starts = self._string_starts(count)
            array = GGUFArray(self.file, key, None, start, self.pos - start, count)
            array._starts = starts
            return array
        if kind not in _SCALARS:
            problem = "arrays" if kind == _ARRAY else f"elements of unknown type {kind}"
            raise self._bad(f"has metadata {key!r}, an array of {problem}")
        dtype = _SCALARS[kind][1]
        nbytes = count * np.dtype(dtype).itemsize
        self._advance(nbytes)
        return GGUFArray(self.file, key, dtype, start, nbytes, count)

    def _string_starts(self, count: int) -> list[int]:
        """Offsets of `count` strings, relative to the first, and step behind the last."""
        data, base, size = self.data, self.pos, len(self.data)
        starts: list[int] = []
        append = starts.append
        pos = base
        unpack = struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                append(pos - base)
                # Lengths below 256 are nearly all of them; the seven upper bytes are checked below.
                pos += 8 + data[pos]
        except IndexError:
            pos = size + 1
        if pos <= size and self._lengths_are_bytes(starts, base):
            self.pos = pos
            return starts
        starts.clear()
        pos = base
        for _ in range(count):
            append(pos - base)
            if pos + 8 > size:
                raise self.file._cut_short(self.what, pos + 8)
            pos += 8 + unpack(data, pos)[0]
        if pos > size:
            raise self.file._cut_short(self.what, pos)
        self.pos = pos
        return starts

    def _lengths_are_bytes(self, starts: list[int], base: int) -> bool:
        if not starts:
            return True
        data = np.frombuffer(self.data, np.uint8)
        at = np.asarray(starts, np.int64) + base
        if int(at[-1]) + 8 > len(data):
            return False
        return not any(data[at + i].any() for i in range(1, 8))

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        self.what = f"the description of tensor {name!r}"
        (num_dims,) = self._unpack("I")
        if num_dims > MAX_DIMS:
            raise self._bad(
                f"has tensor {name!r} with {num_dims} dimensions; the most is {MAX_DIMS}"
            )
        dims = self._unpack(f"{num_dims}Q")
        if 0 in dims:
            raise self._bad(f"has tensor {name!r} without elements, of shape {dims[::-1]}")
        kind, offset = self._unpack("IQ")
        return name, tuple(reversed(dims)), kind, offset

    def _place(self, infos: list[tuple[str, tuple[int, ...], int, int]], end: int) -> None:
        alignment = self.file.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise self._bad(f"has general.alignment {alignment!r}, which is no power of two")
        data_start = -(-end // alignment) * alignment
        for name, shape, kind, offset in infos:
            if kind not in TENSOR_TYPES:
                raise self._bad(f"has tensor {name!r} of unknown type {kind}")
            type_name, block, block_bytes = TENSOR_TYPES[kind]
            numel = 1
            for size in shape:
                numel *= size
            row = shape[-1] if shape else 1
            if row % block:
                raise self._bad(
                    f"has tensor {name!r} of type {type_name} with rows of {row} elements; "
                    f"they must be a multiple of {block}"
                )
            if offset % alignment:
                raise self._bad(f"has tensor {name!r} at offset {offset}, not on {alignment} bytes")
            nbytes = numel // block * block_bytes
            if data_start + offset + nbytes > self.file.size:
                raise self.file._cut_short(f"tensor {name!r}", data_start + offset + nbytes)
            if name in self.file.tensors:
                raise self._bad(f"has tensor {name!r} twice")
            self.file.tensors[name] = GGUFTensor(
                name, shape, type_name, data_start + offset, nbytes
            )

    # -- steps --------------------------------------------------------------------------------

    def _advance(self, nbytes: int) -> int:
        start, end = self.pos, self.pos + nbytes
        if end > len(self.data):
            raise self.file._cut_short(self.what, end)
        self.pos = end
        return start

    def _unpack(self, format: str) -> tuple[Any, ...]:
        layout = struct.Struct("<" + format)
        return layout.unpack_from(self.data, self._advance(layout.size))

    def _string(self, what: str) -> str:
        (length,) = self._unpack("Q")
        start = self._advance(length)
        try:
            return bytes(self.data[start : start + length]).decode()
        except UnicodeDecodeError:
            raise self._bad(f"has {what} that is not UTF-8") from None

    def _check_count(self, what: str, count: int, least_bytes: int) -> None:
        if count * least_bytes > len(self.data) - self.pos:
            raise CheckpointError(
                f"{self.file.path.name} is damaged or cut short: it claims {count} {what}, "
                f"more than its {len(self.data)} bytes can hold."
            )

    def _bad(self, problem: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path.name} {problem}.")
