"""Which tensor of a checkpoint goes where?

A layer names the tensors it takes, relative to its parent, and for each a view of its parameter.
A fused layer takes several, so that no fused copy is ever made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import nn


@dataclass(frozen=True)
class StoredBlocks:
    """A matrix as a GGUF file holds it, for a layer that keeps the blocks."""

    data: torch.Tensor
    """[rows, bytes a row] uint8."""
    type: str
    """GGUF's name of the block's type."""
    shape: tuple[int, ...]
    """Of the matrix that the blocks stand for."""
    expand: Callable[[torch.Tensor], torch.Tensor]
    """`data` → the matrix, in the model's dtype."""


@dataclass(frozen=True)
class WeightTarget:
    """Where one tensor goes."""

    view: torch.Tensor
    """The parameter, or the part of it, that the tensor is broadcast into."""
    shape: tuple[int, ...]
    """The shape that the tensor must have."""
    offset: float = 0.0
    """Added to the tensor, in the dtype of the view."""
    whole: nn.Parameter | None = None
    """The parameter, if the view is all of it."""
    parts: tuple[str, ...] = ()
    """Names, beside this one, of the tensors that a checkpoint may have in place of this one."""
    keep: Callable[[StoredBlocks], None] | None = None
    """Takes blocks as they are stored, in place of `load`, for a layer that can."""

    def load(self, tensor: torch.Tensor) -> None:
        """Take `tensor`, whose shape has been checked.

        Where it can simply become the parameter it does, so that not even one large tensor, such
        as an embedding, is ever held twice; the caller must not use it any more: kernels that pack
        the parameter give its memory back.
        """
        if self.whole is not None and not self.offset and _may_become(tensor, self.whole):
            self.whole.data = tensor
            return
        self.view.copy_(tensor)
        if self.offset:
            self.view.add_(self.offset)


def whole_parameter(
    parameter: nn.Parameter,
    offset: float = 0.0,
    parts: tuple[str, ...] = (),
    keep: Callable[[StoredBlocks], None] | None = None,
) -> WeightTarget:
    """The target of a tensor that fills `parameter`."""
    return WeightTarget(parameter.data, tuple(parameter.shape), offset, parameter, parts, keep)


def _may_become(tensor: torch.Tensor, parameter: nn.Parameter) -> bool:
    return (
        tensor.dtype == parameter.dtype
        and tensor.device == parameter.device
        and tensor.is_contiguous()
        and tensor.untyped_storage().nbytes() == tensor.nbytes
    )


@runtime_checkable
class TakesWeights(Protocol):
    """A layer with parameters."""

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """The tensors it takes, by name beside it; `name` is the layer's own name there."""
        ...


def parameter(*shape: int, dtype: torch.dtype | None = None) -> nn.Parameter:
    """An uninitialised parameter without gradient, by default of the default dtype."""
    return nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
