"""What do all attention types share in keeping one group's block tables?

A manager knows which entries of a request's table are needed; it decides nothing about other
groups. Tables are only ever appended to; an entry keeps its block or becomes null.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.errors import ImpossibleCacheError
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.specs import KVCacheSpec, cdiv

NEVER = sys.maxsize
"""A token count that no request reaches."""

NO_BLOCKS: tuple[KVCacheBlock, ...] = ()


class SingleTypeKVCacheManager(ABC):
    """The tables of one group. `block_size` is in tokens, over all context-parallel ranks."""

    supports_context_parallelism = True

    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        block_pool: BlockPool,
        enable_caching: bool,
        kv_cache_group_id: int,
        dcp_world_size: int = 1,
        pcp_world_size: int = 1,
        *,
        max_admission_blocks_per_request: int | None = None,
    ) -> None:
        ranks = dcp_world_size * pcp_world_size
        if ranks != 1 and not self.supports_context_parallelism:
            raise ImpossibleCacheError(
                f"{type(kv_cache_spec).__name__} layers do not support context parallelism: "
                f"decode_context_parallel_size {dcp_world_size}, "
                f"prefill_context_parallel_size {pcp_world_size}; set both to 1",
                "decode_context_parallel_size",
            )
        self.kv_cache_spec = kv_cache_spec
        self.block_pool = block_pool
        self.enable_caching = enable_caching
        self.kv_cache_group_id = kv_cache_group_id
        self.block_size = kv_cache_spec.block_size * ranks
        self.max_admission_blocks_per_request = max_admission_blocks_per_request
        self._null_block = block_pool.null_block

        self.req_to_blocks: dict[str, list[KVCacheBlock]] = {}
        self.num_cached_block: dict[str, int] = {}
        """Table entries already registered, or known to need no registering."""
        self._reregister_until: dict[str, int] = {}
        """Up to where a table may hold registered entries behind others that are not."""
        self.num_table_changes = 0
        """Rises when a table begins, takes hits or ends: what tables share is as it was before."""
        self.has_detached_tables = False
        """A table was handed over: its blocks lose an owner at a time that nobody here sees."""
        self._began_with_hits: set[str] = set()
        """Requests whose tables may hold blocks that another request registered."""

    # What an attention type decides

    @classmethod
    @abstractmethod
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
        """The longest prefix, at most `max_length` tokens and a multiple of `alignment_tokens`,
        from which a request can go on: equally long lists of blocks, one for each group.

        `block_hashes` are those of the spec's block size. With `use_eagle` the last matched block
        is dropped, since the drafter needs the hidden states that computing it gives.
        """

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        """Leading tokens that the next token, and all later ones, do not read."""
        return 0

    def next_skip_tokens(self, num_computed_tokens: int) -> int:
        """The smallest count of computed tokens at which more blocks are skipped than now."""
        return NEVER

    def get_num_common_prefix_blocks(self, running_request_id: str) -> int:
        """Leading blocks that all requests of this group share."""
        return 0

    def new_step_starts(self) -> None:  # noqa: B027  # only some types care
        """The scheduler begins to plan another step."""

    # Counting and taking blocks

    def get_num_blocks_to_allocate(
        self,
        request_id: str,
        num_tokens: int,
        new_computed_blocks: Sequence[KVCacheBlock],
        total_computed_tokens: int,
        num_tokens_main_model: int,
        apply_admission_cap: bool = False,
    ) -> int:
        """Free blocks that the allocation of `num_tokens` tokens will take.

        Free blocks among the hits count: taking them into use shrinks the queue as well.
        `apply_admission_cap` asks for the most that the request will hold at once instead.
        """
        required = -(-num_tokens // self.block_size)
        table = self.req_to_blocks.get(request_id, NO_BLOCKS)
        cap = self.max_admission_blocks_per_request if apply_admission_cap else None
        if request_id in self.num_cached_block:
            assert not new_computed_blocks, f"prefix hits for the running request {request_id}"
            if cap is None:
                missing = required - len(table)
                return missing if missing > 0 else 0
        skipped = max(self.get_num_skipped_tokens(total_computed_tokens), 0) // self.block_size
        held = new_computed_blocks[max(skipped - len(table), 0) :]
        if cap is not None:
            # Null entries cost nothing, so the cap is for real blocks only.
            real = sum(not block.is_null for block in (*table[skipped:], *held))
            return max(min(required - skipped, cap) - real, 0) + count_unowned(held)
        present = max(skipped, len(table) + len(new_computed_blocks))
        return max(required - present, 0) + count_unowned(held) + count_null(held)

    def add_local_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> bool:
        """Begin the table of a new request with its hits; False for a running request.

        Null hits that the request will read are gaps, which a connector fills. No block is taken
        from the queue: all groups must own their hits before any group does that.
        """
        if request_id in self.num_cached_block:
            assert not new_computed_blocks, f"prefix hits for the running request {request_id}"
            return False
        assert not self.req_to_blocks.get(request_id), f"{request_id} already has a table"
        total = num_local_computed_tokens + num_external_computed_tokens
        skipped = max(self.get_num_skipped_tokens(total), 0) // self.block_size
        held = list(new_computed_blocks[skipped:])
        if held:
            assert self.enable_caching or count_null(held) == len(held), (
                "prefix hits although prefix caching is off"
            )
            self.block_pool.touch(held)
        table = [self._null_block] * skipped + held
        self.begin_table(request_id, table)
        self.num_cached_block[request_id] = len(table)
        return True

    def begin_table(self, request_id: str, table: list[KVCacheBlock]) -> None:
        """The table of a request that had none, with the hits that it owns."""
        assert not self.req_to_blocks.get(request_id), f"{request_id} already has a table"
        self.num_table_changes += 1
        self.req_to_blocks[request_id] = table
        if table:
            self.num_cached_block[request_id] = len(table)
            self._began_with_hits.add(request_id)

    def allocate_external_computed_blocks(
        self, request_id: str, num_local_computed_tokens: int, num_external_computed_tokens: int
    ) -> None:
        """Take blocks for the tokens that a connector brings, as far as they are still read."""
        if num_external_computed_tokens > 0:
            total = num_local_computed_tokens + num_external_computed_tokens
            table = self.req_to_blocks[request_id]
            skipped = max(self.get_num_skipped_tokens(total), 0)
            first = skipped // self.block_size
            gaps = [i for i in range(first, len(table)) if table[i].is_null]
            if gaps:
                # Even one that holds nothing to read: the next tokens are written into it.
                for index, block in zip(gaps, self.block_pool.get_new_blocks(len(gaps))):
                    table[index] = block
                self.num_cached_block[request_id] = gaps[0]
                self._reregister_until[request_id] = len(table)
            if first and skipped >= total:
                # None of them is read again: the block that they end in comes with the next token.
                return
            missing = cdiv(total, self.block_size) - len(table)
            if missing > 0:
                table += self.block_pool.get_new_blocks(missing)

    def allocate_new_computed_blocks(
        self,
        request_id: str,
        new_computed_blocks: Sequence[KVCacheBlock],
        num_local_computed_tokens: int,
        num_external_computed_tokens: int,
    ) -> None:
        """Both of the above, for a model with one group."""
        counts = num_local_computed_tokens, num_external_computed_tokens
        if self.add_local_computed_blocks(request_id, new_computed_blocks, *counts):
            self.allocate_external_computed_blocks(request_id, *counts)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Sequence[KVCacheBlock]:
        """Lengthen the table to `num_tokens` tokens and return what was added."""
        table = self.req_to_blocks.get(request_id)
        missing = -(-num_tokens // self.block_size) - (len(table) if table else 0)
        if missing <= 0:
            return NO_BLOCKS
        new_blocks = self.block_pool.get_new_blocks(missing)
        if table is None:
            self.num_table_changes += 1
            self.req_to_blocks[request_id] = list(new_blocks)
        else:
            table += new_blocks
        return new_blocks

    # Registering

    def cache_blocks(self, request: KVCacheRequest, num_tokens: int) -> None:
        """Make the blocks that the first `num_tokens` tokens fill findable."""
        request_id = request.request_id
        registered = self.num_cached_block.get(request_id, 0)
        full = num_tokens // self.block_size
        if full > registered:
            held = len(self.req_to_blocks.get(request_id, NO_BLOCKS))
            assert full <= held, f"{request_id} has {held} KV blocks, {full} are to be registered"
            self._register(request, registered, full)
            self.num_cached_block[request_id] = full

    def _register(self, request: KVCacheRequest, start: int, stop: int) -> None:
        request_id = request.request_id
        until = self._reregister_until.get(request_id, 0)
        self.block_pool.cache_full_blocks(
            request,
            self.req_to_blocks[request_id],
            start,
            stop,
            self.block_size,
            self.kv_cache_group_id,
            skip_hashed=start < until,
        )
        if until and stop >= until:
            del self._reregister_until[request_id]

    def has_unregistered_gaps(self, request_id: str) -> bool:
        """Whether its table has entries to register in front of others that are registered."""
        return request_id in self._reregister_until

    def forget_registered(self, blocks: Sequence[KVCacheBlock]) -> set[str]:
        """These blocks became unfindable while in use: their requests shall register them again.

        Returns the ids of those requests.
        """
        affected: dict[str, int] = {}
        for block in blocks:
            for request_id in self._holders_of(block):
                lowest = affected.get(request_id, block.table_index)
                affected[request_id] = min(lowest, block.table_index)
        for request_id, index in affected.items():
            registered = self.num_cached_block.get(request_id, 0)
            if index < registered:
                self.num_cached_block[request_id] = index
                until = self._reregister_until.get(request_id, 0)
                self._reregister_until[request_id] = max(registered, until)
        return set(affected)

    def _holders_of(self, block: KVCacheBlock) -> list[str]:
        """The requests that have `block` in their tables: who registered it, and who hit it."""
        holders: list[str] = []
        if self._holds(block.registered_by, block):
            holders.append(block.registered_by)
        if block.ref_cnt > len(holders):
            holders += [
                request_id
                for request_id in self._began_with_hits
                if request_id != block.registered_by and self._holds(request_id, block)
            ]
        return holders

    def _holds(self, request_id: str, block: KVCacheBlock) -> bool:
        table = self.req_to_blocks.get(request_id, NO_BLOCKS)
        index = block.table_index
        return index < len(table) and table[index] is block

    # Letting go

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        """Free the blocks that no later token reads, deepest first."""
        skipped = self.get_num_skipped_tokens(total_computed_tokens)
        if skipped <= 0:
            return
        table = self.req_to_blocks.get(request_id)
        if not table:
            return
        removed = []
        for index in range(min(skipped // self.block_size, len(table)) - 1, -1, -1):
            block = table[index]
            # Everything before a null entry went earlier.
            if block.is_null:
                break
            removed.append(block)
            table[index] = self._null_block
        if removed:
            self.block_pool.free_blocks(removed)

    def truncate(self, request_id: str, num_tokens: int) -> None:
        """Free the blocks that hold none of the first `num_tokens` tokens, deepest first."""
        table = self.req_to_blocks.get(request_id)
        if table is None:
            return
        kept = cdiv(num_tokens, self.block_size)
        removed = table[kept:]
        del table[kept:]
        self.num_table_changes += 1
        full = num_tokens // self.block_size
        if self.num_cached_block.get(request_id, 0) > full:
            self.num_cached_block[request_id] = full
        if self._reregister_until.get(request_id, 0) > full:
            self._reregister_until[request_id] = full
        if kept > full and kept <= len(table) and table[full].block_hash is not None:
            # Cut off half way: it will hold the same again, and is registered for it already.
            self._reregister_until[request_id] = kept
        self.block_pool.free_blocks(reversed(removed))

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        """Forget the request and hand its table over: the caller frees it, reversed."""
        self.num_cached_block.pop(request_id, None)
        self._reregister_until.pop(request_id, None)
        self._began_with_hits.discard(request_id)
        self.num_table_changes += 1
        return self.req_to_blocks.pop(request_id, [])

    def free(self, request_id: str) -> None:
        """Forget the request and free its table, deepest first. Unknown requests are ignored."""
        self.block_pool.free_blocks(reversed(self.pop_blocks_for_free(request_id)))

    # When is the next call due?

    def next_event_tokens(self, request_id: str, num_computed_tokens: int) -> int:
        """The smallest number of slots at which this group allocates, drops or registers a block.

        `num_computed_tokens` are those that `remove_skipped_blocks` has already seen.
        """
        return min(self.next_edges(request_id, num_computed_tokens))

    def next_edges(self, request_id: str, num_computed_tokens: int) -> tuple[int, int]:
        """The smallest number of slots at which this group allocates or drops a block, and the
        smallest number of known tokens at which it registers one."""
        table = self.req_to_blocks.get(request_id, NO_BLOCKS)
        event = self._next_allocation_tokens(table)
        # A step has at least one new token beyond those computed.
        skip = self.next_skip_tokens(num_computed_tokens) + 1
        hash_ = self.next_hash_tokens(request_id) if self.enable_caching else NEVER
        return (event if event < skip else skip), hash_

    def next_hash_tokens(self, request_id: str) -> int:
        """The smallest number of known tokens at which a block is registered."""
        return (self.num_cached_block.get(request_id, 0) + 1) * self.block_size

    def _next_allocation_tokens(self, table: Sequence[KVCacheBlock]) -> int:
        return len(table) * self.block_size + 1


def count_unowned(blocks: Sequence[KVCacheBlock]) -> int:
    """How many of `blocks` leave the free queue when they get an owner."""
    return len([1 for block in blocks if block.ref_cnt == 0 and not block.is_null])


def count_null(blocks: Sequence[KVCacheBlock]) -> int:
    """How many of `blocks` are null."""
    return len([1 for block in blocks if block.is_null])


def align_down(num_blocks: int, block_size: int, alignment_tokens: int) -> int:
    """The largest number of blocks, up to `num_blocks`, whose tokens are a multiple."""
    while num_blocks * block_size % alignment_tokens:
        num_blocks -= 1
    return num_blocks
