"""Rows of encoder-decoder models: BART and Whisper."""

from __future__ import annotations

from typing import Any

import torch
import transformers

from tests.exactness.sizes import VOCAB

_SIZES = {
    "vocab_size": VOCAB,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 80,
    "init_std": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _sharpen(model: Any) -> None:
    """Norms behind every part leave only one direction of a random model's states, unless its
    attention is sharp and its MLPs are weak."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                parameter.mul_(1.5)
            elif name.endswith(("fc2.weight", ".bias")):
                parameter.mul_(0.3)


CONFIGS: dict[str, Any] = {
    "bart": lambda: transformers.BartConfig(
        **_SIZES, max_position_embeddings=1024, decoder_start_token_id=2, forced_eos_token_id=None
    ),
    "whisper": lambda: transformers.WhisperConfig(
        **_SIZES,
        num_mel_bins=16,
        max_source_positions=60,
        max_target_positions=1024,
        decoder_start_token_id=3,
    ),
}
PREPARE = {"bart": _sharpen}

_WHOLE = (
    "a prompt is never split: keys and values of the encoder's output are written by the step that "
    "runs the encoder and the whole prompt"
)
_NOT_SHARED = "there is no prefix cache: keys and values depend on the encoder's input"
EXCEPTIONS = {
    name: {
        "hits": _NOT_SHARED,
        "budget-1": _WHOLE,
        "budget-7": _WHOLE,
        "budget-64": _WHOLE,
    }
    for name in CONFIGS
}
