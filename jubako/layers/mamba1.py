"""What is the state-space half of a decoder block (Mamba: Gu and Dao 2023, arXiv 2312.00752)?

With norms of what a token's step length, writing and reading are made of (Jamba: AI21 2024, arXiv
2403.19887).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import Program, Rows
from jubako.kernels.registry import get_kernels
from jubako.layers.causal_conv import CausalConv1d
from jubako.layers.linear import RowParallelLinear
from jubako.layers.norm import RMSNorm
from jubako.layers.recurrent import RecurrentLayer, state_dtype
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


@dataclass(frozen=True)
class Mamba1Args:
    """Sizes of one layer."""

    hidden_size: int
    intermediate_size: int
    state_size: int
    conv_kernel: int
    time_step_rank: int
    conv_bias: bool
    proj_bias: bool
    norm_eps: float


class Mamba1Mixer(RecurrentLayer):
    """Projection, convolution, recurrence, gate, and the projection back."""

    mamba_type = "mamba1"
    writes_borders = True

    def __init__(self, args: Mamba1Args, *, config: JubakoConfig, prefix: str) -> None:
        size, state_size = args.intermediate_size, args.state_size
        super().__init__(
            config=config,
            layer_name=prefix,
            states={
                "conv": ((args.conv_kernel - 1, size), state_dtype(config, "conv")),
                "ssm": ((size, state_size), state_dtype(config, "ssm")),
            },
        )
        self.args = args
        self.in_proj = RowParallelLinear(args.hidden_size, 2 * size, args.proj_bias)
        self.conv1d = CausalConv1d(size, args.conv_kernel, args.conv_bias)
        self.x_proj = RowParallelLinear(size, args.time_step_rank + 2 * state_size)
        self.dt_layernorm = RMSNorm(args.time_step_rank, args.norm_eps)
        self.b_layernorm = RMSNorm(state_size, args.norm_eps)
        self.c_layernorm = RMSNorm(state_size, args.norm_eps)
        self.dt_proj = RowParallelLinear(args.time_step_rank, size, bias=True)
        self.a_log = parameter(size, state_size, dtype=torch.float32)
        self.d = parameter(size, dtype=torch.float32)
        self.out_proj = RowParallelLinear(size, args.hidden_size, args.proj_bias)
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        args = self.args
        slots = self.step_slots(x.shape[0])
        x, gate = self.in_proj(x).chunk(2, dim=1)
        x = self.conv1d(x, self.states["conv"], slots)
        dt, b, c = self.x_proj(x).split(
            (args.time_step_rank, args.state_size, args.state_size), dim=1
        )
        y = self.kernels.selective_scan(
            x,
            F.softplus(self.dt_proj(self.dt_layernorm(dt)).float()),
            -self.a_log.exp(),
            self.b_layernorm(b),
            self.c_layernorm(c),
            self.d,
            self.states["ssm"],
            slots,
        )
        return self.out_proj(y.mul_(F.silu(gate)))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        args = self.args
        size, rank, states = args.intermediate_size, args.time_step_rank, args.state_size
        projected = self.in_proj.record(program, x, "projected")
        mixed = self.conv1d.record(program, projected.columns(0, size), self.state_name("conv"))
        rounded = program.pointwise(mixed, "identity", "rounded", dtype=program.dtype)
        parts = self.x_proj.record(program, rounded, "parts")
        b, c = parts.columns(rank, states), parts.columns(rank + states, states)
        norms = (self.dt_layernorm, self.b_layernorm, self.c_layernorm)
        for start, norm in zip((0, rank, rank + states), norms, strict=True):
            program.normalise(parts, start, norm.weights)
        lengths = program.pointwise(
            parts.columns(0, rank), "identity", "lengths", dtype=program.dtype
        )
        dt = self.dt_proj.record(program, lengths, "dt")
        program.pointwise(dt, "softplus", None)
        y = program.selective_scan(
            mixed, dt, -self.a_log.exp(), b, c, self.d, self.state_name("ssm")
        )
        gated = program.gate(y, projected.columns(size, size), "silu", "gated")
        return self.out_proj.record(program, gated, "mixed", to_stream=to_stream)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`A_log` and `D`."""
        yield f"{name}.A_log", whole_parameter(self.a_log)
        yield f"{name}.D", whole_parameter(self.d)
