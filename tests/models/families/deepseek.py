"""DeepSeek V2 and V3: latent attention, grouped and shared experts."""

from __future__ import annotations

from typing import Any

from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    YoutuConfig,
    YoutuForCausalLM,
)

from tests.models.sizes import SIZES, YARN, rope

# Sizes that differ from each other, so that none can stand for another.
LATENT: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 4,
    "kv_lora_rank": 28,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "moe_intermediate_size": 40,  # transformers wants rows of 16 bytes
    "n_routed_experts": 12,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}
SHARP = {**YARN, "mscale": 0.8, "mscale_all_dim": 1.2}

CONFIGS: dict[str, tuple[type, Any]] = {
    "deepseek v2 lite": (
        DeepseekV2ForCausalLM,
        lambda: DeepseekV2Config(
            **{**LATENT, "q_lora_rank": None},
            rope_parameters=rope(**{**SHARP, "mscale": 0.707, "mscale_all_dim": 0.707}),
        ),
    ),
    "deepseek v2": (
        DeepseekV2ForCausalLM,
        lambda: DeepseekV2Config(
            **LATENT,
            topk_method="group_limited_greedy",
            n_group=4,
            topk_group=2,
            routed_scaling_factor=3.0,
            rope_parameters=rope(**SHARP),
        ),
    ),
    "deepseek v2 biased": (
        DeepseekV2ForCausalLM,
        lambda: DeepseekV2Config(
            **{**LATENT, "q_lora_rank": None, "first_k_dense_replace": 2}, attention_bias=True
        ),
    ),
    "deepseek v3": (
        DeepseekV3ForCausalLM,
        lambda: DeepseekV3Config(**LATENT, n_group=4, topk_group=2, rope_parameters=rope(**SHARP)),
    ),
    "deepseek v3, no groups": (
        DeepseekV3ForCausalLM,
        lambda: DeepseekV3Config(
            **{**LATENT, "q_lora_rank": None, "first_k_dense_replace": 0},
            n_group=1,
            topk_group=1,
            norm_topk_prob=False,
            rope_interleave=False,
            attention_bias=True,
        ),
    ),
    "glm4 moe lite": (
        Glm4MoeLiteForCausalLM,
        lambda: Glm4MoeLiteConfig(
            **{k: v for k, v in LATENT.items() if k != "first_k_dense_replace"},
            mlp_layer_types=["dense", "sparse", "dense", "sparse"],
        ),
    ),
    "youtu": (
        YoutuForCausalLM,
        lambda: YoutuConfig(
            **{k: v for k, v in LATENT.items() if "experts" not in k and "dense" not in k}
        ),
    ),
}
