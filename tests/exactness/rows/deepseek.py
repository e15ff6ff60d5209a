"""DeepSeek V2 and V3 and models of their shape: a latent cache, grouped and shared experts."""

from __future__ import annotations

from typing import Any

from transformers import DeepseekV2Config, DeepseekV3Config, Glm4MoeLiteConfig, YoutuConfig

from tests.exactness.sizes import SMALL

LATENT: dict[str, Any] = {
    **SMALL,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 512,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}


def _without(*words: str) -> dict[str, Any]:
    return {key: value for key, value in LATENT.items() if not any(word in key for word in words)}


CONFIGS: dict[str, Any] = {
    "deepseek-v2-lite": lambda: DeepseekV2Config(**LATENT, q_lora_rank=None, rope_parameters=YARN),
    "deepseek-v3": lambda: DeepseekV3Config(
        **LATENT, q_lora_rank=40, n_group=4, topk_group=2, rope_parameters=YARN
    ),
    "glm4-moe-lite": lambda: Glm4MoeLiteConfig(
        **_without("dense"), q_lora_rank=40, mlp_layer_types=["dense", "sparse", "sparse"]
    ),
    "youtu": lambda: YoutuConfig(
        **_without("dense", "experts"), q_lora_rank=40, tie_word_embeddings=False
    ),
}
