"""Which blocks can be found by their content?

A block is findable from the step that fills it until it is handed out anew or evicted, whoever owns
it meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.kv_cache.block_announcer import BlockAnnouncer
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.events import Event
from jubako.kv_cache.hash_map import BlockHashToBlockMap
from jubako.kv_cache.hashing import group_of, group_suffix
from jubako.kv_cache.lookup_memory import LookupMemory
from jubako.kv_cache.metrics import KVCacheMetricsCollector
from jubako.kv_cache.recent_blocks import RecentBlocks
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.state_index import StateIndex


class FindableBlocks:
    """All blocks of a pool, the first of them null; see `BlockPool`."""

    def __init__(
        self,
        num_blocks: int,
        hash_block_size: int,
        enable_kv_cache_events: bool,
        use_int_block_hashes: bool,
        metrics_collector: KVCacheMetricsCollector | None,
    ) -> None:
        self.hash_block_size = hash_block_size
        self.enable_kv_cache_events = enable_kv_cache_events
        self.use_int_block_hashes = use_int_block_hashes
        self.metrics_collector = metrics_collector
        self.blocks = [KVCacheBlock(block_id) for block_id in range(num_blocks)]
        for block in self.blocks:
            block.home = self
        self.null_block = self.blocks[0]
        self.null_block.is_null = True
        self.cached_block_hash_to_block = BlockHashToBlockMap()
        self._announcer = BlockAnnouncer(hash_block_size, use_int_block_hashes)
        self.version = 0
        """Rises whenever the answer to a lookup may have changed."""
        self.lookup_memory = LookupMemory()
        self._registered = RecentBlocks(num_blocks)
        self._state_indexes: dict[int, StateIndex] = {}
        self._group_suffixes: list[bytes] = []

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

    # Forgetting

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

    def _forget_all(self) -> None:
        """Make every block unfindable; none is in use."""
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

    # Events

    @property
    def kv_event_queue(self) -> list[Event]:
        """What `take_events` would return."""
        return self._announcer.events

    def take_events(self) -> list[Event]:
        """The events since the last call, `[]` if they are off."""
        return self._announcer.take()
