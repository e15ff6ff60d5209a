"""How do the tables of a decoding request grow, cheaply in a model with many groups?

A decode step asks every group the same three questions: which blocks are no longer read, how many
are missing, which have filled. Groups with equal specs have tables of equal shape, so the answers
are worked out once for each kind of group, and the pool is asked once for all of them. The outcome
is that of the managers' own methods, called one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import KVCacheBlock
from jubako.kv_cache.managers.base import NEVER, NO_BLOCKS, SingleTypeKVCacheManager
from jubako.kv_cache.managers.chunked_local import ChunkedLocalAttentionManager
from jubako.kv_cache.managers.full_attention import FullAttentionManager
from jubako.kv_cache.managers.sliding_window import SlidingWindowManager
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.specs import KVCacheSpec

BlockIds = tuple[list[int], ...]
"""Ids for each group."""

_PLAIN = (FullAttentionManager, SlidingWindowManager, ChunkedLocalAttentionManager)
"""Managers whose tables hold one block for every `block_size` tokens, whatever a step does."""


class Edges:
    """Token counts below which nothing happens to a request's tables."""

    __slots__ = ("allocation", "event", "hash", "skip", "tables", "uniform")

    def __init__(self) -> None:
        self.event = 0
        """Slots at which any group allocates, drops or registers a block."""
        self.hash = 0
        """Known tokens at which any group registers a block."""
        self.uniform = True
        """Whether its tables are alike in all groups of one kind."""
        self.allocation: int | None = None
        """Slots at which blocks are allocated; None if that is to be looked up, like what is
        below."""
        self.skip = 0
        self.tables: Sequence[list[KVCacheBlock]] = ()

    def move(self, event: int, hash_: int) -> None:
        """New counts for tables that may have changed."""
        self.event = event
        self.hash = hash_
        self.allocation = None


class _Kind:
    """Groups with equal specs."""

    __slots__ = ("block_size", "drops", "first", "lead", "missing", "num_skipped", "place", "size")

    def __init__(self, lead: SingleTypeKVCacheManager, place: int) -> None:
        self.lead = lead
        self.place = place
        """Of the lead among the groups."""
        self.size = 1
        self.block_size = lead.block_size
        self.drops = lead.next_skip_tokens(0) < NEVER
        """Whether blocks ever fall out of reach."""
        self.first = self.num_skipped = 0
        """The table entries that the request at hand does not read any more, and still has."""
        self.missing = 0
        """Blocks that the request at hand lacks in each group."""


class TableGrowth:
    """Grows the tables of requests that already run, in all groups at once.

    `applies` is False for models with other groups, for instance recurrent ones.
    """

    def __init__(
        self,
        managers: Sequence[SingleTypeKVCacheManager],
        block_pool: BlockPool,
        enable_caching: bool,
    ) -> None:
        self.applies = all(isinstance(manager, _PLAIN) for manager in managers)
        self._pool = block_pool
        self._enable_caching = enable_caching
        self._kinds: list[_Kind] = []
        self._groups: list[tuple[SingleTypeKVCacheManager, _Kind]] = []
        by_spec: dict[tuple[type, KVCacheSpec, int], _Kind] = {}
        for place, manager in enumerate(managers):
            key = (type(manager), manager.kv_cache_spec, manager.block_size)
            kind = by_spec.get(key)
            if kind is None:
                kind = by_spec[key] = _Kind(manager, place)
                self._kinds.append(kind)
            else:
                kind.size += 1
            self._groups.append((manager, kind))
        sizes = {manager.block_size for manager in managers}
        self.block_size = sizes.pop() if self.applies and len(sizes) == 1 else None
        """Tokens in a block of every group, if there is one such size."""
        self._hash_size = block_pool.hash_block_size
        self._num_registered = [manager.num_cached_block for manager in managers]
        self._dropping = [kind for kind in self._kinds if kind.drops]
        self._dropping_groups = [
            (place, kind) for place, (_, kind) in enumerate(self._groups) if kind.drops
        ]
        self._no_blocks: tuple[Sequence[KVCacheBlock], ...] = (NO_BLOCKS,) * len(self._groups)

    def most_blocks(self, num_tokens: int) -> int | None:
        """What so many tokens take in all groups if nothing of them is there yet, as free blocks
        or as cached ones that nobody owns; None if that cannot be said."""
        if not self.applies:
            return None
        return sum([-(-num_tokens // kind.block_size) * kind.size for kind in self._kinds])

    def begin(
        self,
        request: KVCacheRequest,
        hits: Sequence[Sequence[KVCacheBlock]],
        num_computed_tokens: int,
        num_slots: int,
        num_known: int,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """`grow` for a new request, whose tables begin with `hits` for the computed tokens."""
        request_id = request.request_id
        null_block = self._pool.null_block
        for kind in self._kinds:
            skipped = kind.lead.get_num_skipped_tokens(num_computed_tokens)
            kind.num_skipped = skipped // kind.block_size
        tables: list[list[KVCacheBlock]] = []
        held: list[KVCacheBlock] = []
        for (_, kind), group_hits in zip(self._groups, hits):
            table = list(group_hits)
            if kind.num_skipped:
                table[: kind.num_skipped] = [null_block] * kind.num_skipped
            held += table[kind.num_skipped :]
            tables.append(table)
        # All groups own their hits before any takes blocks: those could be the hits.
        self._pool.touch(held)
        for (manager, _), table in zip(self._groups, tables):
            manager.begin_table(request_id, table)
        return self._fill(request, tables, num_slots, num_known)

    def grow(
        self, request: KVCacheRequest, num_computed_tokens: int, num_slots: int, num_known: int
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        """Drop what is no longer read, make room for `num_slots` tokens, register full blocks.

        `num_known` are the tokens, from the first, whose values are settled. Returns the new blocks
        of each group; None if the pool has too few, then nothing but the dropping is done.
        """
        tables = self._tables_of(request.request_id)
        if self._dropping:
            removed: list[KVCacheBlock] = []
            self._take_skipped(tables, num_computed_tokens, removed)
            if removed:
                self._pool.free_blocks(removed)
        return self._fill(request, tables, num_slots, num_known)

    def _fill(
        self,
        request: KVCacheRequest,
        tables: Sequence[list[KVCacheBlock]],
        num_slots: int,
        num_known: int,
    ) -> tuple[Sequence[KVCacheBlock], ...] | None:
        needed = 0
        for kind in self._kinds:
            missing = -(-num_slots // kind.block_size) - len(tables[kind.place])
            kind.missing = max(missing, 0)
            needed += kind.missing * kind.size
        if needed > self._pool.get_num_free_blocks():
            return None
        added = self._no_blocks
        if needed:
            added = self._extend(tables, self._pool.get_new_blocks(needed))
        self._register(request, num_known, tables)
        return added

    def grow_decodes(
        self,
        requests: Sequence[KVCacheRequest],
        edges: Sequence[Edges],
        new_block_ids: dict[str, BlockIds],
    ) -> list[int] | None:
        """`grow` by one token more than those computed, for all `requests` or for none.

        `edges` are theirs, and are moved; ids of new blocks are noted by request id. Returns the
        slots at which each is due again; None if the pool has too few blocks, then nothing is
        changed. Only for groups of one block size, where all groups lack or fill a block at the
        same time.
        """
        size = self.block_size
        assert size is not None, "groups of several block sizes grow one by one"
        num_growing = 0
        for request, edge in zip(requests, edges):
            if edge.allocation is None:
                edge.tables = self._tables_of(request.request_id)
                edge.allocation = len(edge.tables[0]) * size + 1
                edge.skip = 0 if self._dropping else NEVER
            if request.num_tokens >= edge.allocation:
                num_growing += 1
        needed = num_growing * len(self._groups)
        # With that many free, what one request drops is not what the next one takes.
        if needed > self._pool.get_num_free_blocks():
            return None
        taken = iter(self._pool.get_new_blocks(needed))
        removed: list[KVCacheBlock] = []
        filled: dict[str, int] = {}
        hashes = []
        rows, indices = [], []
        events = []
        for request, edge in zip(requests, edges):
            num_tokens = request.num_tokens
            tables = edge.tables
            allocation = edge.allocation or 0
            if num_tokens >= edge.skip:
                self._take_skipped(tables, num_tokens - 1, removed)
                edge.skip = self._next_skip(num_tokens - 1)
            if num_tokens >= allocation:
                ids = []
                # One block a group, dealt in the order of the groups.
                for table, block in zip(tables, taken):
                    table.append(block)
                    ids.append([block.block_id])
                new_block_ids[request.request_id] = tuple(ids)
                edge.allocation = allocation = allocation + size
            if num_tokens >= edge.hash:
                if num_tokens - edge.hash < size and self._pool.registers_rows:
                    index = edge.hash // size - 1
                    filled[request.request_id] = index + 1
                    indices.append(index)
                    hashes.append(request.block_hashes[edge.hash // self._hash_size - 1])
                    rows.append([table[index] for table in tables])
                else:
                    self._register(request, num_tokens, tables)
                edge.hash = (num_tokens // size + 1) * size
            # Comparing twice costs half of `min`.
            event = allocation if allocation < edge.skip else edge.skip
            if edge.hash < event:
                event = edge.hash
            edge.event = event
            events.append(event)
        if filled:
            self._pool.cache_rows(hashes, list(zip(*rows)), list(filled), indices)
            for registered in self._num_registered:
                registered.update(filled)
        if removed:
            self._pool.free_blocks(removed)
        return events

    def _next_skip(self, num_computed_tokens: int) -> int:
        """The smallest number of slots with which any kind drops more than now."""
        skips = [kind.lead.next_skip_tokens(num_computed_tokens) for kind in self._dropping]
        return min(skips) + 1

    def _tables_of(self, request_id: str) -> list[list[KVCacheBlock]]:
        return [manager.req_to_blocks[request_id] for manager, _ in self._groups]

    def _take_skipped(
        self,
        tables: Sequence[list[KVCacheBlock]],
        num_computed_tokens: int,
        removed: list[KVCacheBlock],
    ) -> None:
        """Move what no later token reads out of a request's tables, each deepest first."""
        null_block = self._pool.null_block
        for kind in self._dropping:
            table = tables[kind.place]
            skipped = kind.lead.get_num_skipped_tokens(num_computed_tokens)
            first = stop = min(skipped // kind.block_size, len(table))
            if stop and table[0] is not null_block:
                first = 0
            # Everything before a null entry went earlier.
            while first > 0 and table[first - 1] is not null_block:
                first -= 1
            kind.first, kind.num_skipped = first, stop
        for place, kind in self._dropping_groups:
            table, first, stop = tables[place], kind.first, kind.num_skipped
            if stop == first + 1:
                removed.append(table[first])
                table[first] = null_block
            elif stop > first:
                dropped = table[first:stop]
                dropped.reverse()
                removed += dropped
                table[first:stop] = [null_block] * (stop - first)

    def _extend(
        self, tables: Sequence[list[KVCacheBlock]], taken: list[KVCacheBlock]
    ) -> tuple[Sequence[KVCacheBlock], ...]:
        """Lengthen the tables by what they lack of the blocks `taken`, group after group."""
        added: list[Sequence[KVCacheBlock]] = []
        start = 0
        for (_, kind), table in zip(self._groups, tables):
            blocks = taken[start : start + kind.missing]
            start += kind.missing
            table += blocks
            added.append(blocks or NO_BLOCKS)
        return tuple(added)

    def _register(
        self, request: KVCacheRequest, num_known: int, tables: Sequence[list[KVCacheBlock]]
    ) -> None:
        """Make what `num_known` tokens fill findable."""
        if not self._enable_caching:
            return
        size = self.block_size
        if size is not None and self._pool.registers_rows:
            request_id = request.request_id
            start, stop = self._num_registered[0].get(request_id, 0), num_known // size
            if start >= stop:
                return
            columns = [table[start:stop] for table in tables]
            # Null entries stand in front of all others.
            null_block = self._pool.null_block
            if all([column[0] is not null_block for column in columns]):  # noqa: C419 (quicker)
                scale = size // self._hash_size
                hashes = request.block_hashes[(start + 1) * scale - 1 : stop * scale : scale]
                request_ids = [request_id] * (stop - start)
                self._pool.cache_rows(hashes, columns, request_ids, range(start, stop))
                for registered in self._num_registered:
                    registered[request_id] = stop
                return
        for manager, _ in self._groups:
            manager.cache_blocks(request, num_known)

    def next_edges(self, request_id: str, num_computed_tokens: int) -> tuple[int, int]:
        """As the coordinator's method of this name."""
        if self.block_size is not None:
            lead = self._kinds[0].lead
            event = len(lead.req_to_blocks[request_id]) * self.block_size + 1
            if self._dropping:
                event = min(event, self._next_skip(num_computed_tokens))
            hash_ = lead.next_hash_tokens(request_id) if self._enable_caching else NEVER
            return min(event, hash_), hash_
        event = hash_ = NEVER
        for kind in self._kinds:
            own_event, own_hash = kind.lead.next_edges(request_id, num_computed_tokens)
            event, hash_ = min(event, own_event), min(hash_, own_hash)
        return min(event, hash_), hash_
