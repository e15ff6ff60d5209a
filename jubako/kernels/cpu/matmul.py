"""What do the native ops on packed matrices take? Mirrors `native/matmul/args.h`."""

from __future__ import annotations

import ctypes

from jubako.kernels.cpu.library import MATMUL_OPS

OP_PACK = MATMUL_OPS
OP_MATMUL = MATMUL_OPS + 1
OP_EMBED = MATMUL_OPS + 2
OP_READ = MATMUL_OPS + 3

MATRIX_KINDS = {
    "F32": 0,
    "BF16": 1,
    "INT8": 2,
    "Q8_0": 3,
    "Q4_0": 4,
    "Q4_1": 5,
    "Q5_0": 6,
    "Q5_1": 7,
    "Q4_K": 8,
    "Q5_K": 9,
    "Q6_K": 10,
}
"""Name → number of the ways to hold a matrix; from "Q8_0" on they are ggml's types."""

FROM_BLOCKS = 16
"""`PackArgs.from_kind` of a ggml type is this plus the type's number."""

EPILOGUE_NONE = 0
EPILOGUE_ADD = 1
EPILOGUES_MUL = {"silu": 2, "gelu_tanh": 3, "gelu": 4}
"""Activation → epilogue `act(gate) · up` of an interleaved matrix."""

_P = ctypes.c_void_p
_I = ctypes.c_int32
_L = ctypes.c_int64
_F = ctypes.c_float


class Matrix(ctypes.Structure):
    """A packed matrix; `packed_matrix.PackedMatrix` owns what it points to."""

    _fields_ = [
        ("kind", _I),
        ("interleaved", _I),
        ("n", _L),
        ("k", _L),
        ("data", _P),
        ("scales", _P),
    ]


class PackArgs(ctypes.Structure):
    """Some rows of a packed matrix from rows that follow each other."""

    _fields_ = [
        ("to", _P),
        ("source", _P),
        *((name, _L) for name in ("source_stride", "row", "rows")),
        ("source_kind", _I),
        ("half", _I),
    ]


class MatmulArgs(ctypes.Structure):
    """`y = x @ w.T + bias`, then the epilogue."""

    _fields_ = [
        ("rows", _P),
        ("x", _P),
        ("ldx", _L),
        ("w", _P),
        ("bias", _P),
        ("y", _P),
        ("ldy", _L),
        ("scratch", _P),
        ("scratch_bytes", _L),
        *((name, _I) for name in ("parts", "x_dtype", "y_dtype", "epilogue", "activation_bits")),
    ]


class EmbedArgs(ctypes.Structure):
    """`y = scale · w[ids]`."""

    _fields_ = [
        ("rows", _P),
        ("ids", _P),
        ("w", _P),
        ("y", _P),
        ("ldy", _L),
        ("scale", _F),
        ("ids_bits", _I),
        ("y_dtype", _I),
    ]


class ReadArgs(ctypes.Structure):
    """Reads memory and does nothing with it, for comparison."""

    _fields_ = [("data", _P), ("bytes", _L), ("sums", _P)]


def _round_up(n: int, unit: int) -> int:
    return -(-n // unit) * unit


def matmul_scratch_bytes(threads: int, rows: int, k: int) -> int:
    """Scratch that a product of at most `rows` rows of k elements needs on `threads` threads.

    It need not be cleared; ops that run one after another may share it.
    """
    shared = _round_up(rows, 32) * (_round_up(k, 64) * 4 + 64)
    return shared + threads * (_round_up(k, 256) * 32 * 4 + 4096)
