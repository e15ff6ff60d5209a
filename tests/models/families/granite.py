"""Tiny models of Granite 3."""

from __future__ import annotations

from typing import Any

from transformers import GraniteConfig, GraniteForCausalLM

from tests.models.sizes import SIZES, rope

CONFIGS: dict[str, tuple[type, Any]] = {
    "granite": (
        GraniteForCausalLM,
        lambda: GraniteConfig(
            **SIZES,
            embedding_multiplier=3.0,
            attention_multiplier=0.4,
            residual_multiplier=0.6,
            logits_scaling=1.7,
        ),
    ),
    "granite tied, biased": (
        GraniteForCausalLM,
        lambda: GraniteConfig(
            **{**SIZES, "num_key_value_heads": 4, "initializer_range": 0.1},
            embedding_multiplier=2.0,
            attention_multiplier=0.3,
            residual_multiplier=0.22,
            logits_scaling=0.5,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=rope(1e6),
        ),
    ),
}
