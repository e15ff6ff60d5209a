"""Qwen3 with a mixture of experts."""

from __future__ import annotations

from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.models.sizes import SIZES

MOE = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "head_dim": 32}

CONFIGS = {
    "qwen3 moe": (
        Qwen3MoeForCausalLM,
        lambda: Qwen3MoeConfig(**SIZES, **MOE, norm_topk_prob=True),
    ),
    "qwen3 moe, dense layers, plain weights": (
        Qwen3MoeForCausalLM,
        lambda: Qwen3MoeConfig(
            **SIZES,
            **MOE,
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
}
