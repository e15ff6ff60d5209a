"""What must a layer offer that keeps something of its requests from step to step?"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import torch

from jubako.kv_cache.specs import KVCacheSpec


@runtime_checkable
class CacheLayer(Protocol):
    """A layer with pages in the KV cache, which the runner finds by these members."""

    layer_name: str
    """Unique in the model."""

    def get_kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What the layer keeps in blocks of `block_size` tokens."""
        ...

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int) -> None:
        """Use `raw`, [blocks, page bytes] int8, as this layer's pages of `block_size` tokens."""
        ...
