"""Which blocks are free, which are shared, and which can be found by their content?

All groups draw from one pool. A released block keeps its hash and can be found again until it is
handed out anew. Block 0 is the null block: it stands for table entries that nobody reads, and is
never queued, hashed or counted.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from jubako.kv_cache.block_announcer import BlockAnnouncer
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.events import Event
from jubako.kv_cache.free_queue import FreeKVCacheBlockQueue
from jubako.kv_cache.hash_map import BlockHashToBlockMap
from jubako.kv_cache.hashing import group_of, group_suffix
from jubako.kv_cache.lookup_memory import LookupMemory
from jubako.kv_cache.metrics import KVCacheMetricsCollector
from jubako.kv_cache.recent_blocks import RecentBlocks
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.state_index import StateIndex

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
        if not isinstance(num_gpu_blocks, int) or num_gpu_blocks <= 0:
            raise ImpossibleCacheError(
                f"num_gpu_blocks is {num_gpu_blocks!r}; it must be an integer above 0",
                "num_gpu_blocks_override",
            )
        self.num_gpu_blocks = num_gpu_blocks
        self.enable_caching = enable_caching
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.metrics_collector = metrics_collector
        self.free_unhashed_first = free_unhashed_first
        self.use_int_block_hashes = use_int_block_hashes

        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_gpu_blocks)]
        for block in self.blocks:
            block.home = self
        self.free_block_queue = FreeKVCacheBlockQueue(self.blocks)
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self._announcer = BlockAnnouncer(hash_block_size, use_int_block_hashes)
        self.version = 0
        """Rises whenever the answer to a lookup may have changed."""
        self.lookup_memory = LookupMemory()
        self._registered = RecentBlocks(num_gpu_blocks)
        self._handed_out = RecentBlocks(num_gpu_blocks)
        self._state_indexes: dict[int, StateIndex] = {}
        self._group_suffixes: list[bytes] = []

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
            block = self.cached_block_hash_to_block.get_oldest(block_hash, group_suffix(group_id))
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
        if len(kv_cache_group_ids) == len(self._group_suffixes):
            suffixes = self._group_suffixes
        else:
            suffixes = [group_suffix(group_id) for group_id in kv_cache_group_ids]
        get_run = self.cached_block_hash_to_block.get_run
        return tuple(get_run(block_hashes, start, stop, suffixes))

    def index_states(self, kv_cache_group_id: int) -> None:
        """Keep the blocks of a group so that the last one of a prefix is found without a walk."""
        self._state_indexes[kv_cache_group_id] = StateIndex()

    def last_cached_index(
        self,
        block_hashes: Sequence[BlockHash],
        stop: int,
        step: int,
        kv_cache_group_ids: Sequence[int],
    ) -> int:
        """The greatest index below `stop`, one less than a multiple of `step`, that all groups
        have; -1 if there is none."""

        def is_cached(index: int) -> bool:
            return (index + 1) % step == 0 and (
                self.get_cached_block(block_hashes[index], kv_cache_group_ids) is not None
            )

        states = self._state_indexes.get(kv_cache_group_ids[0])
        if states is not None:
            return states.last(block_hashes, stop, is_cached)
        return next((i for i in range(stop - 1, -1, -1) if is_cached(i)), -1)

    # Registering

    def cache_full_blocks(
        self,
        request: KVCacheRequest,
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
        # The last of the hashes inside a larger block covers those before it.
        own_hashes = hashes[(num_cached_blocks + 1) * scale - 1 : num_full_blocks * scale : scale]
        add = self.cached_block_hash_to_block.add
        suffix = group_suffix(kv_cache_group_id)
        events = self.enable_kv_cache_events
        announce = self._announcer.stored
        passed_over: list[int] = []
        run_start = index = num_cached_blocks
        registered = blocks[num_cached_blocks:num_full_blocks]
        for block_hash in own_hashes:
            block = blocks[index]
            announced = False
            if block._block_hash is None and not block.is_null:
                block._block_hash = block_hash
                block.group_suffix = suffix
                block.registered_by = request.request_id
                block.table_index = index
                announced = add(block_hash, suffix, block)
            else:
                assert block.is_null or skip_hashed, f"block {block.block_id} already has a hash"
                passed_over.append(index)
            index += 1
            if events and not announced:
                announce(request, run_start, index - 1, block_size, kv_cache_group_id)
                run_start = index
        if passed_over:
            gone = set(passed_over)
            rows = enumerate(registered, num_cached_blocks)
            registered = [block for index, block in rows if index not in gone]
        self._registered.add(registered)
        if (
            self._state_indexes
            and (states := self._state_indexes.get(kv_cache_group_id)) is not None
        ):
            for index in range(num_cached_blocks, num_full_blocks):
                if index not in passed_over:
                    states.add(blocks[index].block_id, hashes, scale, index)
        self.version += 1
        if self.lookup_memory.active:
            self.lookup_memory.changed(own_hashes)
        if self.enable_kv_cache_events:
            announce(request, run_start, num_full_blocks, block_size, kv_cache_group_id)

    def declare_groups(self, num_groups: int) -> None:
        """Blocks will be registered for groups 0 to `num_groups`."""
        suffixes = [group_suffix(group_id) for group_id in range(num_groups)]
        for suffix in suffixes:
            self.cached_block_hash_to_block.column_of(suffix)
        self._group_suffixes = suffixes

    @property
    def registers_rows(self) -> bool:
        """Whether `cache_rows` notes all that is to be noted."""
        return not (self.enable_kv_cache_events or self._state_indexes)

    def cache_rows(
        self,
        block_hashes: Sequence[BlockHash],
        columns: Sequence[Sequence[KVCacheBlock]],
        request_ids: Sequence[str],
        indices: Sequence[int],
    ) -> None:
        """Make real blocks findable in all declared groups, whose block sizes are the same.

        `columns` has for each group the blocks under `block_hashes`; `request_ids` and `indices`
        say in whose tables they are, and where. AssertionError if a block has a hash already.
        """
        for column, suffix in zip(columns, self._group_suffixes):
            assert len(column) == len(block_hashes), (
                f"{len(column)} full blocks, but {len(block_hashes)} block hashes"
            )
            rows = zip(column, block_hashes, request_ids, indices)
            for block, block_hash, request_id, index in rows:
                assert block._block_hash is None, f"block {block.block_id} already has a hash"
                block._block_hash = block_hash
                block.group_suffix = suffix
                block.registered_by = request_id
                block.table_index = index
            self._registered.add(column)
        assert self.null_block._block_hash is None, "a null entry is never registered"
        self.cached_block_hash_to_block.add_rows(block_hashes, columns)
        self.version += 1
        if self.lookup_memory.active:
            self.lookup_memory.changed(block_hashes)

    def take_registered_block_ids(self) -> list[int]:
        """Ids that became findable since the last call.

        If the step that fills them fails, they must be evicted.
        """
        return self._registered.take()

    def settle_registered_blocks(self) -> None:
        """Forget which ids became findable since the last call of the method above."""
        self._registered.clear()

    def take_new_block_ids(self) -> list[int]:
        """Ids that were handed out since the last call, for whoever must clear their memory."""
        return self._handed_out.take()

    def forget_new_block_ids(self) -> None:
        """As the method above, for nobody."""
        self._handed_out.clear()

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
        for block in blocks:
            if block.home is not self:
                raise AssertionError(f"KV block {block.block_id} belongs to another pool")
        for block in blocks:
            ref_cnt = block.ref_cnt
            if not ref_cnt and not block.is_null:
                self.free_block_queue.remove(block)
            block.ref_cnt = ref_cnt + 1
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
                unowned.append(block)
        if self.free_unhashed_first:
            self.free_block_queue.prepend_n([b for b in unowned if b._block_hash is None])
            unowned = [b for b in unowned if b._block_hash is not None]
        self.free_block_queue.append_n(unowned)

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
        self.lookup_memory.clear()
        self.cached_block_hash_to_block.clear()
        for block in self.blocks:
            block.reset_hash()
        for states in self._state_indexes.values():
            states.clear()
        self._registered.clear()
        self.version += 1
        if self.metrics_collector is not None:
            self.metrics_collector.reset()
        if self.enable_kv_cache_events:
            self._announcer.cleared()
        return True

    def _maybe_evict_cached_block(self, block: KVCacheBlock) -> bool:
        """Drop the block's hash; False if it had none."""
        if self.metrics_collector is not None:
            self.metrics_collector.on_block_evicted(block)
        block_hash, suffix = block._block_hash, block.group_suffix
        cached = self.cached_block_hash_to_block
        if block_hash is None or cached.take(block_hash, suffix, block.block_id) is None:
            return False
        block._block_hash = None
        self.version += 1
        if self.lookup_memory.active:
            self.lookup_memory.changed((block_hash,))
        if self._state_indexes and (states := self._state_indexes.get(group_of(suffix))):
            states.discard(block.block_id)
        if self.enable_kv_cache_events and cached.get_oldest(block_hash, suffix) is None:
            self._announcer.removed(block_hash, group_of(suffix))
        return True

    # Reports

    @property
    def kv_event_queue(self) -> list[Event]:
        """What `take_events` would return."""
        return self._announcer.events

    def get_num_free_blocks(self) -> int:
        return self.free_block_queue.num_free_blocks

    def get_usage(self) -> float:
        """Share of the blocks that are in use, 0 to 1."""
        usable = self.num_gpu_blocks - self.num_reserved_blocks
        return 1 - self.get_num_free_blocks() / usable if usable else 0.0

    def take_events(self) -> list[Event]:
        """The events since the last call, `[]` if they are off."""
        return self._announcer.take()
