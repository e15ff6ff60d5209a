"""Bamba."""

from __future__ import annotations

from typing import Any

from transformers import BambaConfig, BambaForCausalLM

from tests.models.sizes import SIZES

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 16,
}

CONFIGS = {
    "bamba": (BambaForCausalLM, lambda: BambaConfig(**SIZES, **MAMBA, attn_layer_indices=[1, 3])),
    "bamba tied, biased": (
        BambaForCausalLM,
        lambda: BambaConfig(
            **{**SIZES, "initializer_range": 0.15},
            **{**MAMBA, "mamba_n_groups": 1, "mamba_d_conv": 3},
            attn_layer_indices=[0],
            mamba_proj_bias=True,
            mamba_conv_bias=False,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
}
