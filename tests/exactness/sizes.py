"""The sizes of the matrix: of its tiny models, and of what they are asked."""

from __future__ import annotations

import os
from dataclasses import dataclass

VOCAB = 256

SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}


@dataclass(frozen=True)
class Size:
    """How much is asked of a tiny model."""

    max_tokens: int
    lengths: list[int]
    """Of the prompts, in tokens. The windows of the models have 72 to 100."""
    hit_blocks: int
    """A prefix of each number of blocks up to this one is found in the cache."""
    bf16_lengths: list[int]
    step_by_step: bool
    """Whether transformers decodes token by token, or reads the whole answer at once."""
    max_model_len: int = 1024


SAMPLE = Size(
    max_tokens=24,
    lengths=[1, 34, 16, 75, 130, 260],
    hit_blocks=7,
    bf16_lengths=[130, 131, 132],
    step_by_step=False,
)
FULL = Size(
    max_tokens=64,
    lengths=[1, 2, 15, 34, 16, 64, 75, 130, 333],
    hit_blocks=12,
    bf16_lengths=list(range(120, 130)),
    step_by_step=True,
)

EVERYTHING = os.environ.get("JUBAKO_EXACTNESS") == "full"
"""Whether tests run at full size; a sample else."""
