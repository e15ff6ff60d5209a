"""What is the feed-forward half of a decoder block?"""

from __future__ import annotations

import torch
from torch import nn

from jubako.kernels.cpu.recording import Program, Rows
from jubako.layers.activation import activation as plain_activation
from jubako.layers.activation import gated_activation, gated_form, plain_form
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
        self.form = gated_form(activation)

    def pack(self, quantization: str = "none") -> None:
        """Pack gate and up beside each other, so that a product can end in the activation."""
        self.gate_up_proj.pack(quantization, interleaved=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        first = self.gate_up_proj
        if first.packed is not None:
            gated = first.kernels.packed_gated_linear(x, first.packed, first.bias, self.form)
            return self.down_proj(gated)
        return self.down_proj(self.activation(self.gate_up_proj(x)))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        gated = self.gate_up_proj.record(
            program, x, "gated", dtype=program.dtype, activation=self.form
        )
        return self.down_proj.record(program, gated, "delta", to_stream=to_stream)


class PlainMLP(nn.Module):
    """`down(act(up(x)))`."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, activation: str, bias: bool = False
    ) -> None:
        super().__init__()
        self.up_proj = RowParallelLinear(hidden_size, intermediate_size, bias)
        self.down_proj = RowParallelLinear(intermediate_size, hidden_size, bias)
        self.activation = plain_activation(activation)
        self.form = plain_form(activation)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        return self.down_proj(self.activation(self.up_proj(x)))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        inner = self.up_proj.record(program, x, "inner")
        acted = program.pointwise(inner, self.form, "acted", dtype=program.dtype)
        return self.down_proj.record(program, acted, "delta", to_stream=to_stream)
