"""Rows of SmolLM3."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "smollm3": lambda: transformers.SmolLM3Config(
        **SMALL, num_hidden_layers=4, tie_word_embeddings=False
    ),
}
