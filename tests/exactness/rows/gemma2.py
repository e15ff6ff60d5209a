"""Rows of Gemma 2."""

from __future__ import annotations

from typing import Any

import transformers

from tests.exactness.sizes import SMALL

CONFIGS: dict[str, Any] = {
    "gemma2": lambda: transformers.Gemma2Config(
        **SMALL,
        tie_word_embeddings=False,  # a tied random model only repeats its last token
        num_hidden_layers=4,
        head_dim=32,
        query_pre_attn_scalar=32,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=10.0,
        sliding_window=80,
    ),
}
