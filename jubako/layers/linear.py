"""How does a model multiply by its weight matrices?

The classes say how a matrix would be divided among tensor-parallel ranks; with one rank each is a
plain matrix, and the merged ones hold several of a checkpoint's matrices, one below the other.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from jubako.kernels.cpu.recording import F32, Program, RecordingError, Rows
from jubako.kernels.registry import get_kernels
from jubako.layers.weights import StoredBlocks, WeightTarget, parameter, whole_parameter


class _Linear(nn.Module):
    """A matrix [sum of parts, in], whose parts are a checkpoint's tensors.

    Or the checkpoint has the parts below each other in one tensor, as they are here.
    """

    def __init__(self, input_size: int, parts: dict[str, int], bias: bool) -> None:
        super().__init__()
        self.parts = parts
        self.weight = parameter(sum(parts.values()), input_size)
        self.bias = parameter(sum(parts.values())) if bias else None
        self.kernels = get_kernels()
        self.packed: Any = None
        """The weight in the form that the kernels like best, instead of `weight`."""
        self._blocks: dict[int, StoredBlocks] = {}
        """First row → blocks that were kept as they are stored, until the weight is packed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] → [T, out]."""
        if self.packed is not None:
            return self.kernels.packed_linear(x, self.packed, self.bias)
        return self.kernels.linear(x, self.weight, self.bias)

    def pack(self, quantization: str = "none", interleaved: bool = False) -> None:
        """Let the kernels take over the weight, once it is loaded; see `Kernels.pack`."""
        if self.packed is None:
            self.packed = pack_parameter(
                self.kernels, self.weight, self._blocks, quantization, interleaved
            )

    def record(self, program: Program, x: Rows, role: str, **how: Any) -> Rows:
        """As `forward`, in a program; `how` as for `Program.linear`."""
        if self.packed is None:
            raise RecordingError("a weight that is not packed")
        return program.linear(x, self.packed, self.bias, role, **how)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight` and `bias` of every part, or of all in one."""
        start = 0
        for part, size in self.parts.items():
            keep = partial(self._blocks.__setitem__, start)
            yield f"{part or name}.weight", self._target(self.weight, start, size, keep)
            if self.bias is not None:
                yield f"{part or name}.bias", self._target(self.bias, start, size)
            start += size
        if len(self.parts) > 1:
            parts = tuple(f"{part}.weight" for part in self.parts)
            keep = partial(self._blocks.__setitem__, 0)
            yield f"{name}.weight", whole_parameter(self.weight, parts=parts, keep=keep)
            if self.bias is not None:
                parts = tuple(f"{part}.bias" for part in self.parts)
                yield f"{name}.bias", whole_parameter(self.bias, parts=parts)

    @staticmethod
    def _target(parameter: nn.Parameter, start: int, size: int, keep: Any = None) -> WeightTarget:
        if size == parameter.shape[0]:
            return whole_parameter(parameter, keep=keep)
        view = parameter.data[start : start + size]
        return WeightTarget(view, tuple(view.shape), keep=keep)


def pack_parameter(
    kernels: Any,
    weight: nn.Parameter,
    blocks: dict[int, StoredBlocks],
    quantization: str = "none",
    interleaved: bool = False,
) -> Any:
    """The weight as `Kernels.pack` makes it, and its own memory given back; None if it stays.

    `blocks` by their first row are parts of the weight that are not in it yet; they are packed as
    they are if they are all of it and the kernels can, and it is left empty.
    """
    packed = None
    if blocks:
        pieces = [blocks[row] for row in sorted(blocks)]
        if sum(piece.shape[0] for piece in pieces) == weight.shape[0]:
            packed = kernels.pack_blocks(pieces, interleaved)
        if packed is None:
            for row, piece in blocks.items():
                weight.data[row : row + piece.shape[0]] = piece.expand(piece.data)
        blocks.clear()
    if packed is None:
        packed = kernels.pack(weight.data, interleaved, quantization)
    if packed is not None:
        weight.data = weight.data.new_empty(0)
    return packed


class RowParallelLinear(_Linear):
    """A matrix of which each rank would hold some input columns."""

    def __init__(self, input_size: int, output_size: int, bias: bool = False) -> None:
        super().__init__(input_size, {"": output_size}, bias)


class MergedColumnParallelLinear(_Linear):
    """Several matrices on the same input, of each of which each rank would hold some rows."""

    def __init__(self, input_size: int, parts: dict[str, int], bias: bool = False) -> None:
        super().__init__(input_size, parts, bias)


class QKVParallelLinear(_Linear):
    """The projections to queries, keys and values, of which each rank would hold some heads."""

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        num_heads: int,
        num_kv_heads: int,
        bias: bool = False,
    ) -> None:
        self.head_size = head_size
        self.num_heads = num_heads
        self.num_kv_heads = num_kv_heads
        kv_size = num_kv_heads * head_size
        parts = {"q_proj": num_heads * head_size, "k_proj": kv_size, "v_proj": kv_size}
        super().__init__(hidden_size, parts, bias)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:  # type: ignore[override]
        """x [T, hidden] → query and key heads [T, Hq + Hkv, D], values [T, Hkv, D]; views."""
        heads = super().forward(x).unflatten(-1, (-1, self.head_size))
        qk = self.num_heads + self.num_kv_heads
        return heads[:, :qk], heads[:, qk:]

    def record(self, program: Program, x: Rows, role: str, **how: Any) -> Rows:
        """As `forward`, in a program: all heads beside each other."""
        return super().record(program, x, role, dtype=F32, **how)
