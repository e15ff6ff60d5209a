"""Llama 4, text."""

from __future__ import annotations

from transformers import Llama4ForCausalLM, Llama4TextConfig

from tests.models.sizes import LLAMA3, SIZES, rope

CHUNK = 16

CONFIGS = {
    "llama4": (
        Llama4ForCausalLM,
        lambda: Llama4TextConfig(
            **{**SIZES, "initializer_range": 0.2},
            intermediate_size_mlp=80,
            head_dim=16,
            num_local_experts=4,
            interleave_moe_layer_step=2,
            attention_chunk_size=CHUNK,
            no_rope_layer_interval=4,
            floor_scale=5,
            attn_scale=0.3,
        ),
    ),
    "llama4, two experts, no norm": (
        Llama4ForCausalLM,
        lambda: Llama4TextConfig(
            **{**SIZES, "initializer_range": 0.15},
            head_dim=24,
            num_local_experts=4,
            num_experts_per_tok=2,
            attention_chunk_size=CHUNK,
            no_rope_layer_interval=2,
            use_qk_norm=False,
            attn_temperature_tuning=False,
            attention_bias=True,
            rope_parameters=rope(500_000.0, **LLAMA3),
        ),
    ),
}
