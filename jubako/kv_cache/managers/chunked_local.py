"""Which blocks does chunked local attention need? Those of the chunk that the next token is in.

So a hit needs only the blocks since its last chunk border, and a prefix that ends at a border needs
none at all, cached or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.checks import check_chunk_size
from jubako.kv_cache.managers.base import (
    SingleTypeKVCacheManager,
    align_down,
)
from jubako.kv_cache.specs import ChunkedLocalAttentionSpec, KVCacheSpec, cdiv


class ChunkedLocalAttentionManager(SingleTypeKVCacheManager):
    supports_context_parallelism = False

    def __init__(self, kv_cache_spec: ChunkedLocalAttentionSpec, *args: Any, **kwargs: Any) -> None:
        check_chunk_size(kv_cache_spec)
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.attention_chunk_size = kv_cache_spec.attention_chunk_size

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
        assert isinstance(kv_cache_spec, ChunkedLocalAttentionSpec)
        assert not use_eagle, "chunked local attention does not support EAGLE"
        block_size = kv_cache_spec.block_size
        chunk_size = kv_cache_spec.attention_chunk_size
        length = max_length
        while True:
            first = length // chunk_size * chunk_size // block_size
            run = block_pool.get_cached_run(
                block_hashes, first, length // block_size, kv_cache_group_ids
            )
            found = align_down(first + len(run[0]), block_size, alignment_tokens)
            if found >= first:
                nulls = [block_pool.null_block] * first
                return tuple(nulls + blocks[: found - first] for blocks in run)
            # The aligned length lies in an earlier chunk, which has its own needs.
            length = found * block_size

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // self.attention_chunk_size * self.attention_chunk_size

    def next_skip_tokens(self, num_computed_tokens: int) -> int:
        skipped_blocks = self.get_num_skipped_tokens(num_computed_tokens) // self.block_size
        wanted = (skipped_blocks + 1) * self.block_size
        return cdiv(wanted, self.attention_chunk_size) * self.attention_chunk_size
