"""Jamba: Mamba, attention without positions, experts."""

from __future__ import annotations

import transformers

from tests.exactness.sizes import SMALL

CONFIGS = {
    "jamba": lambda: transformers.JambaConfig(
        **SMALL,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=12,
        mamba_dt_rank=8,
    )
}
