"""Where do attention sinks live? In blocks that are set aside once, outside every table."""

from __future__ import annotations

from typing import Any

from jubako.kv_cache.managers.full_attention import FullAttentionManager
from jubako.kv_cache.specs import SinkFullAttentionSpec


class SinkFullAttentionManager(FullAttentionManager):
    def __init__(self, kv_cache_spec: SinkFullAttentionSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        sink_len = kv_cache_spec.sink_len or 0
        valid = sink_len > 0 and sink_len % self.block_size == 0
        assert valid, (
            f"sink_len is {sink_len}; it must be a multiple of the block size {self.block_size}"
        )
        self.sink_blocks = self.block_pool.reserve_blocks(sink_len // self.block_size)
