"""What do the native ops take that choose tokens without logits? Mirrors `native/head/args.h`."""

from __future__ import annotations

import ctypes

import numpy as np

from jubako.kernels.cpu.library import HEAD_OPS
from jubako.kernels.cpu.matmul import matmul_scratch_bytes

OP_HEAD_GREEDY = HEAD_OPS
OP_HEAD_CANDIDATES = HEAD_OPS + 1

DRAW = 1
"""Flag of a row: instead of its best tokens those that may win a draw from the vocabulary."""
SUM = 2
"""Flag of a row: the logarithm of the sum of exponentials of its logits."""
SUM_SCALED = 4
"""Flag of a row: the same of its logits over the temperature."""

MAX_COUNT = 512
CAPACITY = 1024
_ROW_BYTES = 320

NOT_NUMBERS = -2
"""`found` of a row with a logit that is NaN; -1 is of one with more equals than there is room for.
"""

ROW = np.dtype(
    [("count", np.int32), ("flags", np.int32), ("temperature", np.float32), ("key", np.int32, 3)]
)
"""What a row wants: its `count` best tokens and their equals, or what its flags say."""

_P = ctypes.c_void_p
_I = ctypes.c_int32
_L = ctypes.c_int64


class HeadGreedyArgs(ctypes.Structure):
    """The id of each row's largest logit, the lowest among equals; -1 if there is none."""

    _fields_ = [
        ("rows", _P),
        ("x", _P),
        ("ldx", _L),
        ("w", _P),
        ("bias", _P),
        ("ids", _P),
        ("values", _P),
        ("scratch", _P),
        ("scratch_bytes", _L),
        *((name, _I) for name in ("x_dtype", "round_dtype", "activation_bits")),
    ]


class HeadCandidatesArgs(ctypes.Structure):
    """The tokens among which each row's choice lies, by ascending id, and their logits."""

    _fields_ = [
        ("rows", _P),
        ("x", _P),
        ("ldx", _L),
        ("w", _P),
        ("bias", _P),
        ("wanted", _P),
        ("found", _P),
        ("ids", _P),
        ("values", _P),
        ("sums", _P),
        ("allowed", _P),
        ("scratch", _P),
        ("scratch_bytes", _L),
        *((name, _I) for name in ("x_dtype", "round_dtype", "activation_bits")),
    ]


def head_scratch_bytes(threads: int, rows: int, k: int) -> int:
    """Scratch that a head needs for at most `rows` rows of k elements on `threads` threads."""
    return matmul_scratch_bytes(threads, rows, k) + threads * rows * (256 + 16) + 64


def head_candidates_scratch_bytes(threads: int, rows: int, k: int) -> int:
    """The same for `OP_HEAD_CANDIDATES`."""
    per_row = _ROW_BYTES + CAPACITY * 8
    return matmul_scratch_bytes(threads, rows, k) + threads * rows * per_row + 64
