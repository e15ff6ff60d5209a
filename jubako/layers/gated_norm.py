"""How does a layer normalise what a gate lets through?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from jubako.kernels.cpu.recording import GatedNormWeights, Program, Rows
from jubako.kernels.registry import get_kernels
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


class GatedRMSNorm(nn.Module):
    """RMS norm of `x · silu(gate)`, or with `norm_before_gate` of x alone, gated afterwards.

    Each of `num_groups` equal parts of the last dimension is normalised by itself.
    """

    def __init__(
        self, size: int, eps: float, *, num_groups: int = 1, norm_before_gate: bool = False
    ) -> None:
        super().__init__()
        self.eps = eps
        self.group_size = size // num_groups
        self.norm_before_gate = norm_before_gate
        self.weight = parameter(size, dtype=torch.float32)
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """x and gate [..., size] → the shape and dtype of x."""
        return self.kernels.gated_rms_norm(
            x,
            gate,
            self.weight,
            self.eps,
            group_size=self.group_size,
            norm_before_gate=self.norm_before_gate,
        )

    def record(self, program: Program, x: Rows, gate: Rows, role: str) -> Rows:
        """As `forward`, in a program; x may be several of what the norm is made for."""
        norm = GatedNormWeights(self.weight, self.group_size, self.eps, self.norm_before_gate)
        return program.gated_norm(x, gate, norm, role)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`."""
        yield f"{name}.weight", whole_parameter(self.weight)
