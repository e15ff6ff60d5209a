"""How does a weight matrix get into the layout that the native products read?

The packed copy lies in memory of its own on huge pages; `native/matmul/layout.h` says how. Floats
can be kept or quantised; blocks of a GGUF file are re-ordered and keep their numbers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from jubako.kernels.cpu import library
from jubako.kernels.cpu.library import Arena, Pool
from jubako.kernels.cpu.matmul import (
    FROM_BLOCKS,
    MATRIX_KINDS,
    OP_EMBED,
    OP_PACK,
    EmbedArgs,
    Matrix,
    PackArgs,
)
from jubako.kernels.cpu.tensors import ALL_DTYPES

PANEL = 32
"""Rows that lie together."""

_UNITS = {
    "F32": (1, 64),
    "BF16": (32, 1024),
    "INT8": (64, 1024),
    "Q8_0": (32, 544),
    "Q4_0": (32, 288),
    "Q4_1": (32, 320),
    "Q5_0": (32, 352),
    "Q5_1": (32, 384),
    "Q4_K": (256, 2304),
    "Q5_K": (256, 2816),
    "Q6_K": (256, 3360),
}
"""Kind → elements of k in a unit, bytes that 16 rows of a unit take."""

_PLAIN = {torch.float32: "F32", torch.bfloat16: "BF16"}

FROM_FLOATS = ("F32", "BF16", "INT8", "Q8_0", "Q4_0", "Q4_1")
"""Kinds that a tensor of floats can be packed to."""

_WEIGHTS = Arena()
"""Where packed matrices lie."""

_WORTH_DISCARDING = 1 << 20

_DISCARD_BYTES = 8 << 20
"""Of a source that is given back while it is packed, so many at a time."""

GGUF_KINDS = tuple(name for name in MATRIX_KINDS if name.startswith("Q"))
"""GGUF tensor types whose blocks can be packed as they are."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of a matrix and where they are: a tensor of floats, or a GGUF tensor's blocks.

    `data` is [rows, k] of float32, bfloat16 or float16, contiguous in k; or for a `type` of
    `GGUF_KINDS` uint8 [rows, bytes a row].
    """

    data: torch.Tensor
    type: str | None = None


class PackedMatrix:
    """A matrix [n, k], or several on the same input below each other, as the products read it.

    Interleaved ones are a gate [n / 2, k] above an up projection of the same shape, of which a
    panel has both.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        sizes: Sequence[int],
        k: int,
        *,
        interleaved: bool = False,
        take: Callable[[int], library.MemoryPiece] = _WEIGHTS.take,
    ) -> None:
        """Room for parts of `sizes` rows each. Raises ValueError for what has no layout.

        `take` gives memory of so many bytes, at a multiple of 64: zeroed, or such as
        `memory` of a matrix of the same form had it.
        """
        self.kinds = tuple(kinds)
        self.sizes = tuple(sizes)
        self.n = sum(sizes)
        self.k = k
        self.parts = len(self.sizes)
        self.interleaved = interleaved
        self.activation_bits = 8
        """Of `int8` matrices with bfloat16 activations: 8, or 16 for a tenth of the error."""
        self._matrices = (Matrix * self.parts)()
        self.memory: list[library.MemoryPiece] = []
        """Of each part the numbers, then the scales if it has some apart."""
        self._take = take
        for matrix, kind, size in zip(self._matrices, self.kinds, self.sizes, strict=True):
            self._lay_out(matrix, kind, size)
        self.address = ctypes.addressof(self._matrices)

    def _lay_out(self, matrix: Matrix, kind: str, size: int) -> None:
        unit_k, unit_bytes = _UNITS[kind]
        if kind in GGUF_KINDS and self.k % unit_k:
            raise ValueError(
                f"{kind} holds {unit_k} numbers together, and rows have {self.k}: not a multiple; "
                "pack it as BF16."
            )
        if self.interleaved and size % 2:
            raise ValueError(f"an interleaved matrix has two halves, and {size} rows do not")
        rows = size // 2 if self.interleaved else size
        panels = -(-rows // (PANEL // 2 if self.interleaved else PANEL))
        num_bytes = panels * -(-self.k // unit_k) * unit_bytes * 2
        data = self._take(num_bytes)
        self.memory.append(data)
        matrix.kind = MATRIX_KINDS[kind]
        matrix.interleaved = int(self.interleaved)
        matrix.n, matrix.k = size, self.k
        matrix.data = data.address
        if kind == "INT8":
            scales = self._take(4 * panels * PANEL)
            self.memory.append(scales)
            matrix.scales = scales.address

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that the packed copy takes."""
        return sum(piece.num_bytes for piece in self.memory)

    def put(self, pool: Pool, part: int, row: int, piece: Piece) -> None:
        """Write rows [row, row + len) of part `part`; of an interleaved one rows of both halves.

        A piece of an interleaved matrix lies in one half or is the whole matrix.
        """
        data, size = piece.data, self.sizes[part]
        if data.stride(-1) != 1:
            data = data.contiguous()
        half_size = size // 2
        if self.interleaved and row == 0 and data.shape[0] == size:
            self._put(pool, part, 0, 0, Piece(data[:half_size], piece.type))
            self._put(pool, part, 0, 1, Piece(data[half_size:], piece.type))
        elif self.interleaved:
            self._put(pool, part, row % half_size, row // half_size, Piece(data, piece.type))
        else:
            self._put(pool, part, row, 0, Piece(data, piece.type))

    def _put_whole(self, pool: Pool, part: int, row: int, piece: Piece, consume: bool) -> None:
        """As `put`; to `consume` is to give the source's memory back on the way."""
        data = piece.data
        if not consume or data.nbytes < _WORTH_DISCARDING:
            self.put(pool, part, row, piece)
            return
        row_bytes = data.stride(0) * data.element_size()
        step = max(PANEL, _DISCARD_BYTES // max(1, row_bytes))
        is_both = self.interleaved and data.shape[0] == self.sizes[part]
        size = data.shape[0] // (2 if is_both else 1)
        for begin in (0, size) if is_both else (0,):
            for start in range(begin, begin + size, step):
                some = data[start : min(start + step, begin + size)]
                self.put(pool, part, row + start, Piece(some, piece.type))
                library.discard(some.data_ptr(), some.nbytes)

    def _put(self, pool: Pool, part: int, row: int, half: int, piece: Piece) -> None:
        data, kind = piece.data, self.kinds[part]
        rows = self.sizes[part] // (2 if self.interleaved else 1)
        assert row + data.shape[0] <= rows, (row, data.shape, rows)
        if piece.type is None:
            if kind not in FROM_FLOATS:
                raise ValueError(
                    f"floats cannot be packed as {kind}; choose one of {', '.join(FROM_FLOATS)}"
                )
            assert data.shape[1] == self.k, (data.shape, self.k)
            source_kind = ALL_DTYPES[data.dtype]
        else:
            assert piece.type == kind, f"{piece.type} blocks in a matrix of {kind}"
            unit_k, unit_bytes = _UNITS[kind]
            assert data.shape[1] == self.k // unit_k * unit_bytes // 16, (data.shape, self.k)
            source_kind = FROM_BLOCKS + MATRIX_KINDS[kind]
        args = PackArgs(
            to=ctypes.addressof(self._matrices[part]),
            source=data.data_ptr(),
            source_stride=data.stride(0) * data.element_size(),
            row=row,
            rows=data.shape[0],
            source_kind=source_kind,
            half=half,
        )
        pool.run(OP_PACK, args)

    @classmethod
    def from_tensor(
        cls,
        weight: torch.Tensor,
        pool: Pool,
        *,
        interleaved: bool = False,
        kind: str | None = None,
        consume: bool = False,
    ) -> PackedMatrix:
        """`weight` [n, k] of floats, packed as `kind` (default: the tensor's dtype).

        With `consume` the memory of `weight`, which must be contiguous, is given back on the way,
        so that the matrix is never there twice.
        """
        kind = kind or _PLAIN.get(weight.dtype, "F32")
        weight = weight.detach()
        packed = cls((kind,), (weight.shape[0],), weight.shape[1], interleaved=interleaved)
        packed._put_whole(pool, 0, 0, Piece(weight), consume)
        return packed

    @classmethod
    def from_blocks(
        cls,
        pieces: Sequence[Piece],
        k: int,
        pool: Pool,
        *,
        interleaved: bool = False,
        consume: bool = False,
    ) -> PackedMatrix:
        """Matrices of a GGUF file below each other, as they are there; each may have its own type.

        Neighbours of one type become one part. For an interleaved one the pieces are gate and up,
        of one type. Raises ValueError if they are not, or a type has no layout. `consume` is as for
        `from_tensor`.
        """
        types = [piece.type for piece in pieces]
        for name in types:
            if name not in GGUF_KINDS:
                raise ValueError(f"{name} has no packed layout; there is {', '.join(GGUF_KINDS)}")
        if interleaved and len(set(types)) > 1:
            raise ValueError(
                f"gate and up cannot be interleaved, they are {' and '.join(map(str, types))}"
            )
        kinds: list[str] = []
        sizes: list[int] = []
        places: list[tuple[int, int]] = []
        for piece in pieces:
            kind = str(piece.type)
            if not kinds or kinds[-1] != kind:
                kinds.append(kind)
                sizes.append(0)
            places.append((len(kinds) - 1, sizes[-1]))
            sizes[-1] += piece.data.shape[0]
        packed = cls(kinds, sizes, k, interleaved=interleaved)
        for piece, (part, row) in zip(pieces, places, strict=True):
            packed._put_whole(pool, part, row, piece, consume)
        return packed

    def rows(
        self, ids: torch.Tensor, pool: Pool, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        """Rows `ids` [r] int64 of a matrix of one part that is not interleaved → [r, k]."""
        assert self.parts == 1
        assert not self.interleaved
        ids = ids.to(torch.int64).contiguous()
        out = torch.empty(len(ids), self.k, dtype=dtype)
        count = ctypes.c_int64(len(ids))
        args = EmbedArgs(
            rows=ctypes.addressof(count),
            ids=ids.data_ptr(),
            w=self.address,
            y=out.data_ptr(),
            ldy=self.k,
            scale=1.0,
            ids_bits=64,
            y_dtype=ALL_DTYPES[dtype],
        )
        pool.run(OP_EMBED, args)
        return out
