"""What else can a request carry beside its tokens? Media features and adapters, free of torch."""

from __future__ import annotations

from typing import Any

import msgspec


class PlaceholderRange(msgspec.Struct, frozen=True):
    """The prompt positions that a media item stands at.

    `offset` and `length` are tokens; `is_embed` marks, by position in the range, which of them take
    an embedding (None: all).
    """

    offset: int
    length: int
    is_embed: list[bool] | None = None


class MultiModalFeatureSpec(msgspec.Struct):
    """One media item of a request; `data` is opaque here and None where the receiver caches it."""

    data: Any
    modality: str
    identifier: str
    """Key of the item in the KV and encoder caches."""
    mm_position: PlaceholderRange
    mm_hash: str | None = None
    """Key of the item in the processor cache."""


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter that a request wants; `lora_int_id` is at least 1."""

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    load_generation: int = 0
    """How often weights were loaded anew under this name; KV of another generation is not found."""
