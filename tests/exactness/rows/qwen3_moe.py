"""Qwen3 with a mixture of experts."""

from __future__ import annotations

import transformers

from tests.exactness.sizes import SMALL

CONFIGS = {
    "qwen3-moe": lambda: transformers.Qwen3MoeConfig(
        **SMALL,
        num_hidden_layers=3,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        norm_topk_prob=True,
        mlp_only_layers=[1],
    )
}
