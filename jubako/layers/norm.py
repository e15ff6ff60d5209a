"""How does a model normalise its activations?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from jubako.kernels.registry import get_kernels
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


class RMSNorm(nn.Module):
    """Root mean square norm (Zhang and Sennrich 2019) over the last dimension.

    The weight is kept in float32 and holds what the norm multiplies by: a checkpoint's tensor plus
    `weight_offset`, which is 1 for models that store the difference from 1 (Gemma).
    """

    def __init__(self, size: int, eps: float, weight_offset: float = 0.0) -> None:
        super().__init__()
        self.eps = eps
        self.weight_offset = weight_offset
        self.weight = parameter(size, dtype=torch.float32)
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] → the same shape and dtype."""
        return self.kernels.rms_norm(x, self.weight, self.eps)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`."""
        yield f"{name}.weight", whole_parameter(self.weight, self.weight_offset)
