"""How does a model multiply by matrices that hold several projections, mixed head by head?

A checkpoint may have the query of head 0, its gate, the query of head 1, and so on, in one matrix.
Here the rows of each projection stand together, sorted out as the weights come in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.kernels.cpu.recording import Program, RecordingError, Rows
from jubako.kernels.registry import get_kernels
from jubako.layers.linear import pack_parameter
from jubako.layers.weights import WeightTarget, parameter


@dataclass(frozen=True)
class Mixed:
    """One tensor of a checkpoint: `groups` times, `rows` of each projection in turn."""

    groups: int
    rows: Mapping[str, int]
    """Projection → its rows in a group."""


class GroupedLinear(nn.Module):
    """All projections of one input: `tensors` names the checkpoint's, beside the layer.

    `order` names the projections as they follow each other in the result.
    """

    def __init__(
        self,
        input_size: int,
        tensors: Mapping[str, Mixed],
        order: tuple[str, ...],
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.tensors = dict(tensors)
        totals = {
            part: mixed.groups * rows
            for mixed in tensors.values()
            for part, rows in mixed.rows.items()
        }
        self.sizes = tuple(totals[part] for part in order)
        self.order = order
        self.weight = parameter(sum(self.sizes), input_size)
        self.bias = parameter(sum(self.sizes)) if bias else None
        self.kernels = get_kernels()
        self.packed: Any = None
        """The weight in the form that the kernels like best, instead of `weight`."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, in] → [T, out], the projections in `order`, each with its groups in turn."""
        if self.packed is not None:
            return self.kernels.packed_linear(x, self.packed, self.bias)
        return self.kernels.linear(x, self.weight, self.bias)

    def pack(self, quantization: str = "none") -> None:
        """Let the kernels take over the weight, once it is loaded; see `Kernels.pack`."""
        if self.packed is None:
            self.packed = pack_parameter(self.kernels, self.weight, {}, quantization)

    def record(self, program: Program, x: Rows, role: str) -> Rows:
        """As `forward`, in a program: float32."""
        if self.packed is None:
            raise RecordingError("a weight that is not packed")
        return program.linear(x, self.packed, self.bias, role)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`, and `bias` if there is one, of every tensor."""
        del name
        for kind, whole in (("weight", self.weight), ("bias", self.bias)):
            if whole is None:
                continue
            views = dict(zip(self.order, whole.data.split(self.sizes)))
            for tensor, mixed in self.tensors.items():
                count = mixed.groups * sum(mixed.rows.values())
                yield (
                    f"{tensor}.{kind}",
                    _MixedTarget(
                        whole.data,
                        (count, *whole.shape[1:]),
                        views=tuple(
                            (views[part].unflatten(0, (mixed.groups, rows)), rows)
                            for part, rows in mixed.rows.items()
                        ),
                    ),
                )


@dataclass(frozen=True)
class _MixedTarget(WeightTarget):
    """Where the rows of one tensor go: views [groups, rows, ...], in the order of a group."""

    views: tuple[tuple[torch.Tensor, int], ...] = ()

    def load(self, tensor: torch.Tensor) -> None:
        """Take `tensor`, whose shape has been checked."""
        groups = self.views[0][0].shape[0]
        parts = tensor.unflatten(0, (groups, -1)).split([rows for _, rows in self.views], dim=1)
        for (view, _), part in zip(self.views, parts):
            view.copy_(part)
