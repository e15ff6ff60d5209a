"""Which blocks does a recurrent layer need? Only the state after the last token.

A block is one snapshot of the state, plus one for each drafted token. Three modes:

* none: a request has one block, overwritten in every step.
* all: kernels write a snapshot at every block border.
* align: a snapshot is written where a step ends. The running state sits at the index of the
  step's last token, its speculative blocks right behind; indices in between are null. The state
  that a step starts from stays until it has been copied forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from jubako.kv_cache.block_pool import BlockPool
from jubako.kv_cache.blocks import BlockHash, KVCacheBlock
from jubako.kv_cache.managers.base import (
    NO_BLOCKS,
    SingleTypeKVCacheManager,
    count_null,
    count_unowned,
)
from jubako.kv_cache.request import KVCacheRequest
from jubako.kv_cache.specs import KVCacheSpec, MambaSpec, cdiv


@dataclass(slots=True)
class _AlignState:
    """What align mode knows of a request beside its table."""

    allocated: bool = False
    """It has a running state of its own, with its speculative blocks."""
    step_end: int = 0
    """Tokens at the end of the last planned step, 0 if that has drafts."""
    step_end_blocks: set[int] = field(default_factory=set)
    """Indices, not yet registered, whose last token ended a step: their snapshot is what its hash
    says. Elsewhere a block holds the state after some earlier token."""
    unwritten: list[int] = field(default_factory=list)
    """Indices registered for steps that had not run when they were planned."""
    superseded: list[int] = field(default_factory=list)
    """Indices of states that steps started from, ascending, to be freed once copied forward."""


class MambaManager(SingleTypeKVCacheManager):
    supports_context_parallelism = False

    def __init__(self, kv_cache_spec: MambaSpec, *args: Any, **kwargs: Any) -> None:
        super().__init__(kv_cache_spec, *args, **kwargs)
        self.align = kv_cache_spec.mamba_cache_mode == "align"
        self.num_speculative_blocks = kv_cache_spec.num_speculative_blocks
        self.cached_blocks_this_step: set[int] = set()
        self._align: dict[str, _AlignState] = {}
        if self.align and self.enable_caching:
            # Elsewhere every block of a prefix has a state, or none is kept.
            self.block_pool.index_states(self.kv_cache_group_id)

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
        assert isinstance(kv_cache_spec, MambaSpec)
        block_size = kv_cache_spec.block_size
        stop = min(max_length // block_size, len(block_hashes))
        step = lcm(block_size, alignment_tokens) // block_size
        index = block_pool.last_cached_index(block_hashes, stop, step, kv_cache_group_ids)
        if index < 0:
            return tuple([] for _ in kv_cache_group_ids)
        found = block_pool.get_cached_block(block_hashes[index], kv_cache_group_ids)
        assert found is not None
        return tuple([block_pool.null_block] * index + [block] for block in found)

    def get_num_skipped_tokens(self, num_computed_tokens: int) -> int:
        return num_computed_tokens - 1

    def next_skip_tokens(self, num_computed_tokens: int) -> int:
        delay = self.num_speculative_blocks if self.align else 0
        skipped = max(self.get_num_skipped_tokens(num_computed_tokens - delay), 0)
        return (skipped // self.block_size + 1) * self.block_size + 1 + delay

    def new_step_starts(self) -> None:
        self.cached_blocks_this_step.clear()

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
        if new_computed_blocks and new_computed_blocks[-1].block_id in self.cached_blocks_this_step:
            # The step that writes this state has not run; no pool is large enough to go on now.
            return self.block_pool.num_gpu_blocks + 1
        if not self.align:
            return super().get_num_blocks_to_allocate(
                request_id,
                num_tokens + self.block_size * self.num_speculative_blocks,
                new_computed_blocks,
                total_computed_tokens,
                num_tokens_main_model,
                apply_admission_cap,
            )
        table = self.req_to_blocks.get(request_id, NO_BLOCKS)
        length = len(table) + len(new_computed_blocks)
        revived = external = 0
        if request_id in self.num_cached_block:
            assert not new_computed_blocks, f"prefix hits for the running request {request_id}"
        elif not table:
            skipped = max(total_computed_tokens - 1, 0) // self.block_size
            held = new_computed_blocks[skipped:]
            revived = count_unowned(held) + count_null(held)
            if cdiv(total_computed_tokens, self.block_size) > length:
                # A connector brings the state at the end of the computed tokens.
                external = 1
                length = cdiv(total_computed_tokens, self.block_size)
        required = cdiv(num_tokens_main_model, self.block_size) + self.num_speculative_blocks
        state = self._align.get(request_id)
        most = 1 if state is not None and state.allocated else 1 + self.num_speculative_blocks
        return revived + external + max(min(required - length, most), 0)

    def allocate_new_blocks(
        self, request_id: str, num_tokens: int, num_tokens_main_model: int
    ) -> Sequence[KVCacheBlock]:
        speculative = self.num_speculative_blocks
        if not self.align:
            return super().allocate_new_blocks(
                request_id, num_tokens + self.block_size * speculative, num_tokens_main_model
            )
        state = self._align.setdefault(request_id, _AlignState())
        self._note_step_end(state, num_tokens_main_model)
        table = self.req_to_blocks.setdefault(request_id, [])
        length = len(table)
        required = cdiv(num_tokens_main_model, self.block_size) + speculative
        if required <= length:
            return NO_BLOCKS
        running = required - speculative - 1
        # A state at the same index is overwritten in place; one before it is copied forward.
        source = length - 1 - speculative if state.allocated else length - 1
        if 0 <= source < running:
            state.superseded.append(source)
        table += [self._null_block] * (running - length)
        if state.allocated:
            for index in range(length - speculative, min(length, running)):
                table.append(table[index])
                table[index] = self._null_block
        table += self.block_pool.get_new_blocks(required - len(table))
        state.allocated = True
        return table[length:]

    # Registering

    def cache_blocks(self, request: KVCacheRequest, num_tokens: int) -> None:
        super().cache_blocks(request, num_tokens)
        state = self._align.get(request.request_id)
        if state is not None and num_tokens != state.step_end:
            # The step has drafts: where it really ends is not known, and its states are spread
            # over the speculative blocks.
            state.step_end = 0

    def _note_step_end(self, state: _AlignState, num_tokens: int) -> None:
        state.step_end = num_tokens
        # With drafts the end is known only once they are accepted: `cache_blocks` decides.
        if not self.num_speculative_blocks and num_tokens % self.block_size == 0:
            state.step_end_blocks.add(num_tokens // self.block_size - 1)

    def _register(self, request: KVCacheRequest, start: int, stop: int) -> None:
        table = self.req_to_blocks[request.request_id]
        if not self.align:
            super()._register(request, start, stop)
            registered: Sequence[int] = range(start, stop)
        else:
            state = self._align[request.request_id]
            if self.num_speculative_blocks and stop * self.block_size == state.step_end:
                state.step_end_blocks.add(stop - 1)
            registered = sorted(i for i in state.step_end_blocks if start <= i < stop)
            state.step_end_blocks = {i for i in state.step_end_blocks if i >= stop}
            state.unwritten += registered
            for index in registered:
                super()._register(request, index, index + 1)
        self.cached_blocks_this_step.update(
            table[index].block_id for index in registered if not table[index].is_null
        )

    # Letting go

    def remove_skipped_blocks(self, request_id: str, total_computed_tokens: int) -> None:
        if not self.align:
            super().remove_skipped_blocks(request_id, total_computed_tokens)
            return
        # Tokens of the last step may be drafts that are still rejected.
        settled = total_computed_tokens - self.num_speculative_blocks
        super().remove_skipped_blocks(request_id, settled)
        state = self._align.get(request_id)
        if state is None:
            return
        self._forget_unwritten(request_id, state, total_computed_tokens // self.block_size)
        table = self.req_to_blocks[request_id]
        done = [i for i in state.superseded if i < cdiv(settled, self.block_size) - 1]
        if done:
            state.superseded = state.superseded[len(done) :]
            released = [table[i] for i in reversed(done)]
            for index in done:
                table[index] = self._null_block
            self.block_pool.free_blocks(released)

    def _forget_unwritten(self, request_id: str, state: _AlignState, written: int) -> None:
        """Steps planned beyond the first `written` blocks have failed, or are planned anew."""
        state.step_end_blocks = {i for i in state.step_end_blocks if i < written}
        for index in state.unwritten:
            block = self.req_to_blocks[request_id][index]
            if index >= written and not block.is_null:
                self.block_pool.evict_blocks((block.block_id,))
                registered = self.num_cached_block[request_id]
                self.num_cached_block[request_id] = min(registered, index)
        state.unwritten.clear()

    def pop_blocks_for_free(self, request_id: str) -> list[KVCacheBlock]:
        self._align.pop(request_id, None)
        return super().pop_blocks_for_free(request_id)

    # When is the next call due?

    def next_edges(self, request_id: str, num_computed_tokens: int) -> tuple[int, int]:
        event, hash_ = super().next_edges(request_id, num_computed_tokens)
        state = self._align.get(request_id)
        if state is not None and state.superseded:
            settled = (state.superseded[0] + 1) * self.block_size + 1
            event = min(event, settled + self.num_speculative_blocks + 1)
        return event, hash_

    def _next_allocation_tokens(self, table: Sequence[KVCacheBlock]) -> int:
        return (len(table) - self.num_speculative_blocks) * self.block_size + 1
