"""What does a model add to a token's vector that learned a vector for each position?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from jubako.layers.weights import WeightTarget, parameter, whole_parameter


class LearnedPositions(nn.Module):
    """A vector for each position, the first of which is entry `first` of the table."""

    def __init__(self, num_positions: int, hidden_size: int, first: int = 0) -> None:
        super().__init__()
        self.weight = parameter(num_positions + first, hidden_size)
        self.first = first

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        """Positions [T] → [T, hidden], a new tensor."""
        return F.embedding(positions + self.first if self.first else positions, self.weight)

    def all(self) -> torch.Tensor:
        """Of all positions, [positions, hidden]; a view."""
        return self.weight[self.first :]

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`."""
        yield f"{name}.weight", whole_parameter(self.weight)
