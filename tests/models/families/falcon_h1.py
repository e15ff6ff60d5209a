"""Falcon-H1."""

from __future__ import annotations

from transformers import FalconH1Config, FalconH1ForCausalLM

from tests.models.families.bamba import MAMBA
from tests.models.sizes import SIZES

CONFIGS = {
    "falcon-h1": (
        FalconH1ForCausalLM,
        lambda: FalconH1Config(
            **SIZES,
            **MAMBA,
            mamba_d_ssm=128,
            embedding_multiplier=1.5,
            lm_head_multiplier=0.5,
            key_multiplier=0.7,
            attention_in_multiplier=0.9,
            attention_out_multiplier=1.2,
            ssm_in_multiplier=1.1,
            ssm_out_multiplier=0.8,
            mlp_multipliers=[0.7, 0.6],
            ssm_multipliers=[0.9, 1.2, 0.8, 1.1, 0.7],
        ),
    ),
    "falcon-h1 normalised, tied, biased": (
        FalconH1ForCausalLM,
        lambda: FalconH1Config(
            **{**SIZES, "initializer_range": 0.15},
            **MAMBA,
            mamba_d_ssm=128,
            mamba_rms_norm=True,
            mamba_norm_before_gate=False,
            mamba_proj_bias=True,
            projectors_bias=True,
            attention_bias=True,
            mlp_bias=True,
            tie_word_embeddings=True,
        ),
    ),
}
