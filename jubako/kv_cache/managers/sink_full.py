"""Where do attention sinks live? In blocks that are set aside once, outside every table."""

from __future__ import annotations

from typing import Any

from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.managers.full_attention import FullAttentionManager
from jubako.kv_cache.specs import SinkFullAttentionSpec


class SinkFullAttentionManager(FullAttentionManager):
    def __init__(self, kv_cache_spec: SinkFullAttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        # Groups are checked before: whole blocks, at least one.
        num_sinks = (kv_cache_spec.sink_len or 0) // self.block_size
        free = self.block_pool.get_num_free_blocks()
        if num_sinks > free:
            raise ImpossibleCacheError(
                f"sink_len {kv_cache_spec.sink_len} takes {num_sinks} KV blocks, but only {free} "
                f"are free; give the cache more memory",
                "kv_cache_memory_bytes",
            )
        self.sink_blocks = self.block_pool.reserve_blocks(num_sinks)
