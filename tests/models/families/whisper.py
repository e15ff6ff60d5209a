"""Tiny models of Whisper."""

from __future__ import annotations

from typing import Any

from transformers import WhisperConfig, WhisperForConditionalGeneration

from tests.models.sizes import VOCAB

_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 96,
    "num_mel_bins": 12,
    "max_source_positions": 30,
    "max_target_positions": 256,
    "init_std": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}

ENCODER_DECODERS: dict[str, tuple[type, Any]] = {
    "whisper": (
        WhisperForConditionalGeneration,
        lambda: WhisperConfig(**_SIZES, tie_word_embeddings=False),
    ),
    "whisper tied, told to scale": (
        WhisperForConditionalGeneration,
        lambda: WhisperConfig(**_SIZES, scale_embedding=True),
    ),
}
