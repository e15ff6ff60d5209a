"""Rows of Cohere 2."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "cohere2": lambda: transformers.Cohere2Config(
        **SMALL,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=64,
        tie_word_embeddings=False,
    ),
}
