"""May a request grow, and what of it is cached already?

The one object that the scheduler talks to. It holds no blocks itself: tables are with the managers,
ownership with the pool.
"""

from __future__ import annotations

from collections.abc import Sequence, Set

from jubako.kv_cache.blocks import KVCacheBlock, KVCacheBlocks
from jubako.kv_cache.coordinator import GroupBlocks
from jubako.kv_cache.growth import BlockIds, Edges
from jubako.kv_cache.kv_cache_state import KVCacheState
from jubako.kv_cache.local_blocks import LocalBlocks
from jubako.kv_cache.lookup_memory import CacheHit
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.specs import cdiv


class KVCacheManager(KVCacheState):
    """Lengths are in tokens. `watermark` is the share of blocks that stay free on admission.

    Keyword-only: `interleaved_free` frees the deepest blocks of all groups first rather than group
    by group; `free_unhashed_first` hands blocks that nobody can find out before others;
    `use_int_block_hashes` makes events carry 8-byte integers.
    """

    def get_computed_blocks(self, request: KVCacheRequest) -> tuple[KVCacheBlocks, int]:
        """The cached blocks that a new request can begin with, and how many tokens they hold.

        At least the last token is left to compute, since it gives the logits. Nothing is changed:
        until `allocate_slots` the blocks may be evicted.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return self.empty_kv_cache_blocks, 0
        hit = self._lookups.get(request)
        if hit is None:
            groups, length, full_length = self.coordinator.find_hit(
                request.block_hashes, request.num_tokens - 1
            )
            lost = max(full_length - length, 0)
            hit = CacheHit(self.create_kv_cache_blocks(groups), length, lost)
            self._lookups.put(request, hit)
        return hit.blocks, hit.length

    def get_local_blocks(self, request: KVCacheRequest) -> tuple[LocalBlocks, ...]:
        """For each group which blocks of a new request it has, for whoever brings the others."""
        return tuple(
            LocalBlocks(manager, self.block_pool, request)
            for manager in self.coordinator.single_type_managers
        )

    def get_shared_prefix_tokens(self, request: KVCacheRequest) -> int:
        """Leading tokens that the full-attention groups have cached, whatever the others lack.

        Beyond the hit these tokens are lost: they must be computed again. Ending a prefill chunk
        here lets recurrent groups keep the state that the next request with this prefix will want.
        """
        if not self.enable_caching or request.skip_reading_prefix_cache:
            return 0
        return self.coordinator.get_shared_prefix_length(
            request.block_hashes, request.num_tokens - 1
        )

    def allocate_slots(
        self,
        request: KVCacheRequest,
        num_new_tokens: int,
        num_new_computed_tokens: int = 0,
        new_computed_blocks: KVCacheBlocks | None = None,
        num_lookahead_tokens: int = 0,
        num_external_computed_tokens: int = 0,
        delay_cache_blocks: bool = False,
        num_encoder_tokens: int = 0,
        full_sequence_must_fit: bool = False,
        reserved_blocks: int = 0,
        has_scheduled_reqs: bool = True,
    ) -> KVCacheBlocks | None:
        """Give a request blocks for its next step, and return those that are new in its tables.

        The tokens of a request, from left to right: `request.num_computed_tokens` in its table;
        `num_new_computed_tokens` just found (`new_computed_blocks`); `num_external_computed_tokens`
        that a connector loads, into new blocks where those found are null or end; `num_new_tokens`
        to compute, drafts included; `num_lookahead_tokens` that the drafter writes.

        None means "not now": no block was taken and nothing became findable. With
        `full_sequence_must_fit` it also means that the whole request would not fit.
        `reserved_blocks` of the free blocks are not for this request. `delay_cache_blocks` leaves
        the registering to a later `cache_blocks`. ValueError if there is nothing to allocate for.
        """
        if num_new_tokens < 1 and (num_new_tokens < 0 or num_external_computed_tokens < 1):
            raise ValueError(f"no tokens to allocate for request {request.request_id}")
        request_id = request.request_id
        edges = self._edges.get(request_id)
        if edges is not None and not (
            new_computed_blocks is not None
            or num_new_computed_tokens
            or num_external_computed_tokens
            or num_encoder_tokens
            or full_sequence_must_fit
            or reserved_blocks
            or self.watermark_blocks
        ):
            computed = request.num_computed_tokens
            if computed + num_new_tokens + num_lookahead_tokens < edges.event:
                return self.empty_kv_cache_blocks
            if self._growth.applies and edges.uniform and not delay_cache_blocks:
                return self._grow(request, edges, num_new_tokens, num_lookahead_tokens)

        local = request.num_computed_tokens + num_new_computed_tokens
        uncapped = local + num_external_computed_tokens
        total = min(uncapped, self.max_model_len)
        main = total + num_new_tokens
        slots = min(main + num_lookahead_tokens, self.max_model_len)
        hits: GroupBlocks = self.empty_kv_cache_blocks.blocks
        if new_computed_blocks is not None:
            hits = new_computed_blocks.blocks
        any_hits = any(hits)

        watermark = 0
        if self.watermark_blocks and has_scheduled_reqs and request.awaits_admission:
            # Running requests and an empty machine are never held back.
            watermark = self.watermark_blocks
        coordinator = self.coordinator
        whole = min(request.num_tokens, self.max_model_len) if full_sequence_must_fit else 0
        # Counting exactly is for pools that are nearly full.
        free = self.block_pool.get_num_free_blocks() - reserved_blocks - watermark
        most = None if num_encoder_tokens else self._growth.most_blocks(max(slots, whole))
        is_roomy = most is not None and most <= free
        if full_sequence_must_fit and not is_roomy:
            needed = coordinator.get_num_blocks_to_allocate(
                request_id, whole, hits, num_encoder_tokens, uncapped, whole, True
            )
            if needed + watermark > self.block_pool.get_num_free_blocks():
                return None
        if edges is not None:
            # Even if the request must wait, what it no longer reads serves others.
            coordinator.remove_skipped_blocks(request_id, total)
        if not is_roomy:
            needed = coordinator.get_num_blocks_to_allocate(
                request_id, slots, hits, num_encoder_tokens, uncapped, main
            )
            if needed + watermark > self.block_pool.get_num_free_blocks() - reserved_blocks:
                return None

        # Answered: what it registers itself from here on need not be compared with its hashes.
        lookup = self._lookups.take(request_id) if self._lookups.active else None
        known = min(main, request.num_tokens, self.max_model_len)
        is_plain = self._growth.applies and not (
            edges is not None
            or num_external_computed_tokens
            or num_encoder_tokens
            or delay_cache_blocks
            or (any_hits and not self.enable_caching)
        )
        new_blocks: GroupBlocks | None
        if is_plain:
            new_blocks = self._growth.begin(request, hits, total, slots, known)
            assert new_blocks is not None, "the blocks that a request needs were counted wrongly"
        else:
            if any_hits or num_external_computed_tokens > 0:
                coordinator.allocate_new_computed_blocks(
                    request_id, hits, local, num_external_computed_tokens
                )
            new_blocks = coordinator.allocate_new_blocks(
                request_id, slots, main, num_encoder_tokens
            )
            if self.enable_caching and not delay_cache_blocks:
                # Known tokens only: drafts may be rejected.
                coordinator.cache_blocks(request, known)
        if edges is None:
            self._record_lookup(request, num_new_computed_tokens, hits, lookup)
            self._edges[request_id] = edges = Edges()
            if num_external_computed_tokens and any_hits:
                edges.uniform = not self.coordinator.has_unregistered_gaps(request_id)
        source = self._growth if is_plain else coordinator
        edges.move(*source.next_edges(request_id, total))
        return self.create_kv_cache_blocks(new_blocks)

    def grow_decodes(
        self, requests: Sequence[KVCacheRequest], new_block_ids: dict[str, BlockIds]
    ) -> list[int] | None:
        """`allocate_slots(request, 1)` for requests that lack the KV of their last token only.

        The ids of new blocks are noted by request id. Returns the `next_event_tokens` of each; None
        if the pool has too few for all: some may have got theirs.
        """
        edges = [self._edges[request.request_id] for request in requests]
        if (
            self._growth.block_size is not None
            and not self.watermark_blocks
            and all([edge.uniform for edge in edges])  # noqa: C419 (quicker)
        ):
            return self._growth.grow_decodes(requests, edges, new_block_ids)
        for request in requests:
            blocks = self.allocate_slots(request, 1)
            if blocks is None:
                return None
            if not blocks.is_empty:
                new_block_ids[request.request_id] = blocks.get_block_ids()
        return [self.next_event_tokens(request.request_id) for request in requests]

    def _grow(
        self, request: KVCacheRequest, edges: Edges, num_new_tokens: int, num_lookahead_tokens: int
    ) -> KVCacheBlocks | None:
        """`allocate_slots` for a running request that has reached an edge."""
        growth = self._growth
        total = min(request.num_computed_tokens, self.max_model_len)
        main = total + num_new_tokens
        slots = min(main + num_lookahead_tokens, self.max_model_len)
        known = min(main, request.num_tokens, self.max_model_len)
        blocks = growth.grow(request, total, slots, known)
        if blocks is None:
            return None
        request_id = request.request_id
        edges.move(*growth.next_edges(request_id, total))
        return self.create_kv_cache_blocks(blocks)

    def cache_blocks(self, request: KVCacheRequest, num_computed_tokens: int) -> None:
        """Make the blocks that those tokens fill findable, for instance when loaded KV arrived."""
        if not self.enable_caching:
            return
        edges = self._edges.get(request.request_id)
        if edges is not None and num_computed_tokens < edges.hash:
            return
        self.coordinator.cache_blocks(request, num_computed_tokens)
        if edges is not None:
            edges.hash = self.coordinator.next_hash_tokens(request.request_id)

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free blocks that no token after those computed reads."""
        self.coordinator.remove_skipped_blocks(request_id, total_computed_tokens)

    def free(self, request: KVCacheRequest) -> None:
        """Release all blocks of a request, deepest first; also for one that never had any."""
        request_id = request.request_id
        self._edges.pop(request_id, None)
        if self._lookups.active:
            self._lookups.take(request_id)
        self.coordinator.free(request_id)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Keep of a request's tables what holds its first `num_tokens` tokens; free the rest.

        Recurrent groups cannot step back, so with one of them `free` is the only way.
        """
        for manager in self.coordinator.single_type_managers:
            manager.truncate(request_id, num_tokens)
        edges = self._edges.get(request_id)
        if edges is not None:
            edges.move(*self.coordinator.next_edges(request_id, num_tokens))
            edges.uniform = False

    def longest_intact_prefix(
        self, request_id: str, num_tokens: int, damaged: Set[int], alignment: int
    ) -> int:
        """The most tokens, up to `num_tokens`, that a request can keep without `damaged` blocks.

        A multiple of `alignment`, or `num_tokens` itself: from there every group can go on with
        the blocks that its table holds.
        """
        managers = self.coordinator.single_type_managers
        tables = self.coordinator.get_blocks(request_id)
        length = num_tokens
        while length > 0:
            shorter = length
            for manager, table in zip(managers, tables):
                first = max(manager.get_num_skipped_tokens(length), 0) // manager.block_size
                for index in range(first, cdiv(length, manager.block_size)):
                    if (
                        index >= len(table)
                        or table[index].is_null
                        or table[index].block_id in damaged
                    ):
                        shorter = min(shorter, index * manager.block_size)
                        break
            if shorter == length:
                return length
            # A window that is not intact at one length may be so at any shorter one.
            length = (length - 1) // alignment * alignment
            if all(manager.get_num_skipped_tokens(length) <= 0 for manager in managers):
                length = min(length, shorter // alignment * alignment)
        return 0

    def num_blocks_to_finish(self, request: KVCacheRequest) -> int:
        """Blocks that a request with a table still takes until its known tokens are computed."""
        length = min(request.num_tokens, self.max_model_len)
        return self.coordinator.get_num_blocks_to_allocate(
            request.request_id,
            length,
            self.empty_kv_cache_blocks.blocks,
            0,
            request.num_computed_tokens,
            length,
        )

    def num_blocks_held(self, request_id: str) -> int:
        """Blocks in a request's tables."""
        tables = self.coordinator.get_blocks(request_id)
        return sum(not block.is_null for table in tables for block in table)

    def pop_blocks_for_free(self, request: KVCacheRequest) -> list[KVCacheBlock]:
        """Forget a request but keep its blocks in use, for a step that may still write them.

        The caller later passes the reversed list to `block_pool.free_blocks`.
        """
        self._edges.pop(request.request_id, None)
        self._lookups.take(request.request_id)
        return self.coordinator.pop_blocks_for_free(request.request_id)

    def next_event_tokens(self, request_id: str) -> int:
        """The smallest number of slots at which a request's tables or hashes may change.

        Slots are computed, new and look-ahead tokens together. Below it `allocate_slots` for a
        running request would return no blocks and do nothing, so the call can be left out. 0 if the
        request must be looked at in any case.
        """
        edges = self._edges.get(request_id)
        return edges.event if edges is not None else 0

    def _record_lookup(
        self,
        request: KVCacheRequest,
        num_hit_tokens: int,
        hits: GroupBlocks,
        lookup: CacheHit | None,
    ) -> None:
        """Count a lookup when its request is admitted: before, it may be repeated any time."""
        stats = self.prefix_cache_stats
        if stats is None or not self.enable_caching or request.skip_reading_prefix_cache:
            return
        if num_hit_tokens and all(block.is_null for group in hits for block in group):
            stats.null_hits += num_hit_tokens
            num_hit_tokens = 0
        if lookup is not None:
            stats.lost_hits += lookup.lost
        stats.record(request.num_tokens, num_hit_tokens, request.num_preemptions > 0)
