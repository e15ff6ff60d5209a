"""Llama 4, text."""

from __future__ import annotations

import transformers

from tests.exactness.sizes import SMALL

CONFIGS = {
    "llama4": lambda: transformers.Llama4TextConfig(
        **SMALL,
        num_hidden_layers=4,
        head_dim=16,
        intermediate_size_mlp=80,
        num_local_experts=4,
        interleave_moe_layer_step=2,
        attention_chunk_size=96,
        floor_scale=100,
        attn_scale=0.3,
    )
}
