"""Tiny models of Cohere 2."""

from __future__ import annotations

from typing import Any

from transformers import Cohere2Config, Cohere2ForCausalLM

from tests.models.sizes import MIXED, SIZES, WINDOW

CONFIGS: dict[str, tuple[type, Any]] = {
    "cohere2": (
        Cohere2ForCausalLM,
        lambda: Cohere2Config(
            **SIZES,
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=MIXED,
            logit_scale=0.3,
            tie_word_embeddings=False,
        ),
    ),
    "cohere2 tied, biased": (
        Cohere2ForCausalLM,
        lambda: Cohere2Config(
            **{**SIZES, "num_key_value_heads": 4, "initializer_range": 0.1},
            head_dim=24,
            sliding_window=WINDOW,
            attention_bias=True,
            logit_scale=4.0,
        ),
    ),
}
