"""Mamba 2."""

from __future__ import annotations

from typing import Any

from transformers import Mamba2Config, Mamba2ForCausalLM

from tests.models.sizes import VOCAB

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 12,
    "n_groups": 2,
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    "chunk_size": 16,
}

CONFIGS = {
    "mamba2": (Mamba2ForCausalLM, lambda: Mamba2Config(**SIZES)),
    "mamba2 tied, biased": (
        Mamba2ForCausalLM,
        lambda: Mamba2Config(
            **{**SIZES, "n_groups": 1, "conv_kernel": 3},
            use_bias=True,
            use_conv_bias=False,
            tie_word_embeddings=True,
        ),
    ),
}
