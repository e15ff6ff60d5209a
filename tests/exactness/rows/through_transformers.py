"""Rows of architectures without a file here, which run through transformers' modules."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

UNTIED = {**SMALL, "tie_word_embeddings": False}

CONFIGS: dict[str, Any] = {
    # Learned positions, one matrix for q, k and v, biases.
    "gpt2": lambda: transformers.GPT2Config(**UNTIED, num_hidden_layers=3, n_inner=96),
    # A quarter of each head turns, attention and MLP side by side.
    "gpt-neox": lambda: transformers.GPTNeoXConfig(**UNTIED, num_hidden_layers=3),
    # Learned positions from the third of a table on, norms before or after.
    "opt": lambda: transformers.OPTConfig(
        **UNTIED, num_hidden_layers=3, ffn_dim=96, word_embed_proj_dim=32
    ),
    # A window in all layers, biases.
    "starcoder2": lambda: transformers.Starcoder2Config(
        **UNTIED, num_hidden_layers=3, sliding_window=84
    ),
    # Embeddings that are scaled.
    "gemma": lambda: transformers.GemmaConfig(**UNTIED, num_hidden_layers=3, head_dim=32),
    # Experts, whose matrices the checkpoint has one by one.
    "olmoe": lambda: transformers.OlmoeConfig(
        **UNTIED, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2
    ),
    # Windows in some layers, caps on scores and logits.
    "vaultgemma": lambda: transformers.VaultGemmaConfig(
        **UNTIED,
        num_hidden_layers=4,
        head_dim=32,
        query_pre_attn_scalar=16,
        sliding_window=76,
        attn_logit_softcapping=20.0,
    ),
}
