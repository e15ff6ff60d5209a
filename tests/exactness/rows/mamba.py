"""Rows of Mamba 2 and of hybrids with attention."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL, VOCAB

MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
    "mamba_chunk_size": 64,
}

CONFIGS: dict[str, Any] = {
    "mamba2": lambda: transformers.Mamba2Config(
        vocab_size=VOCAB,
        hidden_size=64,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=16,
        state_size=12,
        n_groups=2,
        chunk_size=64,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    ),
    "bamba": lambda: transformers.BambaConfig(
        **SMALL, **MAMBA, num_hidden_layers=3, attn_layer_indices=[1]
    ),
    "falcon-h1": lambda: transformers.FalconH1Config(
        **SMALL,
        **MAMBA,
        num_hidden_layers=2,
        mamba_d_ssm=128,
        key_multiplier=0.7,
        attention_out_multiplier=1.2,
        ssm_out_multiplier=0.8,
        mlp_multipliers=[0.7, 0.6],
        ssm_multipliers=[0.9, 1.2, 0.8, 1.1, 0.7],
    ),
    "granite4": lambda: transformers.GraniteMoeHybridConfig(
        **SMALL,
        **MAMBA,
        num_hidden_layers=3,
        layer_types=["mamba", "attention", "mamba"],
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=80,
        embedding_multiplier=3.0,
        attention_multiplier=0.3,
        residual_multiplier=0.6,
        logits_scaling=2.0,
    ),
    "nemotron-h": lambda: transformers.NemotronHConfig(
        **SMALL,
        layers_block_type=["mamba", "mlp", "attention", "moe", "mamba"],
        head_dim=16,
        mamba_num_heads=8,
        mamba_head_dim=16,
        ssm_state_size=12,
        n_groups=2,
        n_routed_experts=4,
        moe_intermediate_size=48,
        moe_shared_expert_intermediate_size=32,
        # transformers heeds it for prompts, but not for the tokens that it generates.
        time_step_min=1e-9,
    ),
}
