"""How does a mixture of experts run in native code? Mirrors `native/moe/args.h`."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

import torch

from jubako.kernels.cpu.library import MOE_OPS, Pool, Scratch, discard
from jubako.kernels.cpu.matmul import matmul_scratch_bytes
from jubako.kernels.cpu.packed_matrix import PackedMatrix, Piece
from jubako.kernels.cpu.recording import EXPERT_ACTIVATIONS, ExpertChoice, ExpertRules
from jubako.kernels.cpu.tensors import DTYPES, pointer

OP_ROUTE = MOE_OPS
OP_EXPERTS = MOE_OPS + 1

MAX_EXPERTS = 1024
SCORES = {"softmax": 0, "sigmoid": 1, "softmax of chosen": 2, "sigmoid of chosen": 3}
GATED_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "clamped_swiglu": 3}
PLAIN_ACTIVATIONS = dict(zip(EXPERT_ACTIVATIONS, (0, 1, 2, 4), strict=True))

_P = ctypes.c_void_p
_I = ctypes.c_int32
_L = ctypes.c_int64
_F = ctypes.c_float
_ROWS = 512
"""That are computed together, at most."""


class RouteArgs(ctypes.Structure):
    """Logits to the experts of each row and their weights."""

    _fields_ = [
        ("rows", _P),
        ("logits", _P),
        ("ld_logits", _L),
        ("bias", _P),
        ("weights", _P),
        ("ids", _P),
        *((name, _I) for name in ("experts", "k", "groups", "chosen_groups", "group_best")),
        ("score", _I),
        ("normalise", _I),
        ("factor", _F),
    ]


class ExpertsArgs(ctypes.Structure):
    """Rows and their experts to the weighted sum of answers."""

    _fields_ = [
        ("rows", _P),
        ("x", _P),
        ("ldx", _L),
        *((name, _P) for name in ("weights", "ids", "up", "down", "up_bias", "down_bias", "y")),
        ("ldy", _L),
        ("scratch", _P),
        ("scratch_bytes", _L),
        *((name, _I) for name in ("experts", "k", "x_dtype", "y_dtype", "add", "activation")),
        ("weigh_input", _I),
        ("activation_bits", _I),
        ("limit", _F),
        ("alpha", _F),
    ]


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The matrices of a layer's experts, as the op reads them, one expert's a part."""

    up: PackedMatrix
    """Gate and up interleaved; or up alone, of experts without a gate."""
    down: PackedMatrix

    @property
    def num_experts(self) -> int:
        """How many there are."""
        return self.up.parts

    @property
    def hidden_size(self) -> int:
        """Elements that an expert takes and gives."""
        return self.up.k

    @property
    def activations(self) -> dict[str, int]:
        """The names of what can lie between the matrices."""
        return GATED_ACTIVATIONS if self.up.interleaved else PLAIN_ACTIVATIONS

    def scratch_bytes(self, threads: int, rows: int, k: int, itemsize: int) -> int:
        """Scratch of the op for at most `rows` rows that ask k experts each.

        `itemsize` is that of an element of the rows.
        """
        rows = min(rows, _ROWS)
        pairs, size = rows * k, self.down.k
        needed = 4 * (self.num_experts + 1) + 2 * 4 * pairs + 3 * 64
        needed += pairs * _odd_lines(self.hidden_size * itemsize)
        needed += pairs * _odd_lines(size * itemsize)
        needed += pairs * _odd_lines(self.hidden_size * 4)
        return needed + matmul_scratch_bytes(threads, pairs, max(self.hidden_size, size))

    @classmethod
    def from_tensors(
        cls, up: torch.Tensor, down: torch.Tensor, pool: Pool, *, gated: bool, kind: str | None
    ) -> PackedExperts:
        """`up` [E, 2 · size, hidden], a gate above an up projection, or [E, size, hidden] if not
        `gated`, and `down` [E, hidden, size], packed as `kind` (default: their dtype).

        Their content is lost: memory of contiguous ones is given back on the way.
        """
        return cls(_pack(up, pool, gated, kind), _pack(down, pool, False, kind))


def _pack(weights: torch.Tensor, pool: Pool, interleaved: bool, kind: str | None) -> PackedMatrix:
    count, rows, columns = weights.shape
    kind = kind or {torch.float32: "F32", torch.bfloat16: "BF16"}[weights.dtype]
    packed = PackedMatrix((kind,) * count, (rows,) * count, columns, interleaved=interleaved)
    for expert, weight in enumerate(weights.detach()):
        packed.put(pool, expert, 0, Piece(weight))
        if weight.is_contiguous():
            discard(weight.data_ptr(), weight.nbytes)
    return packed


def _odd_lines(num_bytes: int) -> int:
    return (-(-num_bytes // 64) | 1) * 64


def route_args(num_experts: int, routing: ExpertChoice) -> RouteArgs:
    """The arguments that no step changes; the bias is kept by the caller."""
    return RouteArgs(
        bias=pointer(routing.bias),
        experts=num_experts,
        k=routing.k,
        groups=routing.groups,
        chosen_groups=routing.chosen_groups,
        group_best=routing.group_best,
        score=SCORES[routing.score],
        normalise=routing.normalise,
        factor=routing.factor,
    )


def experts_args(packed: PackedExperts, rules: ExpertRules) -> ExpertsArgs:
    """The arguments that no step changes; float32 biases are kept by the caller."""
    return ExpertsArgs(
        up=packed.up.address,
        down=packed.down.address,
        up_bias=pointer(rules.up_bias),
        down_bias=pointer(rules.down_bias),
        experts=packed.num_experts,
        activation=packed.activations[rules.activation],
        weigh_input=rules.weigh_input,
        activation_bits=packed.up.activation_bits,
        limit=math.inf if rules.limit is None else rules.limit,
        alpha=rules.alpha,
    )


def run_experts(
    pool: Pool,
    scratch: Scratch,
    packed: PackedExperts,
    rules: ExpertRules,
    x: torch.Tensor,
    weights: torch.Tensor,
    expert_ids: torch.Tensor,
) -> torch.Tensor:
    """x [T, hidden], weights and ids [T, k] → the weighted sum of answers, of x's dtype."""
    rows, k = expert_ids.shape
    x = x if x.stride(-1) == 1 else x.contiguous()
    weights = weights.float().contiguous()
    ids = expert_ids.to(torch.int32).contiguous()
    out = torch.empty(rows, packed.hidden_size, dtype=x.dtype)
    count = ctypes.c_int64(rows)
    args = experts_args(packed, rules)
    args.rows = ctypes.addressof(count)
    args.x, args.ldx, args.x_dtype = x.data_ptr(), x.stride(0), DTYPES[x.dtype]
    args.weights, args.ids, args.k = weights.data_ptr(), ids.data_ptr(), k
    args.y, args.ldy, args.y_dtype, args.add = out.data_ptr(), out.stride(0), args.x_dtype, 0
    scratch.run(pool, OP_EXPERTS, args, packed.scratch_bytes(pool.num_threads, rows, k, x.itemsize))
    return out
