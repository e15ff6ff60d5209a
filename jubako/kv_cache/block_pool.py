"""Which blocks are free, which are shared, and which can be found by their content?

All groups draw from one pool. A released block keeps its hash and can be found again until it is
handed out anew. Block 0 is the null block: it stands for table entries that nobody reads, and is
never queued, hashed or counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

from jubako.kv_cache.blocks import BlockHash, BlockHashWithGroupId, KVCacheBlock
from jubako.kv_cache.events import (
    MEDIUM_GPU,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    external_block_hash,
)
from jubako.kv_cache.free_queue import FreeKVCacheBlockQueue
from jubako.kv_cache.hash_map import BlockHashToBlockMap
from jubako.kv_cache.hashing import (
    ExternalBlockHash,
    get_block_hash,
    get_group_id,
    group_suffix,
    make_block_hash_with_group_id,
)
from jubako.kv_cache.metrics import KVCacheMetricsCollector
from jubako.kv_cache.request import HashedRequest
from jubako.kv_cache.request_hashing import generate_block_hash_extra_keys

logger = logging.getLogger(__name__)


class BlockPool:
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
        valid = isinstance(num_gpu_blocks, int) and num_gpu_blocks > 0
        assert valid, f"num_gpu_blocks is {num_gpu_blocks!r}; it must be an integer above 0"
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.free_unhashed_first = free_unhashed_first
        self.use_int_block_hashes = use_int_block_hashes

        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self.kv_event_queue: list[Event] = []
        self.version = 0
        """Rises whenever the answer to a lookup may have changed."""
        self._registered_ids: dict[int, None] = {}

        self.null_block = self.free_block_queue.popleft()
        self.null_block.is_null = True
        self.num_reserved_blocks = 1

    def reserve_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks out of use for good. ValueError if too few are free."""
        if num_blocks > self.get_num_free_blocks():
            raise ValueError(
                f"{num_blocks} KV blocks to reserve, but {self.get_num_free_blocks()} are free"
            )
        self.num_reserved_blocks += num_blocks
        return self.free_block_queue.popleft_n(num_blocks)

    # Lookup

    def get_cached_block(
        self, block_hash: BlockHash, kv_cache_group_ids: Sequence[int]
    ) -> list[KVCacheBlock] | None:
        """One block for each group, the oldest copy; None if any group has none."""
        found = []
        for group_id in kv_cache_group_ids:
            key = make_block_hash_with_group_id(block_hash, group_id)
            block = self.cached_block_hash_to_block.get_one_block(key)
            if block is None:
                return None
            found.append(block)
        return found

    def get_cached_run(
        self,
        block_hashes: Sequence[BlockHash],
        start: int,
        stop: int,
        kv_cache_group_ids: Sequence[int],
    ) -> tuple[list[KVCacheBlock], ...]:
        """For each group the blocks of hashes `start` to `stop`, up to the first that any lacks."""
        get = self.cached_block_hash_to_block.get_one_block
        length = max(stop - start, 0)
        runs: list[list[KVCacheBlock]] = []
        for group_id in kv_cache_group_ids:
            suffix = group_suffix(group_id)
            run: list[KVCacheBlock] = []
            for block_hash in islice(block_hashes, start, start + length):
                block = get(BlockHashWithGroupId(block_hash + suffix))
                if block is None:
                    break
                run.append(block)
            length = len(run)
            runs.append(run)
        for run in runs:
            del run[length:]
        return tuple(runs)

    # Registering

    def cache_full_blocks(
        self,
        request: HashedRequest,
        blocks: Sequence[KVCacheBlock],
        num_cached_blocks: int,
        num_full_blocks: int,
        block_size: int,
        kv_cache_group_id: int,
        *,
        skip_hashed: bool = False,
    ) -> None:
        """Make entries `num_cached_blocks` to `num_full_blocks` of a table findable.

        Null entries are passed over. AssertionError if the request has too few hashes, or if a
        block has one already (unless `skip_hashed`).
        """
        if num_cached_blocks >= num_full_blocks:
            return
        scale, rest = divmod(block_size, self.hash_block_size)
        assert rest == 0, f"block size {block_size} is no multiple of {self.hash_block_size}"
        hashes = request.block_hashes
        assert num_full_blocks * scale <= len(hashes), (
            f"{num_full_blocks} full blocks, but only {len(hashes) // scale} block hashes"
        )
        insert = self.cached_block_hash_to_block.insert
        suffix = group_suffix(kv_cache_group_id)
        run_start = num_cached_blocks
        for index in range(num_cached_blocks, num_full_blocks):
            block = blocks[index]
            announced = False
            if not block.is_null and not (skip_hashed and block.block_hash):
                # The last of the hashes inside a larger block covers those before it.
                key = BlockHashWithGroupId(hashes[(index + 1) * scale - 1] + suffix)
                block.block_hash = key
                announced = insert(key, block)
                self._registered_ids[block.block_id] = None
            if not announced and self.enable_kv_cache_events:
                self._announce_stored(request, run_start, index, block_size, kv_cache_group_id)
                run_start = index + 1
        self.version += 1
        if self.enable_kv_cache_events:
            self._announce_stored(
                request, run_start, num_full_blocks, block_size, kv_cache_group_id
            )

    def take_registered_block_ids(self) -> list[int]:
        """Ids that became findable since the last call.

        If the step that fills them fails, they must be evicted.
        """
        ids = list(self._registered_ids)
        self._registered_ids.clear()
        return ids

    # Ownership

    def get_new_blocks(self, num_blocks: int) -> list[KVCacheBlock]:
        """Take blocks from the front of the queue. ValueError if there are fewer."""
        if num_blocks > self.free_block_queue.num_free_blocks:
            raise ValueError(
                f"{num_blocks} KV blocks wanted, but {self.get_num_free_blocks()} are free"
            )
        metrics = self.metrics_collector
        blocks = self.free_block_queue.popleft_n(num_blocks)
        for block in blocks:
            if self.enable_caching and (block.block_hash is not None or metrics is not None):
                self._maybe_evict_cached_block(block)
            assert block.ref_cnt == 0, f"free block {block.block_id} has owners: {block.ref_cnt}"
            block.ref_cnt = 1
            if metrics is not None:
                metrics.on_block_allocated(block)
        return blocks

    def touch(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Add an owner to each block; a free one leaves the queue."""
        for block in blocks:
            if block.is_null:
                continue
            if block.ref_cnt == 0:
                self.free_block_queue.remove(block)
            block.ref_cnt += 1
            if self.metrics_collector is not None:
                self.metrics_collector.on_block_accessed(block)

    def free_blocks(self, ordered_blocks: Iterable[KVCacheBlock]) -> None:
        """Take an owner from each block and queue those without any, in the given order.

        AssertionError, and no change, if a block is released more often than it is owned.
        """
        released: list[KVCacheBlock] = []
        unowned: list[KVCacheBlock] = []
        for block in ordered_blocks:
            if block.is_null:
                continue
            if block.ref_cnt <= 0:
                for earlier in released:
                    earlier.ref_cnt += 1
                raise AssertionError(f"KV block {block.block_id} is released twice")
            block.ref_cnt -= 1
            released.append(block)
            if block.ref_cnt == 0:
                unowned.append(block)
        if self.free_unhashed_first:
            self.free_block_queue.prepend_n([b for b in unowned if b.block_hash is None])
            unowned = [b for b in unowned if b.block_hash is not None]
        self.free_block_queue.append_n(unowned)

    # Forgetting

    def evict_blocks(self, block_ids: Iterable[int]) -> None:
        """Make blocks unfindable, whoever owns them. AssertionError for an id that is none."""
        ids = list(block_ids)
        for block_id in ids:
            assert 0 <= block_id < self.num_gpu_blocks, (
                f"block id {block_id} is not in 0 to {self.num_gpu_blocks - 1}"
            )
        for block_id in ids:
            self._maybe_evict_cached_block(self.blocks[block_id])

    def reset_prefix_cache(self) -> bool:
        """Make every block unfindable. False, and no change, while any block is in use."""
        used = self.num_gpu_blocks - self.num_reserved_blocks - self.get_num_free_blocks()
        if used:
            logger.warning("the prefix cache is not reset: %d blocks are in use", used)
            return False
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        for block in self.blocks:
            block.reset_hash()
        self._registered_ids.clear()
        self.version += 1
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self.kv_event_queue.append(AllBlocksCleared())
        return True

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Drop the block's hash; False if it had none."""
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        key = block.block_hash
        if key is None or self.cached_block_hash_to_block.pop(key, block.block_id) is None:
            return False
        block.reset_hash()
        self.version += 1
        if self.enable_kv_cache_events and key not in self.cached_block_hash_to_block:
            self.kv_event_queue.append(
                BlockRemoved(
                    [external_block_hash(get_block_hash(key), self.use_int_block_hashes)],
                    MEDIUM_GPU,
                    get_group_id(key),
                )
            )
        return True

    # Reports

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        usable = self.num_gpu_blocks - self.num_reserved_blocks
        return 1 - self.get_num_free_blocks() / usable if usable else 0.0

    def take_events(self) -> list[Event]:
        """The events since the last call, `[]` if they are off."""
        events, self.kv_event_queue = self.kv_event_queue, []
        return events

    def _announce_stored(
        self, request: HashedRequest, start: int, stop: int, block_size: int, group_id: int
    ) -> None:
        if start >= stop:
            return
        scale = block_size // self.hash_block_size

        def hash_of(index: int) -> ExternalBlockHash:
            block_hash = request.block_hashes[(index + 1) * scale - 1]
            return external_block_hash(block_hash, self.use_int_block_hashes)

        extra_keys: list[tuple[Any, ...] | None] = []
        mm_idx = 0
        for index in range(start, stop):
            keys, mm_idx = generate_block_hash_extra_keys(
                request, index * block_size, (index + 1) * block_size, mm_idx
            )
            extra_keys.append(keys)
        lora = request.lora_request
        self.kv_event_queue.append(
            BlockStored(
                block_hashes=[hash_of(index) for index in range(start, stop)],
                parent_block_hash=hash_of(start - 1) if start else None,
                token_ids=list(request.all_token_ids[start * block_size : stop * block_size]),
                block_size=block_size,
                lora_id=getattr(lora, "lora_int_id", None),
                medium=MEDIUM_GPU,
                lora_name=lora.lora_name if lora else None,
                extra_keys=extra_keys,
                group_idx=group_id,
            )
        )
