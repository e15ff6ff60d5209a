"""How do token ids become vectors, and vectors logits?"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from jubako.kernels.cpu.recording import Program, RecordingError, Rows
from jubako.kernels.registry import get_kernels
from jubako.layers.linear import pack_parameter
from jubako.layers.weights import StoredBlocks, WeightTarget, parameter, whole_parameter


class VocabEmbedding(nn.Module):
    """A vector for each token of the vocabulary."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.weight = parameter(vocab_size, hidden_size)
        self.kernels = get_kernels()
        self.packed: Any = None
        """The weight in the form that the kernels like best, instead of `weight`."""
        self._blocks: dict[int, StoredBlocks] = {}

    @property
    def root_of_size(self) -> float:
        """sqrt(hidden_size), rounded to the weights' dtype as it is in training."""
        size: int = self.weight.shape[1]
        return torch.tensor(size**0.5, dtype=self.weight.dtype, device="cpu").item()

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → [T, hidden], a new tensor."""
        if self.packed is not None:
            return self.kernels.packed_embedding(input_ids, self.packed, self.weight.dtype)
        return F.embedding(input_ids, self.weight)

    def pack(self, quantization: str = "none") -> None:
        """Let the kernels take over the weight, once it is loaded."""
        if self.packed is None:
            self.packed = pack_parameter(self.kernels, self.weight, self._blocks, quantization)

    def record(self, program: Program, scale: float) -> None:
        """Begin a program's stream with `scale` times the vectors of the step's ids."""
        if self.packed is None:
            raise RecordingError("a weight that is not packed")
        program.embed(self.packed, scale)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`."""
        keep = partial(self._blocks.__setitem__, 0)
        yield f"{name}.weight", whole_parameter(self.weight, keep=keep)


class LMHead(nn.Module):
    """Logits of every token, from its own matrix or the embedding's.

    They are soft-capped if there is a `soft_cap`, then multiplied by `scale`.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabEmbedding | None = None,
        soft_cap: float | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        self.tied = tied_to is not None
        self.weight = tied_to.weight if tied_to is not None else parameter(vocab_size, hidden_size)
        # In a list, so that the embedding is not a part of this module too.
        self._tied_to = [] if tied_to is None else [tied_to]
        self.packed: Any = None
        self._blocks: dict[int, StoredBlocks] = {}
        self.soft_cap = soft_cap
        self.scale = scale
        self.kernels = get_kernels()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [r, hidden] → [r, V]; soft-capped ones are float32."""
        if self.packed is not None:
            logits = self.kernels.packed_linear(hidden, self.packed, None)
        else:
            logits = self.kernels.linear(hidden, self.weight)
        if self.soft_cap is not None:
            logits = logits.float().div_(self.soft_cap).tanh_().mul_(self.soft_cap)
        return logits if self.scale == 1.0 else logits.mul_(self.scale)

    def pack(self, quantization: str = "none") -> None:
        """Let the kernels take over the weight, once it is loaded."""
        for embedding in self._tied_to:
            embedding.pack(quantization)
            self.packed = embedding.packed
        if self.packed is None and not self.tied:
            self.packed = pack_parameter(self.kernels, self.weight, self._blocks, quantization)

    def record(self, program: Program, hidden: Rows) -> None:
        """Let a program choose the best tokens, if a scale does not make new equals of logits."""
        if self.packed is not None and math.frexp(self.scale)[0] == 0.5:
            plain = self.soft_cap is None and self.scale == 1.0
            program.greedy_head(hidden, self.packed, plain)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`weight`, unless it is the embedding's."""
        if not self.tied:
            keep = partial(self._blocks.__setitem__, 0)
            yield f"{name}.weight", whole_parameter(self.weight, keep=keep)
