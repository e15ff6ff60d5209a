"""What does the runner need from a model?"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch


class CausalLM(Protocol):
    """An `nn.Module` that predicts the next token. T: tokens of a step, of all requests.

    It is built as `Model(config, prefix="")` within the default dtype and device that its
    parameters shall have, and runs within `set_forward_context`. Rows of padding are garbage in and
    garbage out. Attention layers carry unique names, which start with the prefix.
    """

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Ids [T] → what `forward` takes as `inputs_embeds`, [T, hidden]."""
        ...

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Ids or embeddings of T tokens at `positions` [T] → final hidden states [T, hidden]."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Final hidden states [r, hidden] → logits [r, V]."""
        ...

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill the model from (Hugging Face name, tensor) pairs; returns the names used."""
        ...
