"""Tiny models of Gemma 2."""

from __future__ import annotations

from typing import Any

from transformers import Gemma2Config, Gemma2ForCausalLM

from tests.models.sizes import SIZES, WINDOW, rope

CONFIGS: dict[str, tuple[type, Any]] = {
    "gemma2": (
        Gemma2ForCausalLM,
        lambda: Gemma2Config(
            **{**SIZES, "hidden_size": 72},  # no square: the root is rounded in bfloat16
            head_dim=32,
            sliding_window=WINDOW,
            query_pre_attn_scalar=20,
            attn_logit_softcapping=2.0,
            final_logit_softcapping=3.0,
            tie_word_embeddings=False,
            attention_bias=True,
            rope_parameters=rope(1e4, rope_type="linear", factor=2.0),
        ),
    ),
    "gemma2 tied, without caps": (
        Gemma2ForCausalLM,
        lambda: Gemma2Config(
            **{**SIZES, "initializer_range": 0.1},
            head_dim=16,
            sliding_window=WINDOW,
            layer_types=["full_attention", "sliding_attention"] * 2,
            query_pre_attn_scalar=16,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
    ),
}
