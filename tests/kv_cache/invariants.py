"""What must hold of a pool and of a manager after every operation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jubako.kv_cache import (
    AllBlocksCleared,
    BlockPool,
    BlockRemoved,
    BlockStored,
    FullAttentionSpec,
    KVCacheBlock,
    KVCacheManager,
    MambaSpec,
    get_block_hash,
    get_group_id,
)

from .fakes import FakeRequest


def check_pool(pool: BlockPool, owners: Counter[int], reserved: Iterable[int] = ()) -> None:
    """`owners` counts the tables and detached lists that hold each id."""
    free = pool.free_block_queue
    forward = free.get_all_free_blocks()
    places = [block.place for block in forward]
    assert places == sorted(set(places))
    assert len(forward) == free.num_free_blocks == len({b.block_id for b in forward})

    queued = {b.block_id for b in forward}
    set_aside = {0, *reserved}
    used = 0
    for block in pool.blocks:
        if block.block_id in queued:
            assert block.ref_cnt == 0
            assert not block.is_null
        else:
            assert block.ref_cnt >= 1 or block.block_id in set_aside
            used += block.block_id not in set_aside
        assert block.is_null == (block.block_id == 0)
        if block.block_id:
            assert block.ref_cnt == owners[block.block_id]
    usable = pool.num_gpu_blocks - len(set_aside)
    assert len(forward) + used == usable
    assert pool.null_block is pool.blocks[0]
    assert pool.null_block.block_hash is None
    assert pool.get_usage() == 1 - len(forward) / usable
    assert 0 <= pool.get_usage() <= 1

    stored: dict[int, bytes] = {}
    for key, copies in pool.cached_block_hash_to_block.items():
        assert copies
        for block in copies:
            assert block.block_id not in stored
            stored[block.block_id] = key
    assert stored == {b.block_id: b.block_hash for b in pool.blocks if b.block_hash is not None}


class EventReplay:
    """What a router believes, having seen all events."""

    def __init__(self) -> None:
        self.findable: set[tuple[bytes, int]] = set()

    def apply(self, events: Iterable[Any]) -> None:
        for event in events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                assert len(event.extra_keys) == len(event.block_hashes)
                new = {(block_hash, event.group_idx) for block_hash in event.block_hashes}
                assert len(new) == len(event.block_hashes)
                assert new.isdisjoint(self.findable)
                self.findable |= new
            elif isinstance(event, BlockRemoved):
                for block_hash in event.block_hashes:
                    self.findable.remove((block_hash, event.group_idx))
            else:
                assert isinstance(event, AllBlocksCleared)
                self.findable.clear()

    def check(self, pool: BlockPool) -> None:
        keys = [key for key, _ in pool.cached_block_hash_to_block.items()]
        assert self.findable == {(get_block_hash(key), get_group_id(key)) for key in keys}


def owners_of(manager: KVCacheManager, detached: Iterable[Sequence[KVCacheBlock]]) -> Counter[int]:
    tables = [
        table
        for m in manager.coordinator.single_type_managers
        for table in m.req_to_blocks.values()
    ]
    return Counter(b.block_id for row in [*tables, *detached] for b in row if b.block_id)


def check_tables(
    manager: KVCacheManager, requests: Mapping[str, FakeRequest], evicted: bool
) -> None:
    """Tables against each other and against their requests' hashes.

    `evicted`: blocks in use have been made unfindable, so that tables may have gaps of hashes.
    """
    home: dict[int, tuple[int, int]] = {}
    for group, m in enumerate(manager.coordinator.single_type_managers):
        scale = m.block_size // manager.block_pool.hash_block_size
        assert set(m.num_cached_block) <= set(m.req_to_blocks)
        for request_id, table in m.req_to_blocks.items():
            request = requests[request_id]
            registered = m.num_cached_block.get(request_id, 0)
            # A real request does not tell what it knew at the last caching call.
            at_caching = getattr(request, "num_registered_tokens", request.num_tokens)
            known = max(at_caching, request.num_computed_tokens)
            assert registered <= len(table)
            seen = set()
            for index, block in enumerate(table):
                if block.is_null:
                    assert not isinstance(m.kv_cache_spec, FullAttentionSpec)
                    continue
                assert block.block_id not in seen
                seen.add(block.block_id)
                # One group, and the same index, wherever a block is shared.
                assert home.setdefault(block.block_id, (group, index)) == (group, index)
                if block.block_hash is None:
                    # Only what was evicted, or holds another state than its index says.
                    masked = isinstance(m.kv_cache_spec, MambaSpec)
                    assert evicted or masked or index >= registered
                else:
                    assert (index + 1) * m.block_size <= known
                    own = request.block_hashes[(index + 1) * scale - 1]
                    assert get_block_hash(block.block_hash) == own
                    assert get_group_id(block.block_hash) == group
                    # What is brought from elsewhere may stand between registered entries.
                    has_gaps = m.has_unregistered_gaps(request_id)
                    assert evicted or has_gaps or index < registered


def snapshot(manager: KVCacheManager) -> Any:
    """All that an operation without effect must leave alone."""
    pool = manager.block_pool
    return (
        [
            (
                {r: [b.block_id for b in table] for r, table in m.req_to_blocks.items()},
                dict(m.num_cached_block),
            )
            for m in manager.coordinator.single_type_managers
        ],
        [b.block_id for b in pool.free_block_queue.get_all_free_blocks()],
        [(b.ref_cnt, b.block_hash) for b in pool.blocks if not b.is_null],
        len(pool.kv_event_queue),
    )
