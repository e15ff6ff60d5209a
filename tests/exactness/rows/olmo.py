"""Rows of OLMo 2 and 3."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "olmo2": lambda: transformers.Olmo2Config(**SMALL, num_hidden_layers=3),
    "olmo3": lambda: transformers.Olmo3Config(
        **SMALL,
        num_hidden_layers=4,
        sliding_window=88,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 500000.0},
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 500000.0,
                "factor": 8.0,
                "original_max_position_embeddings": 512,
            },
        },
    ),
}
