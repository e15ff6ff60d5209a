"""What is the state-space half of a decoder block (Mamba 2: Dao and Gu 2024, arXiv 2405.21060)?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import Program, Rows, record
from jubako.kernels.registry import get_kernels
from jubako.layers.causal_conv import CausalConv1d
from jubako.layers.gated_norm import GatedRMSNorm
from jubako.layers.linear import RowParallelLinear
from jubako.layers.recurrent import RecurrentLayer, state_dtype
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


@dataclass(frozen=True)
class Mamba2Args:
    """Sizes and variants of one layer."""

    hidden_size: int
    num_heads: int
    head_dim: int
    num_groups: int
    """Heads of a group share what they write with and read with."""
    state_size: int
    conv_kernel: int
    conv_bias: bool
    in_bias: bool
    out_bias: bool
    norm_eps: float
    time_step_limit: tuple[float, float] = (0.0, float("inf"))
    norm: bool = True
    """Normalise what the gate lets through; otherwise it is only gated."""
    norm_groups: int = 1
    norm_before_gate: bool = False
    multipliers: tuple[float, ...] | None = None
    """Of the gate, the input, what is written with, what is read with, and the step's length."""

    @property
    def intermediate_size(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def conv_channels(self) -> int:
        """Inputs, and what they are written and read with."""
        return self.intermediate_size + 2 * self.num_groups * self.state_size


class Mamba2Mixer(RecurrentLayer):
    """Projection, convolution, recurrence, gated norm, and the projection back."""

    mamba_type = "mamba2"
    writes_borders = True

    def __init__(self, args: Mamba2Args, *, config: JubakoConfig, prefix: str) -> None:
        state_shape = (args.num_heads, args.head_dim, args.state_size)
        super().__init__(
            config=config,
            layer_name=prefix,
            states={
                "conv": (
                    (args.conv_kernel - 1, args.conv_channels),
                    state_dtype(config, "conv"),
                ),
                "ssm": (state_shape, state_dtype(config, "ssm")),
            },
        )
        self.args = args
        self.multipliers: torch.Tensor | None
        size, heads = args.intermediate_size, args.num_heads
        self.in_proj = RowParallelLinear(
            args.hidden_size, size + args.conv_channels + heads, args.in_bias
        )
        self.register_buffer("multipliers", _channel_multipliers(args), persistent=False)
        self.conv1d = CausalConv1d(args.conv_channels, args.conv_kernel, args.conv_bias)
        self.a_log = parameter(heads, dtype=torch.float32)
        self.d = parameter(heads, dtype=torch.float32)
        self.dt_bias = parameter(heads, dtype=torch.float32)
        self.norm: nn.Module | None = None
        if args.norm:
            self.norm = GatedRMSNorm(
                size,
                args.norm_eps,
                num_groups=args.norm_groups,
                norm_before_gate=args.norm_before_gate,
            )
        self.out_proj = RowParallelLinear(size, args.hidden_size, args.out_bias)
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        args = self.args
        slots = self.step_slots(x.shape[0])
        projected = self.in_proj(x)
        if self.multipliers is not None:
            projected *= self.multipliers
        gate, mixed, dt = projected.split(
            (args.intermediate_size, args.conv_channels, args.num_heads), dim=1
        )
        mixed = self.conv1d(mixed, self.states["conv"], slots)
        written = args.num_groups * args.state_size
        heads, b, c = mixed.split((args.intermediate_size, written, written), dim=1)
        y = self.kernels.ssd_scan(
            heads.unflatten(1, (args.num_heads, args.head_dim)),
            F.softplus(dt.float() + self.dt_bias).clamp_(*args.time_step_limit),
            -self.a_log.exp(),
            b.unflatten(1, (args.num_groups, args.state_size)),
            c.unflatten(1, (args.num_groups, args.state_size)),
            self.d,
            self.states["ssm"],
            slots,
        ).flatten(1)
        y = self.norm(y, gate) if self.norm is not None else y.mul_(F.silu(gate))
        return self.out_proj(y)

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        args = self.args
        projected = self.in_proj.record(program, x, "projected")
        if self.multipliers is not None:
            program.pointwise(projected, "identity", None, factor=self.multipliers)
        size, written = args.intermediate_size, args.num_groups * args.state_size
        gate = projected.columns(0, size)
        mixed = self.conv1d.record(
            program, projected.columns(size, args.conv_channels), self.state_name("conv")
        )
        dt = program.pointwise(
            projected.columns(size + args.conv_channels, args.num_heads),
            "softplus",
            "dt",
            bias=self.dt_bias,
            limits=args.time_step_limit,
        )
        y = program.ssd_scan(
            mixed.columns(0, size),
            dt,
            -self.a_log.exp(),
            mixed.columns(size, written),
            mixed.columns(size + written, written),
            self.d,
            self.state_name("ssm"),
            args.num_groups,
        )
        if self.norm is not None:
            y = record(self.norm, program, y, gate, "gated")
        else:
            y = program.gate(y, gate, "silu", "gated")
        return self.out_proj.record(program, y, "mixed", to_stream=to_stream)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`A_log`, `D` and `dt_bias`."""
        yield f"{name}.A_log", whole_parameter(self.a_log)
        yield f"{name}.D", whole_parameter(self.d)
        yield f"{name}.dt_bias", whole_parameter(self.dt_bias)


def _channel_multipliers(args: Mamba2Args) -> torch.Tensor | None:
    """One for each channel of the input projection."""
    if args.multipliers is None:
        return None
    written = args.num_groups * args.state_size
    sizes = (args.intermediate_size, args.intermediate_size, written, written, args.num_heads)
    parts = zip(sizes, args.multipliers, strict=True)
    return torch.cat([torch.full((size,), multiplier) for size, multiplier in parts])
