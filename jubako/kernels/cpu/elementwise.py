"""What do the native ops on single rows take? Mirrors `native/elementwise/args.h`."""

from __future__ import annotations

import ctypes

from jubako.kernels.cpu.library import ELEMENTWISE_OPS

OP_NORM = ELEMENTWISE_OPS
OP_ADD_NORM = ELEMENTWISE_OPS + 1
OP_ROPE = ELEMENTWISE_OPS + 2
OP_GATED_ACTIVATION = ELEMENTWISE_OPS + 3
OP_CONVERT = ELEMENTWISE_OPS + 4
OP_ROTATION = ELEMENTWISE_OPS + 5
OP_KV_WRITE = ELEMENTWISE_OPS + 6
OP_POINTWISE = ELEMENTWISE_OPS + 16
OP_GATE = ELEMENTWISE_OPS + 17
OP_GATED_NORM = ELEMENTWISE_OPS + 18
OP_POSITION_SCALE = ELEMENTWISE_OPS + 19

FUNCTIONS = {
    "identity": 0,
    "silu": 1,
    "gelu_tanh": 2,
    "gelu": 3,
    "relu": 4,
    "relu2": 5,
    "tanh": 6,
    "sigmoid": 7,
    "softplus": 8,
}
"""Functions of one number; "relu2" is the square of what is above 0."""

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
MAX_HEAD_SIZE = 1024

_P = ctypes.c_void_p
_I = ctypes.c_int32
_L = ctypes.c_int64
_F = ctypes.c_float


class NormArgs(ctypes.Structure):
    """`y = norm(x) · weight + bias`."""

    _fields_ = [
        *((name, _P) for name in ("rows", "index", "x", "y", "weight", "bias")),
        *((name, _L) for name in ("size", "ldx", "ldy")),
        *((name, _I) for name in ("x_dtype", "y_dtype", "kind")),
        ("eps", _F),
    ]


class AddNormArgs(ctypes.Structure):
    """`stream += scale · norm(delta)`, then `y = norm(stream)`."""

    _fields_ = [
        *(
            (name, _P)
            for name in (
                "rows",
                "delta",
                "stream",
                "y",
                "post_weight",
                "post_bias",
                "weight",
                "bias",
            )
        ),
        *((name, _L) for name in ("size", "ld_delta", "ld_stream", "ldy")),
        *((name, _I) for name in ("delta_dtype", "y_dtype", "kind")),
        ("eps", _F),
        ("scale", _F),
    ]


class RopeArgs(ctypes.Structure):
    """Norm and rotation of query and key heads, and the write into the pages."""

    _fields_ = [
        *(
            (name, _P)
            for name in (
                "rows",
                "positions",
                "cos",
                "sin",
                "qkv",
                "q_out",
                "weight",
                "slots",
                "pages",
            )
        ),
        *((name, _L) for name in ("ld_table", "ld_token", "ld_head", "ld_out_token")),
        ("block_stride", _L),
        *((name, _I) for name in ("dtype", "out_dtype", "kv_dtype")),
        *((name, _I) for name in ("num_heads", "num_kv_heads", "head_size", "rotary")),
        *((name, _I) for name in ("interleaved", "block_size")),
        ("eps", _F),
    ]


class RotationArgs(ctypes.Structure):
    """Cosines and sines of a step's positions."""

    _fields_ = [
        *((name, _P) for name in ("rows", "positions", "frequencies", "cos", "sin")),
        *((name, _L) for name in ("size", "ld_table")),
        ("factor", _F),
    ]


class KvWriteArgs(ctypes.Structure):
    """Keys and values into the pages."""

    _fields_ = [
        *((name, _P) for name in ("rows", "key", "value", "slots", "pages")),
        *((name, _L) for name in ("key_token", "key_head", "value_token", "value_head")),
        ("block_stride", _L),
        *((name, _I) for name in ("dtype", "kv_dtype", "num_kv_heads", "head_size", "block_size")),
    ]


class GatedActivationArgs(ctypes.Structure):
    """`y = act(gate) · up`."""

    _fields_ = [
        *((name, _P) for name in ("rows", "x", "y")),
        *((name, _L) for name in ("size", "ldx", "ldy")),
        *((name, _I) for name in ("x_dtype", "y_dtype", "activation")),
    ]


class ConvertArgs(ctypes.Structure):
    """`y = x · scale` in another dtype."""

    _fields_ = [
        *((name, _P) for name in ("rows", "index", "x", "y")),
        *((name, _L) for name in ("size", "ldx", "ldy")),
        *((name, _I) for name in ("x_dtype", "y_dtype")),
        ("scale", _F),
    ]


class PointwiseArgs(ctypes.Structure):
    """`y = clamp(f(x + bias)) · factor`."""

    _fields_ = [
        *((name, _P) for name in ("rows", "x", "y", "bias", "factor")),
        *((name, _L) for name in ("size", "ldx", "ldy")),
        *((name, _I) for name in ("x_dtype", "y_dtype", "function")),
        *((name, _F) for name in ("low", "high")),
    ]


class GateArgs(ctypes.Structure):
    """`y = x · f(gate)`, or `y +=` it."""

    _fields_ = [
        *((name, _P) for name in ("rows", "x", "gate", "y")),
        *((name, _L) for name in ("size", "ldx", "ld_gate", "ldy")),
        *((name, _I) for name in ("x_dtype", "gate_dtype", "y_dtype", "function", "one", "add")),
    ]


class GatedNormArgs(ctypes.Structure):
    """A norm of groups of neighbours, before or after a gate."""

    _fields_ = [
        *((name, _P) for name in ("rows", "x", "gate", "y", "weight")),
        *((name, _L) for name in ("size", "group", "ldx", "ld_gate", "ldy")),
        *((name, _I) for name in ("x_dtype", "gate_dtype", "y_dtype", "norm_first")),
        ("eps", _F),
    ]


class PositionScaleArgs(ctypes.Structure):
    """`y = 1 + scale · log(1 + floor((position + offset) / every))`."""

    _fields_ = [
        *((name, _P) for name in ("rows", "positions", "y")),
        ("ldy", _L),
        *((name, _F) for name in ("scale", "offset", "every")),
    ]
