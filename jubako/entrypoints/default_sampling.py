"""Which sampling parameters does a model recommend?"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_NAMES = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
"""Name in Hugging Face's generation_config.json → field of `SamplingParams`."""


def default_sampling_values(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `SamplingParams` that the model's generation config sets."""
    return {
        ours: generation_config[theirs]
        for theirs, ours in _NAMES.items()
        if generation_config.get(theirs) is not None
    }
