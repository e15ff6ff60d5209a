"""Tiny models of SmolLM3."""

from __future__ import annotations

from typing import Any

from transformers import SmolLM3Config, SmolLM3ForCausalLM

from tests.models.sizes import SIZES, WINDOW, YARN, rope

CONFIGS: dict[str, tuple[type, Any]] = {
    "smollm3": (
        SmolLM3ForCausalLM,
        lambda: SmolLM3Config(**SIZES, no_rope_layers=[1, 0, 1, 1], tie_word_embeddings=False),
    ),
    "smollm3 windows, yarn rope": (
        SmolLM3ForCausalLM,
        lambda: SmolLM3Config(
            **SIZES,
            no_rope_layer_interval=2,
            use_sliding_window=True,
            sliding_window=WINDOW,
            rope_parameters=rope(1e5, **YARN),
        ),
    ),
}
