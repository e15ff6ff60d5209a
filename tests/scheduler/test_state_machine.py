"""Random events of every kind: the invariants hold after each, and the answers never change.

Arrivals of all sorts, aborts, preemptions, drafts, resets, connectors that bring, lose and keep KV,
grammars that come late, adapters, media, several KV groups, several front ends, failing steps.
`JUBAKO_NIGHTLY=1` runs 200,000 operations.
"""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from math import lcm
from random import Random
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, note, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jubako.kv_cache import KVCacheSpec, MambaSpec
from jubako.sampling_params import PoolingParams, SamplingParams, StructuredOutputsParams
from jubako.scheduler import (
    AsyncScheduler,
    DraftTokenIds,
    LoRARequest,
    MultiModalFeatureSpec,
    OverlappingScheduler,
    PlaceholderRange,
    Request,
    RequestStatus,
    Scheduler,
)
from tests.kv_cache.fakes import chunked, full, mamba, window
from tests.scheduler.fake_model import EOS, VOCAB, choose
from tests.scheduler.fakes import (
    EventfulGrammars,
    FakeECConnector,
    FakeGrammars,
    FakeGroupConnector,
    FakeKVConnector,
)
from tests.scheduler.harness import Driver, make_scheduler

NIGHTLY = os.environ.get("JUBAKO_NIGHTLY") == "1"

PATIENCE = 200
"""Steps in which a running request must be served and somebody must gain a token."""

ITEMS: dict[str, tuple[int, list[bool] | None]] = {
    "A": (3, None),
    "B": (5, None),
    "C": (4, [False, True, True, False]),
    "D": (8, None),
}
"""Media: how many positions each takes, and which of them an embedding."""

LARGEST_ITEM = 8

SEEDS = st.integers(0, 2**32 - 1)
"""One number stands for many choices: drawn one by one, neighbouring examples differ too little."""

SOMETIMES = st.sampled_from([False, False, False, True])
"""Keeps what ends much from ending everything."""


@pytest.fixture(scope="module", autouse=True)
def no_warnings():
    """Requests that fail are a daily matter here, and so are refused resets."""
    logger = logging.getLogger("jubako")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)


def kv_groups(rng: Random) -> list[KVCacheSpec]:
    """Up to three groups of different types and block sizes."""
    size, width = rng.choice([1, 2, 4]), rng.randint(1, 9)
    mode = rng.choice(["align", "all"])
    choices: list[list[KVCacheSpec]] = [
        [full(size)],
        [full(size)],
        [full(size), window(width, size)],
        [full(2), window(width, 4)],
        [full(4), window(width, 2), window(3, 2)],
        [full(size), chunked(4, size)],
        [full(4), chunked(6, 2), window(width, 4)],
        [full(2), mamba(mode, 0, 2)],
        [full(2), mamba(mode, 0, 4)],
        [full(2), window(width, 4), mamba(mode, 0, 4)],
        [full(2), mamba(mode, 2, 4)],
        [mamba(mode, 0, 4)],
        [full(2), mamba("none", 0, 64)],
    ]
    return rng.choice(choices)


def blocks_for_one(specs: list[KVCacheSpec], max_model_len: int) -> int:
    """Blocks that a single request of the longest length needs."""
    blocks = 0
    for spec in specs:
        blocks += -(-max_model_len // spec.block_size)
        if isinstance(spec, MambaSpec):
            blocks += 1 + spec.num_speculative_blocks
    return blocks


def scheduler_options(rng: Random) -> dict[str, Any]:
    """Small machines of every kind, each large enough for one request of the longest length."""
    specs = kv_groups(rng)
    max_model_len = rng.randint(12, 40)
    chunked_prefill = rng.random() < 0.75
    splits_media = rng.random() < 0.7
    budget = rng.choice([1, 3, 8, 12, 20, 28])
    most_seqs = 6
    if not splits_media:
        # Decodes with their drafts must leave room for an item.
        budget += 2 * LARGEST_ITEM
        most_seqs = 3
    if not chunked_prefill:
        budget = max(budget, max_model_len)
    longest = blocks_for_one(specs, max_model_len)
    recurrent = any(isinstance(s, MambaSpec) and s.mamba_cache_mode == "none" for s in specs)
    return {
        "specs": specs,
        "max_model_len": max_model_len,
        "num_blocks": 1 + longest + rng.randint(0, rng.choice([3, longest, 3 * longest])),
        "caching": not recurrent and rng.random() < 0.75,
        "watermark": rng.choice([0.0, 0.0, 0.2]),
        "enable_chunked_prefill": chunked_prefill,
        "disable_chunked_mm_input": not splits_media,
        "max_num_batched_tokens": budget,
        "max_num_seqs": min(rng.choice([1, 2, 4, 6, 6]), most_seqs, budget),
        "max_num_encoder_input_tokens": rng.randint(LARGEST_ITEM, 16),
        "encoder_cache_size": rng.randint(LARGEST_ITEM, 24),
        "long_prefill_token_threshold": rng.choice([0, 0, 1, 5]),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "fair_prefill": rng.random() < 0.5,
        "admission_lookahead": rng.choice([0, 1, 8]),
        "scheduler_reserve_full_isl": rng.random() < 0.5,
        "include_finished_set": rng.random() < 0.5,
        "log_stats": rng.random() < 0.5,
        "kv_load_failure_policy": rng.choice(["recompute", "recompute", "fail"]),
    }


@dataclass
class Wish:
    """A request, before it is fitted to the machine."""

    family: int
    shared: int
    own: int
    media: list[tuple[int, str]]
    pools: bool
    max_tokens: int | None
    min_tokens: int
    stops: list[int]
    ignore_eos: bool
    priority: int
    reads_cache: bool
    client: int
    adapter: int | None
    salt: str | None
    grammar: bool
    lookup: tuple[int, int, bool] | None
    keeps: bool
    load_fails_at: int | None
    is_session: bool

    @classmethod
    def drawn(cls, rng: Random) -> Wish:
        media = []
        if rng.random() < 0.4:
            media = [(rng.randint(0, 4), rng.choice("ABCD")) for _ in range(rng.randint(1, 3))]
        return cls(
            family=rng.choice([0, 0, 0, 1]),
            shared=rng.choice([0, 3, 5, 8, 9, 13, 16, 20, 25, 32]),
            own=rng.choice([0, 0, 1, 4, 9]),
            media=media,
            pools=rng.random() < 0.1,
            max_tokens=rng.choice([None, 1, 2, 5, 9, 14]),
            min_tokens=rng.choice([0, 0, 0, 3, 6]),
            stops=[rng.randrange(VOCAB) for _ in range(rng.choice([0, 0, 1, 2]))],
            ignore_eos=rng.random() < 0.7,
            priority=rng.randint(-1, 2),
            reads_cache=rng.random() < 0.85,
            client=rng.randint(0, 2),
            adapter=rng.choice([None] * 5 + [1, 2, 3]),
            salt=rng.choice([None] * 6 + ["salt"]),
            grammar=rng.random() < 0.2,
            lookup=rng.choice([None, (rng.randint(0, 2), rng.randint(1, 40), rng.random() < 0.6)]),
            keeps=rng.random() < 0.3,
            load_fails_at=rng.choice([None, None, None, 0, 1, 2]),
            is_session=rng.random() < 0.1,
        )


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler, a worker's mirror that checks every KV slot it reads, and random events."""

    scheduler_class: type[Scheduler] = Scheduler
    depth = 1

    @initialize(
        seed=SEEDS,
        connector=st.booleans(),
        encoder_store=st.none() | st.sets(st.sampled_from("ABCD")),
        max_loras=st.sampled_from([None, None, 1, 2]),
        drafts=st.booleans(),
    )
    def start(
        self,
        seed: int,
        connector: bool,
        encoder_store: set[str] | None,
        max_loras: int | None,
        drafts: bool,
    ) -> None:
        rng = Random(seed)
        self.options = options = scheduler_options(rng)
        note(str(options))
        self.specs = options["specs"]
        self.grammars = EventfulGrammars() if rng.random() < 0.7 else FakeGrammars()
        self.connector = None
        if connector:
            self.connector = FakeKVConnector()
            if len(self.specs) > 1 and rng.random() < 0.5:
                self.connector = FakeGroupConnector(lcm(*(s.block_size for s in self.specs)))
        self.encoder_store = None if encoder_store is None else FakeECConnector(*encoder_store)
        hooks: dict[str, object] = {"structured_output_manager": self.grammars}
        if self.connector is not None:
            hooks["connector"] = self.connector
            if any(isinstance(spec, MambaSpec) for spec in self.specs):
                # A state after the last token is of no use to who computes that token again.
                self.connector.most = lambda request: request.num_tokens - 1
        if self.encoder_store is not None:
            hooks["ec_connector"] = self.encoder_store
        self.scheduler = make_scheduler(
            scheduler_class=self.scheduler_class, hooks=hooks, **options
        )
        self.scheduler.max_loras = max_loras
        self.scheduler.drafter_shift = rng.choice([0, 0, 1])
        self.driver = Driver(self.scheduler, depth=self.depth)
        self.driver.check_blocks = True
        self.driver.expected_errors = set()
        self.most_drafts = self._most_drafts() if drafts else 0
        if self.scheduler_class is AsyncScheduler and self.most_drafts:
            # The worker makes them; the scheduler counts on them before they are known.
            self.scheduler.num_spec_tokens = min(self.most_drafts, rng.randint(1, 3))
            self.driver.mirror.makes_drafts = True
        self.sent: dict[str, Any] = {}
        if self.connector is not None:
            self.connector.on_finished = self._note_blocks_to_send
        self.count = 0
        for _ in range(rng.randint(1, 6)):
            self._add(Wish.drawn(rng))

    def _most_drafts(self) -> int:
        states = [spec for spec in self.specs if isinstance(spec, MambaSpec)]
        return min((spec.num_speculative_blocks for spec in states), default=5)

    def _note_blocks_to_send(self, request_id: str, tables: tuple[list[int], ...]) -> None:
        ids = [block_id for table in tables for block_id in table if block_id]
        self.sent[request_id] = self.driver.mirror.memory.copy_of(ids)

    # -- arrivals and ends --------------------------------------------------------------------

    @rule(seed=SEEDS)
    def add(self, seed: int) -> None:
        rng = Random(seed)
        for _ in range(rng.choice([1, 1, 2])):
            self._add(Wish.drawn(rng))

    def _add(self, wish: Wish) -> None:
        if wish.is_session:
            # Pieces are plain text here: what is asked is whether the turns fit together.
            wish.media, wish.pools, wish.grammar = [], False, False
        note(f"r{self.count}: {wish}")
        request = self._fitted(f"r{self.count}", wish)
        self.count += 1
        if self.connector is not None and wish.lookup and request.sampling_params is not None:
            self.connector.answers[request.request_id] = wish.lookup
            if wish.load_fails_at is not None:
                self.connector.fails[request.request_id] = wish.load_fails_at
                self._expect_failure(request.request_id)
        if self.connector is not None and wish.keeps:
            self.connector.keeps.add(request.request_id)
        self.driver.add(request)

    def _expect_failure(self, request_id: str) -> None:
        if self.options["kv_load_failure_policy"] == "fail":
            self.driver.expected_errors.add(request_id)

    def _fitted(self, request_id: str, wish: Wish) -> Request:
        most = self.scheduler.max_model_len - (not wish.pools)
        prompt = [wish.family * 31 + i for i in range(wish.shared)]
        features = []
        for gap, name in wish.media:
            length, mask = ITEMS[name]
            if len(prompt) + gap + length > most:
                break
            prompt += [wish.family] * gap
            place = PlaceholderRange(len(prompt), length, mask)
            features.append(MultiModalFeatureSpec(None, "image", name, place))
            prompt += [0] * length
        prompt += [self.count] * wish.own
        params: dict[str, Any] = {}
        if wish.pools:
            params["pooling_params"] = PoolingParams()
        else:
            longest = wish.max_tokens
            params["sampling_params"] = SamplingParams(
                temperature=0,
                max_tokens=longest,
                min_tokens=min(wish.min_tokens, longest or 99),
                stop_token_ids=wish.stops,
                ignore_eos=wish.ignore_eos,
                skip_reading_prefix_cache=not wish.reads_cache,
                structured_outputs=StructuredOutputsParams(regex=".*") if wish.grammar else None,
            )
        adapter = wish.adapter
        return Request(
            request_id,
            prompt[:most] or [wish.family],
            eos_token_id=EOS,
            # Several arrive at one time.
            arrival_time=float(self.count // 2),
            priority=wish.priority if self.options["scheduling_policy"] == "priority" else 0,
            client_index=wish.client,
            mm_features=features,
            cache_salt=wish.salt,
            lora_request=None if adapter is None else LoRARequest(f"adapter{adapter}", adapter),
            resumable=wish.is_session,
            **params,
        )

    def _a_request(self, choice: int, *statuses: RequestStatus) -> Request | None:
        live = [r for r in self.scheduler.requests.values() if not statuses or r.status in statuses]
        return live[choice % len(live)] if live else None

    @rule(choice=st.integers(0, 20), happens=SOMETIMES)
    def abort(self, choice: int, happens: bool) -> None:
        request = self._a_request(choice)
        if request is not None and happens:
            self.driver.abort(request.request_id, "unknown")
            self.driver.abort(request.request_id)

    @rule(choice=st.integers(0, 20), length=st.integers(1, 6), ends=st.booleans())
    def continue_session(self, choice: int, length: int, ends: bool) -> None:
        """The next piece of a session's input, or the word that none will come."""
        sessions = [r for r in self.scheduler.requests.values() if r.resumable]
        if sessions:
            self.driver.add_piece(sessions[choice % len(sessions)], None if ends else length)

    # -- steps --------------------------------------------------------------------------------

    @rule()
    def step(self) -> None:
        self._step()

    @rule(count=st.integers(2, 8))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self._step()

    @rule(choice=st.integers(0, 20))
    def step_with_abort_in_flight(self, choice: int) -> None:
        self._step(abort=choice)

    @rule(happens=SOMETIMES)
    def pause(self, happens: bool) -> None:
        if happens:
            self.scheduler.pause()
            self._step()
            assert not self.driver.last_step.num_scheduled_tokens
            self.scheduler.resume()

    def _step(self, abort: int | None = None) -> None:
        driver = self.driver
        step = driver.schedule()
        driver.sample(step, driver.mirror.forward(step))
        if abort is not None:
            request = self._a_request(abort)
            if request is not None:
                driver.abort(request.request_id)
        if len(driver.in_flight) >= self.depth:
            driver.take_result()
        if self._somebody_waits():
            driver.steps_without_token = 0
        driver.invariant_16(PATIENCE)

    def _somebody_waits(self) -> bool:
        """Whether something outside must happen first."""
        statuses = {request.status for request in self.scheduler.requests.values()}
        blocked = {
            RequestStatus.WAITING_FOR_FSM,
            RequestStatus.WAITING_FOR_REMOTE_KVS,
            RequestStatus.WAITING_FOR_REMOTE_EC,
            RequestStatus.WAITING_FOR_STREAMING_REQ,
        }
        return bool(statuses & blocked or self.driver.blocks_in_transfer())

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def take_result(self) -> None:
        self.driver.take_result()

    @precondition(lambda self: self.scheduler.running)
    @rule(choice=st.integers(0, 20), happens=SOMETIMES)
    def lose_a_row(self, choice: int, happens: bool) -> None:
        """A worker does not answer for one request of a step."""
        if not happens:
            return
        driver = self.driver
        step = driver.schedule()
        driver.sample(step, driver.mirror.forward(step))
        result = driver.in_flight[-1][1]
        if result.req_ids:
            lost = result.req_ids[choice % len(result.req_ids)]
            del result.req_id_to_index[lost]
            driver.expected_errors.add(lost)
        if len(driver.in_flight) >= self.depth:
            driver.take_result()

    @precondition(lambda self: self.scheduler.running and self.depth == 1 and self.most_drafts)
    @rule(right=st.integers(0, 3), wrong=st.integers(0, 2), which=st.integers(0, 63))
    def draft(self, right: int, wrong: int, which: int) -> None:
        req_ids, drafts = ["gone"], [[1, 2]]
        for index, request in enumerate(self.scheduler.running):
            if not which >> index & 1 or request.sampling_params is None:
                continue
            prefixes = self.driver.mirror.requests[request.request_id].prefixes
            tokens = list(request.all_token_ids)
            for _ in range(right):
                tokens.append(choose(prefixes.of(tokens)[-1]))
            guess = tokens[request.num_tokens :] + [VOCAB + 1] * wrong
            req_ids.append(request.request_id)
            drafts.append(guess[: self.most_drafts])
        self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, drafts))
        self.driver.check()

    # -- what comes from outside --------------------------------------------------------------

    @rule(choice=st.integers(0, 20), breaks=st.sampled_from([False, False, False, True]))
    def compile_grammar(self, choice: int, breaks: bool) -> None:
        request = self._a_request(choice, RequestStatus.WAITING_FOR_FSM)
        told = self.grammars.compiled | self.grammars.broken
        if request is not None and request.request_id not in told:
            if breaks:
                self.driver.expected_errors.add(request.request_id)
            self.grammars.compile(request.request_id, breaks)

    @precondition(lambda self: self.driver.mirror.loads)
    @rule(choice=st.integers(0, 20), fails=SOMETIMES)
    def finish_load(self, choice: int, fails: bool) -> None:
        loads = list(self.driver.mirror.loads)
        request_id = loads[choice % len(loads)]
        if fails:
            self._expect_failure(request_id)
        self.driver.mirror.finish_load(request_id, fails)

    @precondition(lambda self: self.connector is not None and self.connector.sending)
    @rule(choice=st.integers(0, 20))
    def finish_sending(self, choice: int) -> None:
        sending = list(self.connector.sending)
        self._send(sending[choice % len(sending)])

    def _send(self, request_id: str) -> None:
        before = self.sent.pop(request_id, None)
        if before is not None:
            # Nobody has written to what was still to be sent.
            memory = self.driver.mirror.memory
            assert memory.copy_of(before) == before
        report = self.driver.mirror.kv_report
        report.finished_sending = (report.finished_sending or set()) | {request_id, "unknown"}

    # -- resets -------------------------------------------------------------------------------

    @rule(running_too=st.booleans(), happens=SOMETIMES)
    def reset_prefix_cache(self, running_too: bool, happens: bool) -> None:
        if not happens or (running_too and self._others_hold_blocks()):
            return
        in_use = bool(self.scheduler.running) or self._others_hold_blocks()
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running_too)
        assert done == (running_too or not in_use)
        self.driver.check()

    def _others_hold_blocks(self) -> bool:
        waiting = [
            r
            for r in self.scheduler.waiting
            if r.num_computed_tokens or r.status is RequestStatus.WAITING_FOR_REMOTE_KVS
        ]
        loading = self.connector is not None and self.connector.loading
        return bool(waiting or loading or self.driver.blocks_in_transfer())

    @rule(
        name=st.sampled_from("ABCD"),
        kind=st.sampled_from(["store", "store", "spoil", "drop", "reset"]),
    )
    def change_encoder_outputs(self, name: str, kind: str) -> None:
        """An item comes to the shared store or leaves it, or new weights make all outputs void."""
        if self.encoder_store is not None and kind == "store":
            self.encoder_store.identifiers.add(name)
        elif self.encoder_store is not None and kind == "drop":
            self.encoder_store.identifiers.discard(name)
        elif kind == "spoil":
            self.driver.mirror.unreadable_outputs ^= {name}
        elif kind == "reset" and not self.driver.in_flight:
            self.scheduler.reset_encoder_cache()
            self.driver.mirror.encoder_cache.clear()
            self.driver.check()

    # -- the end ------------------------------------------------------------------------------

    def teardown(self) -> None:
        if not hasattr(self, "count") or sys.exc_info()[0] is not None:
            return
        driver, scheduler = self.driver, self.scheduler
        limit = 100 + 10 * scheduler.max_model_len * len(scheduler.requests)
        while scheduler.has_requests() or scheduler.requests or self._others_hold_blocks():
            self._let_everything_come()
            self._step()
            for session in [r for r in scheduler.requests.values() if r.resumable]:
                driver.add_piece(session, None)
            limit -= 1
            assert limit > 0, f"no progress: {list(scheduler.requests.values())}"
            if not scheduler.has_requests():
                while driver.in_flight:
                    driver.take_result()
        while driver.in_flight:
            driver.take_result()
        driver.check_answers()
        assert scheduler.reset_prefix_cache() is True
        uses_grammar = {i for i, r in driver.requests.items() if r.uses_grammar}
        assert self.grammars.released == uses_grammar
        if self.connector is not None:
            assert self.connector.finished.keys() == driver.requests.keys()

    def _let_everything_come(self) -> None:
        told = self.grammars.compiled | self.grammars.broken
        for request_id in self.scheduler.requests.keys() - told:
            self.grammars.compile(request_id)
        mirror = self.driver.mirror
        for request_id in list(mirror.loads):
            mirror.finish_load(request_id)
        if self.connector is not None:
            for request_id in list(self.connector.sending):
                self._send(request_id)


class OverlappingSchedulerMachine(SchedulerMachine):
    """Steps in flight, of which each request has one, but for chunks of its prompt."""

    scheduler_class = OverlappingScheduler
    depth = 2


class AsyncSchedulerMachine(SchedulerMachine):
    """The same with steps in flight, more than an engine ever has."""

    scheduler_class = AsyncScheduler
    depth = 3


SETTINGS = settings(
    max_examples=600 if NIGHTLY else 120,
    stateful_step_count=120 if NIGHTLY else 50,
    deadline=None,
    derandomize=not NIGHTLY,
    suppress_health_check=list(HealthCheck),
)

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
TestOverlappingScheduler = OverlappingSchedulerMachine.TestCase
TestOverlappingScheduler.settings = SETTINGS
TestAsyncScheduler = AsyncSchedulerMachine.TestCase
TestAsyncScheduler.settings = SETTINGS
