"""Rows of Arcee."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "arcee": lambda: transformers.ArceeConfig(**SMALL, num_hidden_layers=3),
}
