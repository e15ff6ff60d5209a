"""Tiny models of Arcee."""

from __future__ import annotations

from typing import Any

from transformers import ArceeConfig, ArceeForCausalLM

from tests.models.sizes import SIZES, YARN, rope

CONFIGS: dict[str, tuple[type, Any]] = {
    "arcee": (ArceeForCausalLM, lambda: ArceeConfig(**SIZES)),
    "arcee biased, tied, yarn rope": (
        ArceeForCausalLM,
        lambda: ArceeConfig(
            **{**SIZES, "num_key_value_heads": None},
            head_dim=24,
            hidden_act="gelu",
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
            rope_parameters=rope(1e5, **YARN),
        ),
    ),
}
