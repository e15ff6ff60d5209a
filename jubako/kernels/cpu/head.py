"""What do the native ops take that choose tokens without logits? Mirrors `native/head/args.h`."""

from __future__ import annotations

import ctypes

from jubako.kernels.cpu.library import HEAD_OPS
from jubako.kernels.cpu.matmul import matmul_scratch_bytes

OP_HEAD_GREEDY = HEAD_OPS

_P = ctypes.c_void_p
_I = ctypes.c_int32
_L = ctypes.c_int64


class HeadGreedyArgs(ctypes.Structure):
    """The id of each row's largest logit, the lowest among equals."""

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


def head_scratch_bytes(threads: int, rows: int, k: int) -> int:
    """Scratch that a head needs for at most `rows` rows of k elements on `threads` threads."""
    return matmul_scratch_bytes(threads, rows, k) + threads * rows * (256 + 16) + 64
