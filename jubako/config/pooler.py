"""How does a model that pools turn hidden states into vectors and scores?"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jubako.config.options import check_types, option

WHOLE_PROMPT_TYPES = ("CLS", "MEAN")
"""Pooling that needs all of a prompt in one step."""


@dataclass(frozen=True)
class PoolerConfig:
    """Pooling. Where nothing is asked for, the checkpoint decides (`engine.pooling_setup`).

    The fields after `is_matryoshka` are filled when the checkpoint has been read.
    """

    pooling_type: Literal["LAST", "CLS", "MEAN", "ALL", "STEP"] | None = option(
        None,
        "Which hidden states of a pooling model make the vector: the last or first token's, the "
        "mean, all by themselves, or those at the end of a step (default: the checkpoint's choice, "
        "else CLS for an encoder and LAST for a decoder).",
    )
    normalize_embeddings: bool | None = option(
        None,
        "Scale embeddings to length 1 (default: as the checkpoint's modules.json says, else yes).",
    )
    is_matryoshka: bool | None = option(
        None,
        "Embeddings may be cut to fewer dimensions (default: whether the checkpoint says so).",
    )

    matryoshka_dimensions: tuple[int, ...] = ()
    """The dimensions that may be asked for; empty: all up to the embedding's own."""
    embedding_size: int = 0
    num_labels: int = 0
    """Scores of a classifier or reward model; 0 for one that embeds."""
    labels: tuple[str, ...] = ()
    """Their names, where the checkpoint gives any."""
    activation: Literal["identity", "sigmoid", "softmax", "tanh"] = "identity"
    """What makes scores of a classifier's logits."""
    step_tag_id: int | None = None
    """The token that ends a step of reasoning."""
    returned_token_ids: tuple[int, ...] = ()
    """The scores that a STEP model answers with; empty: all."""
    is_encoder: bool = False
    """Every token sees the whole prompt, and no KV is kept."""
    lower_case: bool = False
    """The text is written in lower case before it is tokenised."""

    def __post_init__(self) -> None:
        check_types(self)
