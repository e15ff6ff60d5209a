"""Tiny models of BART."""

from __future__ import annotations

from typing import Any

from transformers import BartConfig, BartForConditionalGeneration

from tests.models.sizes import VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "max_position_embeddings": 256,
    "init_std": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}

ENCODER_DECODERS: dict[str, tuple[type, Any]] = {
    "bart": (
        BartForConditionalGeneration,
        lambda: BartConfig(**_SIZES, tie_word_embeddings=False),
    ),
    "bart tied, scaled": (
        BartForConditionalGeneration,
        lambda: BartConfig(**_SIZES, scale_embedding=True, activation_function="relu"),
    ),
}
