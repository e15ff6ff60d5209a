"""Qwen3-Next: gated delta nets, gated attention, experts."""

from __future__ import annotations

import transformers

from tests.exactness.sizes import SMALL

CONFIGS = {
    "qwen3-next": lambda: transformers.Qwen3NextConfig(
        **{**SMALL, "initializer_range": 0.1, "rms_norm_eps": 1e-4},
        num_hidden_layers=3,
        layer_types=["linear_attention", "full_attention", "linear_attention"],
        head_dim=32,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=12,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
    )
}
