"""Which blocks are free, and which are shared?

All groups draw from one pool. A released block keeps its hash and can be found again until it is
handed out anew. Block 0 is the null block: it stands for table entries that nobody reads, and is
never queued, hashed or counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import takewhile

from jubako.kv_cache.blocks import KVCacheBlock
from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.findable_blocks import FindableBlocks
from jubako.kv_cache.free_queue import FreeKVCacheBlockQueue
from jubako.kv_cache.hashing import group_of
from jubako.kv_cache.metrics import KVCacheMetricsCollector
from jubako.kv_cache.recent_blocks import RecentBlocks

logger = logging.getLogger(__name__)


class BlockPool(FindableBlocks):
    """`num_gpu_blocks` blocks, one of them null. `hash_block_size` is in tokens."""

    def __init__(
        self,
        num_gpu_blocks: int,
        enable_caching: bool,
        hash_block_size: int,
        enable_kv_cache_events: bool = False,
        metrics_collector: KVCacheMetricsCollector | None = None,
        *,
        free_unhashed_first: bool = False,
        use_int_block_hashes: bool = False,
    ) -> None:
        if not isinstance(num_gpu_blocks, int) or num_gpu_blocks <= 0:
            raise ImpossibleCacheError(
                f"num_gpu_blocks is {num_gpu_blocks!r}; it must be an integer above 0",
                "num_gpu_blocks_override",
            )
        super().__init__(
            num_gpu_blocks,
            hash_block_size,
            enable_kv_cache_events,
            use_int_block_hashes,
            metrics_collector,
        )
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.free_unhashed_first = free_unhashed_first
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        # The null block.
        self.free_block_queue.popleft()
        self._handed_out = RecentBlocks(num_gpu_blocks)
        self.num_reserved_blocks = 1

    def reserve_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks out of use for good. ValueError if too few are free."""
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(
                f"{num_blocks} KV blocks to reserve, but {self.get_num_free_blocks()} are free"
            )
        self.num_reserved_blocks += num_blocks
        return self.free_block_queue.popleft_n(num_blocks)

    # Ownership

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the queue. ValueError if there are fewer."""
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(
                f"{num_blocks} KV blocks wanted, but {self.get_num_free_blocks()} are free"
            )
        blocks = self.free_block_queue.popleft_n(num_blocks)
        metrics = self.metrics_collector
        if metrics is not None:
            for block in blocks:
                if self.enable_caching:
                    self._maybe_evict_cached_block(block)
                metrics.on_block_allocated(block)
        for block in blocks:
            if block._block_hash is not None:
                self._maybe_evict_cached_block(block)
            assert not block.ref_cnt, f"free block {block.block_id} has owners: {block.ref_cnt}"
            block.ref_cnt = 1
        self._handed_out.add(blocks.copy())
        return blocks

    def touch(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Add an owner to each block; a free one leaves the queue.

        AssertionError, and no change, for a block of another pool.
        """
        unowned: list[KVCacheBlock] = []
        for block in blocks:
            ref_cnt = block.ref_cnt
            if block.home is not self:
                for earlier in takewhile(lambda other: other.home is self, blocks):
                    earlier.ref_cnt -= 1
                raise AssertionError(f"KV block {block.block_id} belongs to another pool")
            if not ref_cnt and not block.is_null:
                unowned.append(block)
            block.ref_cnt = ref_cnt + 1
        for block in unowned:
            self.free_block_queue.remove(block)
        if self.metrics_collector is not None:
            for block in blocks:
                if not block.is_null:
                    self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take an owner from each block and queue those without any, in the given order.

        AssertionError, and no change, if a block is released more often than it is owned, or
        belongs to another pool.
        """
        unowned: list[KVCacheBlock] = []
        # Told apart here, where the block is at hand: another walk costs as much as this one.
        keeps_nothing: list[KVCacheBlock] = []
        unhashed_first = self.free_unhashed_first
        ordered = list(ordered_blocks)
        remaining = iter(ordered)
        for block in remaining:
            ref_cnt = block.ref_cnt - 1
            if ref_cnt < 0 or block.home is not self:
                if block.is_null and block.home is self:
                    continue
                for earlier in ordered[: len(ordered) - len(list(remaining)) - 1]:
                    earlier.ref_cnt += not earlier.is_null
                fault = "is released twice" if block.home is self else "belongs to another pool"
                raise AssertionError(f"KV block {block.block_id} {fault}")
            block.ref_cnt = ref_cnt
            if not ref_cnt and not block.is_null:
                if unhashed_first and block._block_hash is None:
                    keeps_nothing.append(block)
                else:
                    unowned.append(block)
        if keeps_nothing:
            self.free_block_queue.prepend_n(keeps_nothing)
        if unowned:
            self.free_block_queue.append_n(unowned)

    def take_new_block_ids(self) -> list[int]:
        """Ids that were handed out since the last call, for whoever must clear their memory."""
        return self._handed_out.take()

    def forget_new_block_ids(self) -> None:
        """As the method above, for nobody."""
        self._handed_out.clear()

    # Forgetting

    def evict_blocks(self, block_ids: Iterable[int]) -> list[tuple[int, KVCacheBlock]]:
        """Make blocks unfindable, whoever owns them. AssertionError for an id that is none.

        Returns those that were findable and are in use, each with its group.
        """
        ids = list(block_ids)
        in_use = []
        for block_id in ids:
            assert 0 <= block_id < self.num_gpu_blocks, (
                f"block id {block_id} is not in 0 to {self.num_gpu_blocks - 1}"
            )
        for block_id in ids:
            block = self.blocks[block_id]
            if block._block_hash is not None and block.ref_cnt > 0:
                in_use.append((group_of(block.group_suffix), block))
            self._maybe_evict_cached_block(block)
        return in_use

    def reset_prefix_cache(self) -> bool:
        """Make every block unfindable. False, and no change, while any block is in use."""
        used = self.num_gpu_blocks - self.num_reserved_blocks - self.get_num_free_blocks()
        if used:
            logger.warning("the prefix cache is not reset: %d blocks are in use", used)
            return False
        self._forget_all()
        return True

    # Reports

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        usable = self.num_gpu_blocks - self.num_reserved_blocks
        return 1 - self.get_num_free_blocks() / usable if usable else 0.0
