"""What is the recurrent half of a decoder block whose state is corrected, not only added to?

Gated delta net (Yang, Kautz and Hatamizadeh 2024, arXiv 2412.06464).
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
from jubako.layers.gated_norm import GatedRMSNorm
from jubako.layers.grouped_linear import GroupedLinear, Mixed
from jubako.layers.linear import RowParallelLinear
from jubako.layers.recurrent import RecurrentLayer, state_dtype
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


@dataclass(frozen=True)
class GatedDeltaNetArgs:
    """Sizes of one layer. Each key head serves the same number of value heads."""

    hidden_size: int
    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int
    norm_eps: float

    @property
    def key_size(self) -> int:
        """Elements of all keys of a token."""
        return self.num_key_heads * self.key_head_dim

    @property
    def value_size(self) -> int:
        """Elements of all values of a token."""
        return self.num_value_heads * self.value_head_dim


class GatedDeltaNet(RecurrentLayer):
    """Projections, convolution, recurrence, gated norm, and the projection back."""

    mamba_type = "gdn_attention"
    writes_borders = True

    def __init__(self, args: GatedDeltaNetArgs, *, config: JubakoConfig, prefix: str) -> None:
        channels = 2 * args.key_size + args.value_size
        state_shape = (args.num_value_heads, args.value_head_dim, args.key_head_dim)
        super().__init__(
            config=config,
            layer_name=prefix,
            states={
                "conv": ((args.conv_kernel - 1, channels), state_dtype(config, "conv")),
                "ssm": (state_shape, state_dtype(config, "ssm")),
            },
        )
        self.args = args
        key, shared = args.key_head_dim, args.num_value_heads // args.num_key_heads
        value = shared * args.value_head_dim
        self.in_proj = GroupedLinear(
            args.hidden_size,
            {
                "in_proj_qkvz": Mixed(
                    args.num_key_heads, {"q": key, "k": key, "v": value, "gate": value}
                ),
                "in_proj_ba": Mixed(args.num_key_heads, {"beta": shared, "decay": shared}),
            },
            ("q", "k", "v", "gate", "beta", "decay"),
        )
        heads = args.num_value_heads
        self.sizes = (channels, args.value_size, heads, heads)
        self.conv1d = CausalConv1d(channels, args.conv_kernel, bias=False)
        self.a_log = parameter(args.num_value_heads, dtype=torch.float32)
        self.dt_bias = parameter(args.num_value_heads, dtype=torch.float32)
        self.norm = GatedRMSNorm(args.value_head_dim, args.norm_eps, norm_before_gate=True)
        self.out_proj = RowParallelLinear(args.value_size, args.hidden_size)
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        args = self.args
        slots = self.step_slots(x.shape[0])
        mixed, gate, beta, decay = self.in_proj(x).split(self.sizes, dim=1)
        mixed = self.conv1d(mixed, self.states["conv"], slots)
        q, k, v = mixed.split((args.key_size, args.key_size, args.value_size), dim=1)
        y = self.kernels.gated_delta_rule(
            q.unflatten(1, (args.num_key_heads, args.key_head_dim)),
            k.unflatten(1, (args.num_key_heads, args.key_head_dim)),
            v.unflatten(1, (args.num_value_heads, args.value_head_dim)),
            F.softplus(decay.float() + self.dt_bias) * -self.a_log.exp(),
            beta.float().sigmoid(),
            self.states["ssm"],
            slots,
        )
        return self.out_proj(self.norm(y, gate.unflatten(1, y.shape[1:])).flatten(1))

    def record(self, program: Program, x: Rows, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        args = self.args
        channels, size, heads, _ = self.sizes
        projected = self.in_proj.record(program, x, "projected")
        mixed = self.conv1d.record(program, projected.columns(0, channels), self.state_name("conv"))
        beta = program.pointwise(projected.columns(channels + size, heads), "sigmoid", "beta")
        decay = program.pointwise(
            projected.columns(channels + size + heads, heads),
            "softplus",
            "decay",
            bias=self.dt_bias,
            factor=-self.a_log.exp(),
        )
        y = program.gated_delta(
            mixed.columns(0, args.key_size),
            mixed.columns(args.key_size, args.key_size),
            mixed.columns(2 * args.key_size, size),
            decay,
            beta,
            self.state_name("ssm"),
            args.num_key_heads,
        )
        y = self.norm.record(program, y, projected.columns(channels, size), "gated")
        return self.out_proj.record(program, y, "mixed", to_stream=to_stream)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`A_log` and `dt_bias`."""
        yield f"{name}.A_log", whole_parameter(self.a_log)
        yield f"{name}.dt_bias", whole_parameter(self.dt_bias)
