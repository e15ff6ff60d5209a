"""Which manager keeps the tables of a group? One file for each attention type."""

from __future__ import annotations

from typing import Any

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.errors import UnknownSpecError
from jubako.kv_cache.managers.base import SingleTypeKVCacheManager
from jubako.kv_cache.managers.chunked_local import ChunkedLocalAttentionManager
from jubako.kv_cache.managers.cross_attention import CrossAttentionManager
from jubako.kv_cache.managers.full_attention import FullAttentionManager
from jubako.kv_cache.managers.mamba import MambaManager
from jubako.kv_cache.managers.sink_full import SinkFullAttentionManager
from jubako.kv_cache.managers.sliding_window import SlidingWindowManager
from jubako.kv_cache.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

__all__ = [
    "ChunkedLocalAttentionManager",
    "CrossAttentionManager",
    "FullAttentionManager",
    "MambaManager",
    "SingleTypeKVCacheManager",
    "SinkFullAttentionManager",
    "SlidingWindowManager",
    "get_manager_for_kv_cache_spec",
    "spec_manager_map",
]

# By exact type: a subclass of a spec may need other blocks.
spec_manager_map: dict[type[KVCacheSpec], type[SingleTypeKVCacheManager]] = {
    FullAttentionSpec: FullAttentionManager,
    MLAAttentionSpec: FullAttentionManager,
    SlidingWindowSpec: SlidingWindowManager,
    ChunkedLocalAttentionSpec: ChunkedLocalAttentionManager,
    MambaSpec: MambaManager,
    CrossAttentionSpec: CrossAttentionManager,
    SinkFullAttentionSpec: SinkFullAttentionManager,
}


def get_manager_for_kv_cache_spec(
    kv_cache_spec: KVCacheSpec,
    block_pool: BlockPool,
    enable_caching: bool,
    kv_cache_group_id: int,
    **kwargs: Any,
) -> SingleTypeKVCacheManager:
    """ConfigError, which is also a KeyError, for a spec type that has no manager."""
    manager_class = spec_manager_map.get(type(kv_cache_spec))
    if manager_class is None:
        known = ", ".join(spec_type.__name__ for spec_type in spec_manager_map)
        raise UnknownSpecError(
            f"no manager for KV cache specs of type {type(kv_cache_spec).__name__}; known are "
            f"{known}"
        )
    return manager_class(kv_cache_spec, block_pool, enable_caching, kv_cache_group_id, **kwargs)
