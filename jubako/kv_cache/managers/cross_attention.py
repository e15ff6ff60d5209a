"""Which blocks does cross attention need? Those of the encoder's output, from admission to the end.

The number of encoder tokens takes the place of the number of slots; nothing is shared or cached.
"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.managers.base import NEVER, SingleTypeKVCacheManager
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.specs import KVCacheSpec


class CrossAttentionManager(SingleTypeKVCacheManager):
    @classmethod
    def find_longest_cache_hit(
        cls,
        block_hashes: Sequence[BlockHash],
        max_length: int,
        kv_cache_group_ids: Sequence[int],
        block_pool: BlockPool,
        kv_cache_spec: KVCacheSpec,
        use_eagle: bool,
        alignment_tokens: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
    ) -> tuple[list[KVCacheBlock], ...]:
        raise NotImplementedError("cross attention has no prefix cache")

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> bool:
        # Computed tokens are the decoder's: they say nothing about encoder blocks.
        assert not new_computed_blocks, "prefix hits for a cross-attention group"
        return False

    def cache_blocks(self, request: KVCacheRequest, num_tokens: int) -> None:
        raise ValueError("cross attention has no prefix cache; enable_prefix_caching must be off")

    def next_edges(self, request_id: str, num_computed_tokens: int) -> tuple[int, int]:
        return NEVER, NEVER
