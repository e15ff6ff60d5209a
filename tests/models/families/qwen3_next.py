"""Qwen3-Next."""

from __future__ import annotations

from typing import Any

from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from tests.models.sizes import SIZES as COMMON
from tests.models.sizes import rope

# With more a rounding error of either side grows a hundredfold: norms enlarge what is near zero.
SIZES: dict[str, Any] = {**COMMON, "initializer_range": 0.1, "rms_norm_eps": 1e-4}

MIXER: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 16,
}
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 48,
}

CONFIGS = {
    "qwen3 next": (
        Qwen3NextForCausalLM,
        lambda: Qwen3NextConfig(**SIZES, **MIXER, **MOE, head_dim=32),
    ),
    "qwen3 next tied, biased, dense layers": (
        Qwen3NextForCausalLM,
        lambda: Qwen3NextConfig(
            **SIZES,
            **{**MIXER, "linear_num_key_heads": 4, "linear_conv_kernel_dim": 3},
            **MOE,
            head_dim=16,
            layer_types=[
                "full_attention",
                "linear_attention",
                "linear_attention",
                "full_attention",
            ],
            decoder_sparse_step=2,
            mlp_only_layers=[3],
            norm_topk_prob=False,
            attention_bias=True,
            tie_word_embeddings=True,
            rope_parameters=rope(1e6, partial_rotary_factor=0.5),
        ),
    ),
}
