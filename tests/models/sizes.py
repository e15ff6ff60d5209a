"""The sizes of tiny models, so that families can be compared."""

from __future__ import annotations

from typing import Any

VOCAB = 128
WINDOW = 10
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    # Large enough for attention to matter: with the usual 0.02 a window makes no difference.
    "initializer_range": 0.25,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MIXED = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def rope(theta: float = 10_000.0, **entries: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **entries}
