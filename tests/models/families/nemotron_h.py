"""Nemotron-H."""

from __future__ import annotations

from typing import Any

from transformers import NemotronHConfig, NemotronHForCausalLM

from tests.models.sizes import SIZES as COMMON

SIZES: dict[str, Any] = {
    **{name: size for name, size in COMMON.items() if name != "num_hidden_layers"},
    "head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
    # transformers heeds it for prompts, but not for the tokens that it generates.
    "time_step_min": 1e-9,
}

CONFIGS = {
    "nemotron-h": (
        NemotronHForCausalLM,
        lambda: NemotronHConfig(
            **SIZES, layers_block_type=["mamba", "mlp", "attention", "mlp", "mamba"]
        ),
    ),
    "nemotron-h, experts, biased": (
        NemotronHForCausalLM,
        lambda: NemotronHConfig(
            **{**SIZES, "initializer_range": 0.15},
            layers_block_type=["mamba", "moe", "attention", "moe"],
            n_routed_experts=6,
            moe_intermediate_size=48,
            moe_shared_expert_intermediate_size=32,
            routed_scaling_factor=1.5,
            use_bias=True,
            mlp_bias=True,
            residual_in_fp32=True,
        ),
    ),
}
