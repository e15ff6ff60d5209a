"""How does a model normalise its activations?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from jubako.kernels.cpu.recording import LAYER_NORM, RMS_NORM, NormWeights
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

    @property
    def weights(self) -> NormWeights:
        """What a program needs to normalise."""
        return NormWeights(self.weight, None, self.eps, RMS_NORM)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`."""
        yield f"{name}.weight", whole_parameter(self.weight, self.weight_offset)


class LayerNorm(nn.Module):
    """Layer norm (Ba, Kiros and Hinton 2016) over the last dimension.

    Weight and bias, if it has one, are kept in float32.
    """

    def __init__(self, size: int, eps: float, bias: bool = True) -> None:
        super().__init__()
        self.eps = eps
        self.weight = parameter(size, dtype=torch.float32)
        self.bias = parameter(size, dtype=torch.float32) if bias else None
        self.kernels = get_kernels()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, size] → the same shape and dtype."""
        return self.kernels.layer_norm(x, self.weight, self.bias, self.eps)

    @property
    def weights(self) -> NormWeights:
        """What a program needs to normalise."""
        return NormWeights(self.weight, self.bias, self.eps, LAYER_NORM)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`, and `bias` if there is one."""
        yield f"{name}.weight", whole_parameter(self.weight)
        if self.bias is not None:
            yield f"{name}.bias", whole_parameter(self.bias)
