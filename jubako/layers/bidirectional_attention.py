"""How do the tokens of whole sequences attend to each other outside the engine's steps?"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.registry import get_kernels


def whole_sequences(lengths: Sequence[int], device: torch.device) -> AttentionMetadata:
    """Metadata of sequences of these lengths, one behind the other, none of which is kept."""
    starts: np.ndarray = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=starts[1:])
    return AttentionMetadata.both_ways(
        starts,
        torch.from_numpy(starts).to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
    )


class BidirectionalAttention(nn.Module):
    """Attention of every token to its whole sequence. `scale` multiplies q·k."""

    def __init__(self, num_heads: int, head_size: int, scale: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.kernels = get_kernels()

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sequences: AttentionMetadata
    ) -> torch.Tensor:
        """q, k and v [T, H, D] of `sequences`, see `whole_sequences` → [T, H · D]."""
        out = self.kernels.encoder_attention(q, k, v, sequences, scale=self.scale)
        return out.flatten(1)
