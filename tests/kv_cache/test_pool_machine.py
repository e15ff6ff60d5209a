"""The pool under random operations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from jubako.kv_cache import BlockPool, KVCacheBlock

from .fakes import NIGHTLY, FakeRequest, request
from .invariants import EventReplay, check_pool

GROUPS = 2
NUM_BLOCKS = 14
# Two prompts with a common beginning, so that hashes meet.
PROMPTS = [list(range(24)), [*range(8), *range(100, 116)]]


class PoolMachine(RuleBasedStateMachine):
    """Tables here are plain lists: (prompt, group, blocks, how many are registered)."""

    unhashed_first = False

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(
            NUM_BLOCKS,
            True,
            4,
            enable_kv_cache_events=True,
            free_unhashed_first=self.unhashed_first,
        )
        self.requests: list[FakeRequest] = [request(str(i), p) for i, p in enumerate(PROMPTS)]
        self.tables: list[list] = []
        self.replay = EventReplay()

    def pick(self, number: int) -> list:
        return self.tables[number % len(self.tables)]

    @rule(prompt=st.sampled_from([0, 1]), group=st.sampled_from([0, 1]), n=st.integers(0, 4))
    def new_table(self, prompt: int, group: int, n: int) -> None:
        before = self.pool.free_block_queue.get_all_free_blocks()
        if n > len(before):
            with pytest.raises(ValueError, match=f"{n} KV blocks wanted, but {len(before)}"):
                self.pool.get_new_blocks(n)
            return
        blocks = self.pool.get_new_blocks(n)
        assert blocks == before[:n]
        self.tables.append([prompt, group, blocks, 0])

    @rule(prompt=st.sampled_from([0, 1]), group=st.sampled_from([0, 1]))
    def hit(self, prompt: int, group: int) -> None:
        (run,) = self.pool.get_cached_run(self.requests[prompt].block_hashes, 0, 6, [group])
        for block_hash, block in zip(self.requests[prompt].block_hashes, run):
            assert self.pool.get_cached_block(block_hash, [group]) == [block]
        self.pool.touch(run)
        self.tables.append([prompt, group, run, len(run)])

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99), n=st.integers(1, 4), nulls=st.booleans())
    def register(self, number: int, n: int, nulls: bool) -> None:
        row = self.pick(number)
        prompt, group, blocks, done = row
        stop = min(done + n, len(blocks))
        if nulls and done < stop and blocks[done].block_id:
            self.pool.free_blocks([blocks[done]])
            blocks[done] = self.pool.null_block
        self.pool.cache_full_blocks(self.requests[prompt], blocks, done, stop, 4, group)
        row[3] = stop

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99))
    def free(self, number: int) -> None:
        row = self.pick(number)
        self.tables.remove(row)
        before = self.queue()
        self.pool.free_blocks(reversed(row[2]))
        gone = [b for b in reversed(row[2]) if b.ref_cnt == 0 and not b.is_null]
        if self.unhashed_first:
            front = [b for b in gone if b.block_hash is None]
            back = [b for b in gone if b.block_hash is not None]
            assert self.queue() == front + before + back
        else:
            assert self.queue() == before + gone

    @precondition(lambda self: self.tables)
    @rule(number=st.integers(0, 99))
    def double_free(self, number: int) -> None:
        blocks = [b for b in self.pick(number)[2] if not b.is_null]
        if blocks:
            before = self.state()
            once_too_often = [*blocks, *[blocks[0]] * blocks[0].ref_cnt]
            with pytest.raises(AssertionError, match="released twice"):
                self.pool.free_blocks(once_too_often)
            assert self.state() == before

    @rule(ids=st.sets(st.integers(0, NUM_BLOCKS - 1), max_size=3))
    def evict(self, ids: set[int]) -> None:
        refs, queue = [b.ref_cnt for b in self.pool.blocks], self.queue()
        self.pool.evict_blocks(ids)
        assert all(self.pool.blocks[i].block_hash is None for i in ids)
        assert ([b.ref_cnt for b in self.pool.blocks], self.queue()) == (refs, queue)

    @rule()
    def reset(self) -> None:
        idle = not any(b.block_id for row in self.tables for b in row[2])
        before = self.state()
        assert self.pool.reset_prefix_cache() == idle
        if idle:
            assert len(self.pool.cached_block_hash_to_block) == 0
            assert self.state()[0] == before[0]
        else:
            assert self.state() == before

    def queue(self) -> list[KVCacheBlock]:
        return self.pool.free_block_queue.get_all_free_blocks()

    def state(self) -> tuple:
        return (
            [b.block_id for b in self.queue()],
            [(b.ref_cnt, b.block_hash) for b in self.pool.blocks],
            len(self.pool.kv_event_queue),
        )

    @invariant()
    def holds(self) -> None:
        owners = Counter(b.block_id for row in self.tables for b in row[2] if b.block_id)
        check_pool(self.pool, owners)
        self.replay.apply(self.pool.take_events())
        self.replay.check(self.pool)


class UnhashedFirstMachine(PoolMachine):
    unhashed_first = True


SIZE = settings(
    max_examples=400 if NIGHTLY else 40, stateful_step_count=100 if NIGHTLY else 40, deadline=None
)
TestPool = PoolMachine.TestCase
TestPool.settings = SIZE
TestPoolUnhashedFirst = UnhashedFirstMachine.TestCase
TestPoolUnhashedFirst.settings = SIZE
