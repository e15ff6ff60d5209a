"""Tiny models of StableLM."""

from __future__ import annotations

from typing import Any

from transformers import StableLmConfig, StableLmForCausalLM

from tests.models.sizes import SIZES, rope

CONFIGS: dict[str, tuple[type, Any]] = {
    "stablelm": (StableLmForCausalLM, lambda: StableLmConfig(**SIZES)),
    "stablelm parallel, biased, tied": (
        StableLmForCausalLM,
        lambda: StableLmConfig(
            **{**SIZES, "num_key_value_heads": 4, "initializer_range": 0.1},
            use_parallel_residual=True,
            use_qkv_bias=True,
            hidden_act="gelu",
            tie_word_embeddings=True,
            rope_parameters=rope(500_000.0, partial_rotary_factor=0.5),
        ),
    ),
}
