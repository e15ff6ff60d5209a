"""Mixtral."""

from __future__ import annotations

from transformers import MixtralConfig, MixtralForCausalLM

from tests.models.sizes import SIZES, WINDOW

# Routing is sharp: rounding errors grow from layer to layer.
QUIETER = {**SIZES, "initializer_range": 0.2}

CONFIGS = {
    "mixtral": (
        MixtralForCausalLM,
        lambda: MixtralConfig(**QUIETER, num_local_experts=5, num_experts_per_tok=2),
    ),
    "mixtral, window, three of four": (
        MixtralForCausalLM,
        lambda: MixtralConfig(
            **SIZES,
            num_local_experts=4,
            num_experts_per_tok=3,
            sliding_window=WINDOW,
            head_dim=24,
            tie_word_embeddings=True,
        ),
    ),
}
