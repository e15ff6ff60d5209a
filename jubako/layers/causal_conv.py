"""How does a layer mix each channel with its last few inputs?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from jubako.kernels.cpu.recording import Program, Rows, StateName
from jubako.kernels.registry import get_kernels
from jubako.kernels.state_slots import StateSlots
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


class CausalConv1d(nn.Module):
    """A causal convolution of each channel by itself, through SiLU if `silu`."""

    def __init__(self, channels: int, width: int, bias: bool, *, silu: bool = True) -> None:
        super().__init__()
        self.weight = parameter(channels, width)
        self.bias = parameter(channels) if bias else None
        self.silu = silu
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor, state: torch.Tensor, slots: StateSlots) -> torch.Tensor:
        """x [T, channels] → the same; `state` [blocks, width - 1, channels]."""
        return self.kernels.causal_conv1d(x, self.weight, self.bias, state, slots, silu=self.silu)

    def record(self, program: Program, x: Rows, state: StateName) -> Rows:
        """As `forward` of float32 rows, in a program."""
        return program.causal_conv(x, self.weight, self.bias, state, silu=self.silu)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight` [channels, 1, width], and `bias` if there is one."""
        channels, width = self.weight.shape
        shape = (channels, 1, width)
        yield f"{name}.weight", WeightTarget(self.weight.data.view(shape), shape)
        if self.bias is not None:
            yield f"{name}.bias", whole_parameter(self.bias)
