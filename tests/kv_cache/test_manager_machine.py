"""The manager under random operations, with the memory that it manages played along.

A step is planned request by request, then runs as a whole. The shadow memory tells whether every
request finds, wherever it reads, the KV that it would have computed itself.
"""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass, field
from math import lcm
from random import Random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from jubako.kv_cache import (
    CrossAttentionSpec,
    KVCacheBlock,
    KVCacheBlocks,
    KVCacheManager,
    KVCacheSpec,
    MambaSpec,
)
from jubako.kv_cache.managers import FullAttentionManager
from jubako.kv_cache.specs import cdiv

from .fakes import (
    NIGHTLY,
    FakeRequest,
    chunked,
    cross,
    engine_config,
    full,
    make_manager,
    mamba,
    queue,
    request,
    sink,
    window,
)
from .invariants import EventReplay, check_pool, check_tables, owners_of, snapshot
from .lookup import needed_blocks, oracle
from .shadow import Part, ShadowMemory, contents

LIMIT = 64
BUDGET = 12
ENCODER_TOKENS = 10
WANTED_OPERATIONS = 200_000 if NIGHTLY else 5_000

operations: Counter[str] = Counter()
"""Checked operations, by machine."""
LOGGER = logging.getLogger("jubako.kv_cache.block_pool")

PROMPTS = [list(range(LIMIT)), [*range(16), *range(100, 148)]]


@pytest.fixture(scope="module", autouse=True)
def no_warnings():
    """A refused reset of the prefix cache is a daily matter here."""
    level = LOGGER.level
    LOGGER.setLevel(logging.ERROR)
    yield
    LOGGER.setLevel(level)


@dataclass(eq=False)
class Live:
    """A request and where the scheduler has it."""

    req: FakeRequest
    source: list[int]
    drafts: list[int] = field(default_factory=list)
    part: Part | None = None
    loading: bool = False
    floor: list[int] = field(default_factory=list)
    failures: int = 0

    @property
    def running(self) -> bool:
        return not self.req.awaits_admission


class ManagerMachine(RuleBasedStateMachine):
    specs: tuple[KVCacheSpec, ...] = (full(),)
    dcp = 1
    """Ranks among which a block is divided; the block sizes of `specs` are those of all ranks."""
    hash_block_size = 4
    caching = True
    use_eagle = False
    drafts_allowed = True
    external_allowed = True
    interleaved = True

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[str, Live] = {}
        self.detached: list[list[KVCacheBlock]] = []

    @initialize(num_blocks=st.sampled_from([20, 28, 44]), watermark=st.sampled_from([0, 0, 0.15]))
    def start(self, num_blocks: int, watermark: float) -> None:
        self.num_blocks = num_blocks
        self.m: KVCacheManager = make_manager(
            *(spec.copy_with_new_block_size(spec.block_size // self.dcp) for spec in self.specs),
            dcp_world_size=self.dcp,
            watermark=watermark,
            num_blocks=num_blocks,
            max_model_len=LIMIT,
            hash_block_size=self.hash_block_size,
            enable_caching=self.caching,
            use_eagle=self.use_eagle,
            log_stats=True,
            enable_kv_cache_events=True,
            max_num_batched_tokens=BUDGET,
            interleaved_free=self.interleaved,
        )
        self.count = 0
        self.replay = EventReplay()
        self.shadow = ShadowMemory(self.specs)
        self.evicted = False
        self.cross = [isinstance(spec, CrossAttentionSpec) for spec in self.specs]
        self.num_encoder_tokens = ENCODER_TOKENS if any(self.cross) else 0
        config = engine_config(
            max_model_len=LIMIT,
            max_num_encoder_input_tokens=ENCODER_TOKENS,
            max_num_batched_tokens=BUDGET,
            mamba_cache_mode=next(
                (s.mamba_cache_mode for s in self.specs if isinstance(s, MambaSpec)), "none"
            ),
        )
        self.most = [
            cdiv(spec.max_memory_usage_bytes(config), spec.page_size_bytes) for spec in self.specs
        ]
        self.recurrent = any(isinstance(spec, MambaSpec) for spec in self.specs)
        self.sinks = [
            b.block_id
            for manager in self.m.coordinator.single_type_managers
            for b in getattr(manager, "sink_blocks", ())
        ]

    # Requests in a state, by number

    def choose(self, number: int, **states: bool) -> Live | None:
        fits = [
            r
            for r in self.live.values()
            if all(bool(getattr(r, k)) == v for k, v in states.items())
        ]
        return fits[number % len(fits)] if fits else None

    # Rules

    @precondition(lambda self: len(self.live) < 8)
    @rule(
        prompt=st.integers(0, 1),
        shared=st.sampled_from([0, 3, 5, 8, 13, 16, 24, 30, 32, 50]),
        own=st.integers(0, 12),
        salt=st.sampled_from([None, None, None, "salt"]),
    )
    def add(self, prompt: int, shared: int, own: int, salt: str | None) -> None:
        self.count += 1
        tokens = PROMPTS[prompt][:shared] + [1000 + self.count] * own or [7]
        req = request(
            f"r{self.count}", tokens, cache_salt=salt, hash_block_size=self.hash_block_size
        )
        self.live[req.request_id] = Live(req, PROMPTS[prompt])

    @precondition(lambda self: self.choose(0, running=False, loading=False))
    @rule(
        number=st.integers(0, 7),
        n=st.sampled_from([1, 3, 4, 8, 11, 12]),
        external=st.integers(-30, 30),
        load_async=st.booleans(),
        delay=st.booleans(),
        whole=st.booleans(),
        reserved=st.sampled_from([0, 0, 0, 2, 5]),
        alone=st.booleans(),
        by_group=st.booleans(),
    )
    def admit(
        self,
        number: int,
        n: int,
        external: int,
        load_async: bool,
        delay: bool,
        whole: bool,
        reserved: int = 0,
        alone: bool = False,
        by_group: bool = False,
    ) -> None:
        r = self.choose(number, running=False, loading=False)
        req = r.req
        assert req.num_computed_tokens == 0
        blocks, hit = self.checked_lookup(req)
        external = min(max(external, 0), req.num_tokens - 1 - hit) if self.external_allowed else 0
        load_async = load_async and external > 0
        n = 0 if load_async else min(n, req.num_tokens - hit - external)
        if by_group and external:
            # Each group begins with what it has; the connector brings what is missing in between.
            local = self.m.get_local_blocks(req)
            blocks = KVCacheBlocks(tuple(group.entries(hit + external) for group in local))
        self.checked_allocate(
            r,
            n,
            hit,
            blocks,
            external,
            load_async or (delay and external),
            0,
            num_encoder_tokens=self.num_encoder_tokens,
            full_sequence_must_fit=whole,
            reserved_blocks=reserved,
            has_scheduled_reqs=not alone,
        )
        if load_async and r.running:
            r.loading = True

    @precondition(lambda self: self.choose(0, running=True, part=False, loading=False))
    @rule(
        number=st.integers(0, 7),
        n=st.sampled_from([1, 3, 4, 8, 11, 12]),
        drafts=st.integers(0, 3),
        lookahead=st.integers(0, 3),
        reserved=st.sampled_from([0, 0, 0, 0, 3]),
    )
    def go_on(self, number: int, n: int, drafts: int, lookahead: int, reserved: int = 0) -> None:
        r = self.choose(number, running=True, part=False, loading=False)
        req = r.req
        open_tokens = req.num_tokens - req.num_computed_tokens
        n = min(n, open_tokens)
        if n == open_tokens == 1 and self.drafts_allowed:
            r.drafts = [
                self.next_token(r, req.num_tokens + i)
                for i in range(min(drafts, LIMIT - 1 - req.num_tokens))
            ]
            n += len(r.drafts)
        else:
            lookahead = 0
        self.checked_allocate(r, n, 0, None, 0, False, lookahead, reserved_blocks=reserved)

    @precondition(lambda self: self.choose(0, part=True, drafts=False))
    @rule(number=st.integers(0, 7), more=st.sampled_from([1, 2, 4, 7]))
    def extend(self, number: int, more: int) -> None:
        """Tokens of the step that nobody else wanted."""
        r = self.choose(number, part=True, drafts=False)
        part, req = r.part, r.req
        more = min(more, req.num_tokens - part.stop, BUDGET - (part.stop - part.computed))
        if more > 0 and not part.delayed:
            req.num_computed_tokens = part.computed
            r.part = None
            # The state that was planned first is in the way for a while.
            r.failures += self.recurrent
            if self.checked_allocate(r, part.stop + more - part.computed, 0, None, 0, False, 0):
                r.part.start, r.part.loaded = part.start, part.loaded
            else:
                r.part = part
                req.num_computed_tokens = part.stop

    @precondition(lambda self: self.choose(0, part=True) or self.choose(0, loading=True))
    @rule(accepted=st.integers(0, 3))
    def run_step(self, accepted: int) -> None:
        parts = [r for r in self.live.values() if r.part]
        self.shadow.run([r.part for r in parts])
        for r in parts:
            self.settle(r, accepted)
        self.start_step()

    @precondition(lambda self: self.choose(0, part=True))
    @rule()
    def fail_step(self) -> None:
        """What the step would have written is missing."""
        self.m.evict_blocks(self.m.take_registered_block_ids())
        self.evicted = True
        for r in list(self.live.values()):
            if r.part:
                r.req.num_computed_tokens = r.part.start
                r.failures += 1
                if r.part.start < r.part.computed or self.recurrent:
                    # Its hits may be among what is missing, or its states are moved already.
                    self.preempt_now(r)
                r.part = None
            elif r.loading:
                self.preempt_now(r)
        self.start_step()

    @precondition(lambda self: self.choose(0, running=True, part=False))
    @rule(number=st.integers(0, 7), later=st.booleans())
    def finish(self, number: int, later: bool) -> None:
        r = self.choose(number, running=True, part=False)
        self.release(r, later)
        del self.live[r.req.request_id]

    @precondition(lambda self: self.choose(0, running=True, loading=False))
    @rule(number=st.integers(0, 7))
    def preempt(self, number: int) -> None:
        r = self.choose(number, running=True, loading=False)
        if r.part:
            # Requests admitted since may have hit what it will not compute.
            for other in self.live.values():
                new = other.part and other.part.start == 0
                if other is not r and (new or other.loading):
                    self.m.evict_uncomputed_blocks(other.req.request_id, 0)
                    self.preempt_now(other)
            self.m.evict_uncomputed_blocks(r.req.request_id, r.part.start)
            self.evicted = True
        self.preempt_now(r)

    @precondition(lambda self: self.detached)
    @rule()
    def free_detached(self) -> None:
        self.m.block_pool.free_blocks(reversed(self.detached.pop()))

    @rule(ids=st.sets(st.integers(0, 19), max_size=2))
    def evict(self, ids: set[int]) -> None:
        self.evicted |= any(self.m.block_pool.blocks[i].ref_cnt for i in ids)
        self.m.evict_blocks(ids)

    @rule()
    def reset(self) -> None:
        before = snapshot(self.m)
        idle = not owners_of(self.m, self.detached)
        assert self.m.reset_prefix_cache() == idle
        if idle:
            assert all(b.block_hash is None for b in self.m.block_pool.blocks)
        else:
            assert snapshot(self.m) == before

    @rule(seed=st.integers(0, 2**20))
    def traffic(self, seed: int) -> None:
        """A few steps of a busy scheduler, so that runs get deep."""
        rng = Random(seed)
        sizes = [1, 3, 4, 8, 12, 12]
        for _ in range(rng.randint(1, 6)):
            while len(self.live) < 6 and rng.random() < 0.5:
                shared = rng.choice([3, 8, 13, 16, 24, 32])
                self.add(rng.randint(0, 1), shared, rng.randint(0, 9), rng.choice([None, "salt"]))
            self.plan_running(rng, sizes)
            self.holds()
            for number in range(3):
                if rng.random() < 0.7 and self.choose(0, running=False, loading=False):
                    external = rng.choice([-1, -1, 4, 9])
                    flags = [rng.random() < 0.3 for _ in range(3)]
                    self.admit(number, rng.choice(sizes), external, *flags)
            self.holds()
            if rng.random() < 0.4 and self.choose(0, part=True, drafts=False):
                self.extend(rng.randint(0, 7), rng.choice(sizes))
                self.holds()
            if self.choose(0, part=True) or self.choose(0, loading=True):
                self.run_step(rng.randint(0, 3))
            if rng.random() < 0.15 and self.choose(0, running=True, part=False):
                self.finish(rng.randint(0, 7), False)
            self.holds()

    def plan_running(self, rng: Random, sizes: list[int]) -> None:
        while r := self.choose(0, running=True, part=False, loading=False):
            self.go_on(0, rng.choice(sizes), rng.randint(0, 3), rng.randint(0, 3))
            if r.part is None:
                # It does not fit: the last one makes room, if need be the request itself.
                fits = [r for r in self.live.values() if r.running and not r.loading]
                victim = fits[-1]
                self.preempt(fits.index(victim))
                if victim.part is None and victim is r:
                    return

    # Steps of rules

    def next_token(self, r: Live, position: int) -> int:
        return r.source[position] if r.req.num_tokens <= 40 else 2000 + position

    def start_step(self) -> None:
        for r in list(self.live.values()):
            if r.loading:
                # The connector has filled its blocks since.
                self.shadow.load(r.part_loading)
                self.cache_late(r.req, r.req.num_computed_tokens)
                r.loading = False
        self.m.new_step_starts()
        self.m.take_registered_block_ids()

    def cache_late(self, req: FakeRequest, num_tokens: int) -> None:
        self.m.cache_blocks(req, num_tokens)
        req.num_registered_tokens = max(req.num_registered_tokens, num_tokens)

    def settle(self, r: Live, accepted: int) -> None:
        req, part = r.req, r.part
        r.part = None
        if part.delayed:
            self.cache_late(req, min(part.stop, req.num_tokens))
        if part.stop >= req.num_tokens:
            accepted = min(accepted, len(r.drafts))
            req.num_computed_tokens -= len(r.drafts) - accepted
            sampled = self.next_token(r, req.num_tokens + accepted)
            req.extend([*r.drafts[:accepted], sampled])
        r.drafts = []
        if req.num_tokens >= LIMIT - 2:
            self.release(r, False)
            del self.live[req.request_id]

    def preempt_now(self, r: Live) -> None:
        self.release(r, False)
        r.part, r.loading, r.drafts, r.floor, r.failures = None, False, [], [], 0
        r.req.num_computed_tokens = r.req.num_registered_tokens = 0
        r.req.num_preemptions += 1
        r.req.awaits_admission = True

    def release(self, r: Live, later: bool) -> None:
        m, request_id = self.m, r.req.request_id
        tables = m.coordinator.get_blocks(request_id)
        tables = [list(row) for row in tables]
        before = queue(m)
        if later:
            self.detached.append(m.pop_blocks_for_free(r.req))
            assert queue(m) == before
        else:
            m.free(r.req)
            after = queue(m)
            assert after[: len(before)] == before
            position = {block_id: i for i, block_id in enumerate(after)}
            for row in tables:
                gone = [position[b.block_id] for b in row if b.block_id and b.ref_cnt == 0]
                assert gone == sorted(gone, reverse=True)
        for manager in m.coordinator.single_type_managers:
            assert request_id not in manager.req_to_blocks
            assert request_id not in manager.num_cached_block
            assert request_id not in getattr(manager, "_align", ())
        assert m.next_event_tokens(request_id) == 0

    def checked_lookup(self, req: FakeRequest):
        m = self.m
        before = snapshot(m)
        blocks, hit = m.get_computed_blocks(req)
        # Once from memory, once without.
        again = m.get_computed_blocks(req)
        assert (again[0].get_block_ids(), again[1]) == (blocks.get_block_ids(), hit)
        m.block_pool.lookup_memory.clear()
        again = m.get_computed_blocks(req)
        assert (again[0].get_block_ids(), again[1]) == (blocks.get_block_ids(), hit)
        assert snapshot(m) == before
        if not self.caching:
            assert hit == 0
            return blocks, hit
        keys = m.block_pool.cached_block_hash_to_block
        cached = []
        for group, spec in enumerate(self.specs):
            scale = spec.block_size // self.hash_block_size
            suffix = group.to_bytes(4, "big")
            hashes = req.block_hashes[scale - 1 :: scale]
            cached.append({i for i, h in enumerate(hashes) if h + suffix in keys})
        eagle = range(len(self.specs)) if self.use_eagle else ()
        assert hit == oracle(self.specs, cached, req.num_tokens - 1, eagle)
        assert hit <= req.num_tokens - 1
        assert hit % lcm(*(spec.block_size for spec in self.specs)) == 0
        for group, (spec, row) in enumerate(zip(self.specs, blocks.blocks)):
            assert len(row) * spec.block_size == hit or not hit
            needed = set(needed_blocks(spec, hit))
            scale = spec.block_size // self.hash_block_size
            for index, block in enumerate(row):
                if block.is_null:
                    assert index not in needed
                else:
                    own = req.block_hashes[(index + 1) * scale - 1]
                    assert block.block_hash == own + group.to_bytes(4, "big")
        return blocks, hit

    def checked_allocate(
        self,
        r,
        n,
        hit,
        blocks,
        external,
        delay,
        lookahead,
        num_encoder_tokens=0,
        full_sequence_must_fit=False,
        reserved_blocks=0,
        has_scheduled_reqs=True,
    ):
        m, req = self.m, r.req
        request_id = req.request_id
        start = req.num_computed_tokens
        computed = start + hit + external
        old = [list(ids) for ids in m.get_block_ids(request_id)]
        total, main = computed, computed + n
        slots = min(main + lookahead, LIMIT)
        hits = blocks.blocks if blocks is not None else ((),) * len(self.specs)
        fast = slots < m.next_event_tokens(request_id) and blocks is None
        held_back = m.watermark_blocks if has_scheduled_reqs and req.awaits_admission else 0
        options = {
            "num_encoder_tokens": num_encoder_tokens,
            "full_sequence_must_fit": full_sequence_must_fit,
            "reserved_blocks": reserved_blocks,
            "has_scheduled_reqs": has_scheduled_reqs,
        }
        before, free = snapshot(m), m.block_pool.get_num_free_blocks()
        if full_sequence_must_fit:
            whole = m.coordinator.get_num_blocks_to_allocate(
                request_id,
                req.num_tokens,
                hits,
                num_encoder_tokens,
                computed,
                req.num_tokens,
                True,
            )
            if whole + held_back > free:
                assert m.allocate_slots(req, n, hit, blocks, 0, external, delay, **options) is None
                assert snapshot(m) == before
                return None
        if not fast:
            m.coordinator.remove_skipped_blocks(request_id, total)
            before, free = snapshot(m), m.block_pool.get_num_free_blocks()
        needed = m.coordinator.get_num_blocks_to_allocate(
            request_id, slots, hits, num_encoder_tokens, computed, main
        )
        m.take_new_block_ids()
        added = m.allocate_slots(
            req, n, hit, blocks, lookahead, external, delay_cache_blocks=bool(delay), **options
        )
        now_free = m.block_pool.get_num_free_blocks()
        fits = needed + held_back <= free - reserved_blocks
        assert (added is not None) == fits
        if added is None:
            assert snapshot(m) == before
            assert m.take_new_block_ids() == []
            r.drafts = []
            return None
        if self.caching and not delay:
            known = min(main, req.num_tokens)
            req.num_registered_tokens = max(req.num_registered_tokens, known)
        if fast:
            assert (needed, added) == (0, m.empty_kv_cache_blocks)
            assert snapshot(m) == before
        assert free - now_free == needed
        tables = [list(ids) for ids in m.get_block_ids(request_id)]
        handed_out = m.take_new_block_ids()
        assert len(handed_out) <= needed
        held_before = {i for row in old for i in row}
        assert {i for row in added.get_block_ids() for i in row if i} <= (
            {*handed_out} | held_before
        )
        assert {*handed_out} <= {i for row in tables for i in row}
        self.check_growth(r, old, tables, added, total, main, slots, blocks, external)
        if self.caching and not delay and not self.evicted:
            self.check_registered(req, min(main, req.num_tokens))

        req.num_computed_tokens = main
        req.awaits_admission = False
        sequence = req.all_token_ids + r.drafts
        part = Part(
            start=start,
            computed=computed,
            stop=main,
            content=contents(sequence[:main], req.cache_salt),
            tables=tables,
            loaded=[self.to_load(g, t, total) if external else set() for g, t in enumerate(tables)],
        )
        part.delayed = bool(delay)
        if n:
            r.part = part
        else:
            r.part_loading = part
        return added

    def to_load(self, group: int, ids: list[int], total: int) -> set[int]:
        """Ids that a connector fills: beyond the hits, up to the external tokens."""
        end = cdiv(total, self.specs[group].block_size)
        manager = self.m.coordinator.single_type_managers[group]
        if isinstance(manager.kv_cache_spec, MambaSpec):
            return {ids[end - 1]}
        return {i for i in ids[:end] if i and self.m.block_pool.blocks[i].ref_cnt == 1}

    def check_growth(self, r, old, tables, added, total, main, slots, blocks, external) -> None:
        for group, (spec, manager) in enumerate(
            zip(self.specs, self.m.coordinator.single_type_managers)
        ):
            size, now, then = spec.block_size, tables[group], old[group]
            if self.cross[group]:
                assert len(now) == cdiv(ENCODER_TOKENS, size)
                assert now[: len(then)] == then
                assert all(now)
                continue
            new = [b.block_id for b in added.blocks[group]]
            assert not new or now[-len(new) :] == new
            aligned = isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align"
            assert len(now) * size >= (main if aligned else slots)
            assert len(now) >= len(then)
            for index, (a, b) in enumerate(zip(then, now)):
                # An entry keeps its block or becomes null.
                assert b in (a, 0) or (aligned and a == 0), (index, then, now)
            skipped = max(manager.get_num_skipped_tokens(total), 0) // size
            real = [i for i in now if i]
            if not isinstance(spec, MambaSpec):
                assert all(i == 0 for i in now[:skipped])
                assert all(now[skipped:])
            limit = self.most[group] + cdiv(max(slots - main, 0) + len(r.drafts), size)
            if aligned:
                sp = spec.num_speculative_blocks
                limit = (3 + sp if 0 < sp <= size else 2 + sp) + r.failures
            assert len(real) <= limit, (group, now)
            registered = manager.num_cached_block.get(r.req.request_id, 0)
            if r.floor and not self.evicted:
                assert registered >= r.floor[group]
        r.floor = [
            manager.num_cached_block.get(r.req.request_id, 0)
            for manager in self.m.coordinator.single_type_managers
        ]

    def check_registered(self, req: FakeRequest, known: int) -> None:
        for spec, manager in zip(self.specs, self.m.coordinator.single_type_managers):
            if isinstance(spec, MambaSpec) and spec.mamba_cache_mode == "align":
                continue
            row = manager.req_to_blocks.get(req.request_id, ())
            for block in row[: known // spec.block_size]:
                assert block.is_null or block.block_hash is not None

    @invariant()
    def holds(self) -> None:
        operations[type(self).__name__] += 1
        self.evicted &= any(r.running for r in self.live.values())
        check_pool(self.m.block_pool, owners_of(self.m, self.detached), self.sinks)
        check_tables(self.m, {i: r.req for i, r in self.live.items()}, self.evicted)
        self.check_common_prefix()
        self.replay.apply(self.m.take_events())
        self.replay.check(self.m.block_pool)

    def check_common_prefix(self) -> None:
        running = next((i for i, r in self.live.items() if r.running), None)
        if running is None:
            return
        counts = self.m.get_num_common_prefix_blocks(running)
        for manager, count in zip(self.m.coordinator.single_type_managers, counts):
            if self.caching and isinstance(manager, FullAttentionManager):
                tables = manager.req_to_blocks
                shared = [b.ref_cnt == len(tables) for b in tables.get(running, ())]
                assert count == [*shared, False].index(False)
            else:
                assert count == 0

    def teardown(self) -> None:
        for r in self.live.values():
            self.m.free(r.req)
        for blocks in self.detached:
            self.m.block_pool.free_blocks(reversed(blocks))
        pool = self.m.block_pool
        assert pool.get_num_free_blocks() == self.num_blocks - 1 - len(self.sinks)
        assert all(b.ref_cnt == 0 for b in pool.blocks if not b.is_null)
        assert pool.get_usage() == 0
        assert pool.reset_prefix_cache()
        stats = self.m.make_prefix_cache_stats()
        queries = stats.queries + stats.preempted_queries
        assert stats.hits + stats.preempted_hits + stats.null_hits <= queries


NO_DRAFTS = {"drafts_allowed": False}
MIXES = {
    "Full": {"specs": (full(),)},
    "FullNoCaching": {"specs": (full(),), "caching": False},
    "FullEagle": {"specs": (full(),), "use_eagle": True},
    "FullContextParallel": {"specs": (full(8),), "dcp": 2, "hash_block_size": 8},
    "Window": {"specs": (window(10),)},
    "WindowEagle": {"specs": (window(6),), "use_eagle": True},
    "Chunked": {"specs": (chunked(12),)},
    "Sink": {"specs": (sink(8),)},
    "MambaAllAlone": {"specs": (mamba("all"),), **NO_DRAFTS},
    "MambaAlignAlone": {"specs": (mamba(),), **NO_DRAFTS},
    "FullCross": {"specs": (full(), cross()), "caching": False, "external_allowed": False},
    "FullWindow": {"specs": (full(), window(8))},
    "FullWindowNoCaching": {"specs": (full(), window(8)), "caching": False},
    "FullWindowEagle": {"specs": (full(), window(8)), "use_eagle": True, "interleaved": False},
    "FullTwoWindows": {"specs": (full(), window(6), window(13))},
    "FullTwoWindowsEagle": {"specs": (full(), window(6), window(13)), "use_eagle": True},
    "FullLargeWindow": {"specs": (full(), window(9, block_size=8))},
    "FullOddWindow": {"specs": (full(), window(9, block_size=6)), "hash_block_size": 2},
    "FullChunked": {"specs": (full(), chunked(8))},
    "MambaAll": {"specs": (full(), mamba("all")), **NO_DRAFTS},
    "MambaAlign": {"specs": (full(), mamba()), **NO_DRAFTS},
    "MambaAlignSpeculative": {"specs": (full(), mamba(sp=2)), "external_allowed": False},
    "MambaNone": {
        "specs": (full(), mamba("none", block_size=LIMIT)),
        "caching": False,
        "drafts_allowed": False,
    },
    "WindowMambaAlign": {
        "specs": (full(), window(8), mamba()),
        "drafts_allowed": False,
        "interleaved": False,
    },
    "FourGroups": {"specs": (full(), window(8), window(13), chunked(8))},
    "FourGroupsTwoSizes": {"specs": (full(4), full(8), window(8, 8), mamba()), **NO_DRAFTS},
    "AlikeGroups": {"specs": (full(), window(8), window(8), window(8))},
}
for _name, _values in MIXES.items():
    _machine = type(f"{_name}Machine", (ManagerMachine,), _values)
    _case = _machine.TestCase
    _case.settings = settings(
        max_examples=60 if NIGHTLY else 15,
        stateful_step_count=120 if NIGHTLY else 40,
        deadline=None,
    )
    globals()[f"Test{_name}"] = _case
del _case


def test_enough_operations_were_made():
    """The last of this file: how much the machines above have done."""
    if len(operations) < len(MIXES):
        pytest.skip("not all machines ran")
    print(f"{operations.total()} checked operations: {dict(operations)}")
    assert operations.total() >= WANTED_OPERATIONS
