"""Rows of StableLM."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "stablelm": lambda: transformers.StableLmConfig(
        **SMALL, num_hidden_layers=3, use_qkv_bias=True
    ),
    "stablelm-parallel": lambda: transformers.StableLmConfig(
        **SMALL, num_hidden_layers=3, use_parallel_residual=True
    ),
}
