"""Rows of Ministral."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "ministral": lambda: transformers.MinistralConfig(
        **SMALL,
        num_hidden_layers=4,
        head_dim=16,
        sliding_window=72,
        layer_types=["full_attention"] + ["sliding_attention"] * 3,
    ),
    "ministral3": lambda: transformers.Ministral3Config(
        **SMALL,
        num_hidden_layers=3,
        head_dim=16,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 32,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.2,
        },
    ),
}
