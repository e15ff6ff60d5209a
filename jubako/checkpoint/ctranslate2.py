"""What is in a CTranslate2 model file? Its variables, and where the data of each lies.

A `model.bin` begins with the version of the format, the name and revision of the model's
specification, and a count of variables; each is a name, sizes, a type and its data. A count of
aliases follows, which are pairs of names. Integers are little endian without padding; a string is
a uint16 length that counts its final zero byte. The file is walked without reading the data.
https://opennmt.net/CTranslate2/conversion.html
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from jubako.errors import CheckpointError

VERSIONS = (4, 5, 6)
"""Older ones do not say of which type a variable is."""

DTYPES: dict[int, tuple[str, int]] = {
    0: ("float32", 4),
    1: ("int8", 1),
    2: ("int16", 2),
    3: ("int32", 4),
    4: ("float16", 2),
    5: ("bfloat16", 2),
}
"""Number of a type → its name, bytes of an element."""

MAX_VARIABLES = 100_000
MAX_NAME_BYTES = 1024
MAX_DIMS = 8


@dataclass(frozen=True, slots=True)
class Variable:
    """Where a variable's data lies. One without sizes is a single number."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int
    """From the beginning of the file, in bytes."""
    nbytes: int


class CTranslate2File:
    """A model file's list of variables, and access to its bytes.

    Every defect of the file, data that ends early included, is a `CheckpointError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._fd = os.open(self.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self.path.name} cannot be opened: {error.strerror}.") from None
        try:
            self.size = os.fstat(self._fd).st_size
            self._parse(_Walk(self))
        except BaseException:
            self.close()
            raise

    def _parse(self, walk: _Walk) -> None:
        version = walk.integer(4)
        if version not in VERSIONS:
            raise CheckpointError(
                f"{self.path.name} says version {version} of the CTranslate2 format; supported are "
                f"{', '.join(map(str, VERSIONS))}. It may be another kind of file, or must be "
                "converted again with a current CTranslate2."
            )
        self.spec = walk.string()
        """What the variables are those of, for example "WhisperSpec"."""
        self.revision = walk.integer(4)
        self.variables: dict[str, Variable] = {}
        """By name, aliases included, in the order of the file."""
        for _ in range(walk.count()):
            variable = walk.variable()
            self._add(variable.name, variable)
        for _ in range(walk.count()):
            alias, name = walk.string(), walk.string()
            if name not in self.variables:
                raise self.damaged(f"its alias {alias!r} stands for {name!r}, which it lacks")
            self._add(alias, self.variables[name])

    def _add(self, name: str, variable: Variable) -> None:
        if name in self.variables:
            raise self.damaged(f"it has the variable {name!r} twice")
        self.variables[name] = variable

    def damaged(self, how: str) -> CheckpointError:
        """An error that says how the file is damaged."""
        return CheckpointError(f"{self.path.name} is damaged: {how}.")

    def read_into(self, offset: int, target: np.ndarray) -> None:
        """Fill `target`, contiguous uint8, with the bytes from `offset` on."""
        view = target.data
        done = 0
        while done < len(view):
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                raise CheckpointError(
                    f"{self.path.name} cannot be read: {error.strerror}."
                ) from None
            if count == 0:
                raise CheckpointError(
                    f"{self.path.name} is cut short: {len(view)} bytes at byte {offset} end at "
                    f"byte {self.size}. Download or copy it again."
                )
            done += count

    def number(self, name: str, default: int) -> int:
        """The value of a variable that is a single integer; `default` where there is none."""
        variable = self.variables.get(name)
        if variable is None:
            return default
        if variable.shape or not variable.dtype.startswith("int"):
            raise self.damaged(f"its variable {name!r} should be a single integer")
        raw = np.empty(variable.nbytes, np.uint8)
        self.read_into(variable.offset, raw)
        return int(raw.view(variable.dtype)[0])

    def close(self) -> None:
        """Close the file. Calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class _Walk:
    """Reads a file's lists from the beginning on, and steps over data."""

    def __init__(self, file: CTranslate2File) -> None:
        self._file = file
        self._at = 0

    def _bytes(self, count: int) -> bytes:
        raw = np.empty(count, np.uint8)
        self._file.read_into(self._at, raw)
        self._at += count
        return raw.tobytes()

    def integer(self, nbytes: int) -> int:
        return int.from_bytes(self._bytes(nbytes), "little")

    def count(self) -> int:
        count = self.integer(4)
        if count > MAX_VARIABLES:
            raise self._file.damaged(
                f"it says that it has {count} variables; at most {MAX_VARIABLES} are read"
            )
        return count

    def string(self) -> str:
        length = self.integer(2)
        if not 1 <= length <= MAX_NAME_BYTES:
            raise self._file.damaged(f"a name has {length} bytes at byte {self._at}")
        raw = self._bytes(length)
        try:
            text = raw[:-1].decode()
        except UnicodeDecodeError:
            text = ""
        if raw[-1] or not text.isprintable() or not text:
            raise self._file.damaged(f"there is no name at byte {self._at - length}")
        return text

    def variable(self) -> Variable:
        name = self.string()
        dims = self.integer(1)
        if dims > MAX_DIMS:
            raise self._file.damaged(f"its variable {name!r} has {dims} dimensions")
        shape = tuple(self.integer(4) for _ in range(dims))
        kind = self.integer(1)
        if kind not in DTYPES:
            raise self._file.damaged(f"its variable {name!r} is of an unknown type, {kind}")
        dtype, itemsize = DTYPES[kind]
        nbytes, wanted = self.integer(4), itemsize
        for size in shape:
            wanted *= size
        if nbytes != wanted:
            raise self._file.damaged(
                f"its variable {name!r} of shape {list(shape)} and type {dtype} takes {wanted} "
                f"bytes, but {nbytes} are given"
            )
        if self._at + nbytes > self._file.size:
            raise CheckpointError(
                f"{self._file.path.name} is cut short: variable {name!r} would end at byte "
                f"{self._at + nbytes}, the file has {self._file.size}. Download or copy it again."
            )
        variable = Variable(name, shape, dtype, self._at, nbytes)
        self._at += nbytes
        return variable
