"""Tiny models of Ministral: Mistral with a window in some layers, or with growing queries."""

from __future__ import annotations

from typing import Any

from transformers import (
    Ministral3Config,
    Ministral3ForCausalLM,
    MinistralConfig,
    MinistralForCausalLM,
)

from tests.models.sizes import MIXED, SIZES, WINDOW, YARN, rope

CONFIGS: dict[str, tuple[type, Any]] = {
    "ministral": (
        MinistralForCausalLM,
        lambda: MinistralConfig(**SIZES, head_dim=16, sliding_window=WINDOW, layer_types=MIXED),
    ),
    "ministral3": (
        Ministral3ForCausalLM,
        lambda: Ministral3Config(
            **SIZES,
            head_dim=16,
            rope_parameters=rope(
                1e6, **{**YARN, "original_max_position_embeddings": 8}, llama_4_scaling_beta=0.3
            ),
        ),
    ),
}
