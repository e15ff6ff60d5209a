"""How does a decoder that writes text become a model that embeds, classifies or rewards?

It loses the head over the vocabulary, and where the checkpoint has one gets a head over labels.
"""

from __future__ import annotations

import torch
from torch import nn

from jubako.checkpoint.architecture import Role, take_apart
from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.layers.linear import RowParallelLinear


class NoHead(nn.Module):
    """Stands where the head over the vocabulary was; its weights are not wanted."""

    tied = True


class ScoreHead(nn.Module):
    """One matrix, or two with a ReLU between them, as `score` in the checkpoint."""

    def __init__(self, size: int, labels: int, two: bool, bias: bool) -> None:
        super().__init__()
        self.first = RowParallelLinear(size, size, bias=True) if two else None
        self.last = RowParallelLinear(size, labels, bias=two or bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [r, hidden] → [r, labels]."""
        if self.first is not None:
            x = self.first(x).relu_()
        return self.last(x)


def pooling_class(architecture: str, causal_class: type[nn.Module]) -> type[nn.Module]:
    """The class of `architecture` that runs the layers of `causal_class`.

    Its `compute_scores` is for models with labels. UnsupportedModelError where the class has no
    head to take away.
    """
    parts = take_apart(architecture)

    class PoolingDecoder(causal_class):  # type: ignore[misc,valid-type]
        def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
            # A family's file knows its variants by their names as writers.
            own = config.replace(model_config={"architecture": parts.causal})
            super().__init__(own, prefix=prefix)
            if not isinstance(getattr(self, "lm_head", None), nn.Module):
                raise UnsupportedModelError(f"{architecture} cannot be used for pooling.")
            self.lm_head = NoHead()
            pooler = config.pooler_config
            self.score = None
            if pooler.num_labels:
                self.score = _score_head(parts.role, pooler.embedding_size, pooler.num_labels)

        def compute_scores(self, pooled: torch.Tensor) -> torch.Tensor:
            """Hidden states [r, hidden] → logits of the labels [r, labels]."""
            assert self.score is not None, "a model that embeds has no labels"
            scores: torch.Tensor = self.score(pooled)
            return scores

        def sanitize(self, name: str) -> str | None:
            """As the decoder's, without the head and with the score."""
            if name.startswith("lm_head."):
                return None
            for theirs, own in _SCORE_NAMES.items():
                if name.startswith(theirs):
                    return own + name.removeprefix(theirs)
            own_name: str | None = super().sanitize(name)
            return own_name

    PoolingDecoder.__name__ = PoolingDecoder.__qualname__ = architecture
    return PoolingDecoder


_SCORE_NAMES = {
    "score.0.": "score.first.",
    "score.2.": "score.last.",
    "score.": "score.last.",
    "classifier.": "score.last.",
}


def _score_head(role: Role, size: int, labels: int) -> ScoreHead:
    two = role in ("reward", "process_reward")
    return ScoreHead(size, labels, two, bias=role == "token_classify")
