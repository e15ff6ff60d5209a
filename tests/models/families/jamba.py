"""Jamba."""

from __future__ import annotations

from typing import Any

from transformers import JambaConfig, JambaForCausalLM

from tests.models.sizes import SIZES as COMMON

# With more a rounding error of either side grows a hundredfold: norms enlarge what is near zero.
SIZES: dict[str, Any] = {**COMMON, "initializer_range": 0.1, "rms_norm_eps": 1e-4}

MAMBA: dict[str, Any] = {"mamba_d_state": 12, "mamba_dt_rank": 8}

CONFIGS = {
    "jamba": (
        JambaForCausalLM,
        lambda: JambaConfig(
            **SIZES,
            **MAMBA,
            attn_layer_period=3,
            attn_layer_offset=1,
            num_experts=6,
            num_experts_per_tok=3,
        ),
    ),
    "jamba tied, biased, dense": (
        JambaForCausalLM,
        lambda: JambaConfig(
            **SIZES,
            mamba_d_conv=3,
            mamba_expand=3,
            mamba_conv_bias=False,
            mamba_proj_bias=True,
            attn_layer_period=2,
            attn_layer_offset=0,
            num_experts=1,
            tie_word_embeddings=True,
        ),
    ),
}
