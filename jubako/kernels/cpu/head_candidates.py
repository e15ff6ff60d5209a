"""Which tokens may a row still choose, and their logits, without writing all logits?"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np
import torch

from jubako.kernels.cpu.head import (
    CAPACITY,
    OP_HEAD_CANDIDATES,
    HeadCandidatesArgs,
    head_candidates_scratch_bytes,
)
from jubako.kernels.cpu.library import Pool, Scratch
from jubako.kernels.cpu.packed_matrix import PackedMatrix
from jubako.kernels.cpu.tensors import DTYPES, address

Array = np.ndarray[Any, Any]


class Candidates(NamedTuple):
    """What was found for some rows. Row i has `found[i]` candidates, ids ascending.

    Where `found` is negative there are none: see `head.NOT_NUMBERS`.
    """

    found: Array
    """[r] int32."""
    ids: Array
    """[r, CAPACITY] int32."""
    values: Array
    """[r, CAPACITY] float32: logits, as the model's dtype rounds them."""
    sums: Array
    """[r, 2] float64, of `head.SUM` and `head.SUM_SCALED`; others are undefined."""


class CandidateHead:
    """The head of a model: a matrix, and room for what is found in its products."""

    def __init__(self, matrix: PackedMatrix, pool: Pool) -> None:
        self.vocab_size = matrix.n
        self._matrix = matrix
        self._pool = pool
        self._scratch = Scratch()
        self._room = Candidates(*(np.empty(0) for _ in Candidates._fields))

    def find(self, hidden: torch.Tensor, wanted: Array, allowed: Array | None = None) -> Candidates:
        """Candidates of hidden states [r, k], whose columns follow each other.

        `wanted` [r] is of type `head.ROW`. `allowed` [r] uint64 has the address of each row's mask,
        int32 words that cover the vocabulary, a set bit for a token that may be chosen; 0 where all
        may. What is returned is overwritten by the next call.
        """
        rows, k = hidden.shape
        if len(self._room.found) < rows:
            self._room = Candidates(
                np.empty(rows, np.int32),
                np.empty((rows, CAPACITY), np.int32),
                np.empty((rows, CAPACITY), np.float32),
                np.empty((rows, 2), np.float64),
            )
        count = ctypes.c_int64(rows)
        wanted = np.ascontiguousarray(wanted)
        dtype = DTYPES[hidden.dtype]
        args = HeadCandidatesArgs(
            rows=ctypes.addressof(count),
            x=hidden.data_ptr(),
            ldx=hidden.stride(0),
            w=self._matrix.address,
            wanted=address(wanted),
            found=address(self._room.found),
            ids=address(self._room.ids),
            values=address(self._room.values),
            sums=address(self._room.sums),
            allowed=None if allowed is None else address(allowed),
            x_dtype=dtype,
            round_dtype=dtype,
            activation_bits=self._matrix.activation_bits,
        )
        needed = head_candidates_scratch_bytes(self._pool.num_threads, rows, k)
        self._scratch.run(self._pool, OP_HEAD_CANDIDATES, args, needed)
        return Candidates(*(part[:rows] for part in self._room))
