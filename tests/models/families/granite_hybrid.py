"""Granite 4."""

from __future__ import annotations

from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from tests.models.families.bamba import MAMBA
from tests.models.sizes import SIZES

KINDS = ["mamba", "attention", "mamba", "mamba"]

CONFIGS = {
    "granite 4": (
        GraniteMoeHybridForCausalLM,
        lambda: GraniteMoeHybridConfig(
            **SIZES,
            **MAMBA,
            layer_types=KINDS,
            num_local_experts=4,
            num_experts_per_tok=2,
            shared_intermediate_size=80,
            embedding_multiplier=3.0,
            attention_multiplier=0.3,
            residual_multiplier=0.5,
            logits_scaling=2.0,
        ),
    ),
    "granite 4, no experts, positions, tied": (
        GraniteMoeHybridForCausalLM,
        lambda: GraniteMoeHybridConfig(
            **SIZES,
            **MAMBA,
            layer_types=KINDS,
            num_local_experts=0,
            shared_intermediate_size=80,
            attention_multiplier=0.25,
            position_embedding_type="rope",
            tie_word_embeddings=True,
        ),
    ),
}
