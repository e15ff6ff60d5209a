"""Which blocks does full attention, MLA included, need? All of them.

So a hit is any unbroken run from the left, and every prefix of a hit is a hit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.managers.base import NO_BLOCKS, SingleTypeKVCacheManager, align_down
from jubako.kv_cache.specs import ChunkedLocalAttentionSpec, FullAttentionSpec, KVCacheSpec


class FullAttentionManager(SingleTypeKVCacheManager):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._common_prefix: tuple[str, int, int] = ("", -1, 0)
        """The request and the number of table changes of the last answer, and the answer."""

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
        assert isinstance(kv_cache_spec, (FullAttentionSpec, ChunkedLocalAttentionSpec))
        block_size = kv_cache_spec.block_size * dcp_world_size * pcp_world_size
        hits = block_pool.get_cached_run(
            block_hashes, 0, max_length // block_size, kv_cache_group_ids
        )
        found = len(hits[0])
        if use_eagle and found:
            found -= 1
        found = align_down(found, block_size, alignment_tokens)
        for hit in hits:
            del hit[found:]
        return hits

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        num_requests = len(self.req_to_blocks)
        request_id, num_changes, common = self._common_prefix
        # A new block has one owner: tables that only grow need no other count. What a detached
        # table gives back is not noticed here.
        if (
            request_id == running_request_id
            and num_changes == self.num_table_changes
            and num_requests > 1
            and not self.has_detached_tables
        ):
            return common
        common = self._count_common_prefix(running_request_id, num_requests)
        self._common_prefix = running_request_id, self.num_table_changes, common
        return common

    def _count_common_prefix(self, request_id: str, num_requests: int) -> int:
        common = 0
        for block in self.req_to_blocks.get(request_id, NO_BLOCKS):
            if block.ref_cnt != num_requests:
                break
            common += 1
        return common
