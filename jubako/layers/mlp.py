"""What is the feed-forward half of a decoder block?"""

from __future__ import annotations

import torch
from torch import nn

from jubako.layers.activation import gated_activation
from jubako.layers.linear import MergedColumnParallelLinear, RowParallelLinear


class GatedMLP(nn.Module):
    """`down(act(gate(x)) · up(x))` (Shazeer 2020)."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        parts = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        self.gate_up_proj = MergedColumnParallelLinear(hidden_size, parts, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias)
        self.activation = gated_activation(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        return self.down_proj(self.activation(self.gate_up_proj(x)))
