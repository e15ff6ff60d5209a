"""How well do two texts fit each other: which pairs are meant, and how is a pair scored?

A cross encoder reads both texts as one prompt. A model that only embeds reads each by itself, and
the cosine of the angle between the vectors is the score.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import msgspec
import numpy as np

from jubako.errors import ValidationError
from jubako.sampling_params import PoolingParams

Kind = Literal["cross encoder", "embeddings"]


def scoring_kind(supported_tasks: Sequence[str]) -> Kind:
    """How a model scores; `ValidationError` if it cannot."""
    if "score" in supported_tasks:
        return "cross encoder"
    if "embed" in supported_tasks:
        return "embeddings"
    raise ValidationError(
        "This model cannot score texts; that takes one that embeds, or a classifier with one "
        f"label. It supports {', '.join(supported_tasks)}.",
        code="unsupported_task",
    )


def make_pairs(
    first: str | Sequence[str], second: str | Sequence[str], names: tuple[str, str]
) -> list[tuple[str, str]]:
    """One text with each of many, or each with its own; `names` are those of the arguments."""
    texts = [_texts(given, name) for given, name in zip((first, second), names)]
    left, right = texts
    if len(left) == 1:
        left = left * len(right)
    if len(left) != len(right):
        raise ValidationError(
            f"{names[0]} has {len(left)} texts and {names[1]} {len(right)}; give one, or one for "
            "each.",
            names[0],
        )
    return list(zip(left, right, strict=True))


def _texts(given: Any, name: str) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, Sequence) or not texts:
        raise ValidationError(f"{name} must be a text or a list of at least one.", name)
    for i, text in enumerate(texts):
        if not isinstance(text, str) or not text:
            raise ValidationError(f"{name}[{i}] must be a text that is not empty.", name)
    return list(texts)


def pair_params(params: PoolingParams, second_segment: int | None) -> PoolingParams:
    """Parameters of a cross encoder's request whose second segment begins at that token."""
    extra = dict(params.extra_kwargs or {})
    if second_segment is not None:
        extra["compressed_token_type_ids"] = second_segment
    return msgspec.structs.replace(
        params, task="score", truncate_prompt_tokens=None, extra_kwargs=extra or None
    )


def cosine(first: np.ndarray[Any, Any], second: np.ndarray[Any, Any]) -> float:
    """The cosine of the angle between two vectors; 0 if one of them is 0."""
    a, b = first.astype(np.float64), second.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    # Rounding must not lead out of the range of a cosine.
    return min(1.0, max(-1.0, float(a @ b) / lengths)) if lengths else 0.0
