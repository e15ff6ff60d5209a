"""Rows of Granite 3."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "granite": lambda: transformers.GraniteConfig(
        **SMALL,
        num_hidden_layers=3,
        embedding_multiplier=6.0,
        attention_multiplier=0.3,
        residual_multiplier=0.5,
        logits_scaling=4.0,
    ),
}
