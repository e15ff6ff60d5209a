"""Random arrivals, aborts, preemptions, drafts and resets: the answers never change.

`JUBAKO_NIGHTLY=1` runs far more and longer sequences.
"""

from __future__ import annotations

import os
from typing import Any

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jubako.scheduler import AsyncScheduler, DraftTokenIds, Request, Scheduler
from tests.scheduler.harness import (
    EOS,
    VOCAB,
    Driver,
    check_all_free,
    make_request,
    make_scheduler,
    next_token,
)

NIGHTLY = os.environ.get("JUBAKO_NIGHTLY") == "1"

PATIENCE = 200
"""Steps in which a running request must be served and somebody must gain a token."""


@st.composite
def scheduler_options(draw: Any) -> dict[str, Any]:
    """Small machines of every kind, each large enough for one request of the longest length."""
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.integers(8, 40))
    chunked = draw(st.booleans()) or draw(st.booleans())
    budget = draw(st.integers(1, 24))
    if not chunked:
        budget = max(budget, max_model_len)
    window = draw(st.none() | st.integers(1, 9))
    groups = 1 if window is None else 2
    longest = -(-max_model_len // block_size)
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "window": window,
        "num_blocks": 1 + groups * longest + draw(st.integers(0, 3 * longest)),
        "caching": draw(st.sampled_from([True, True, False])),
        "watermark": draw(st.sampled_from([0.0, 0.0, 0.2])),
        "enable_chunked_prefill": chunked,
        "max_num_batched_tokens": budget,
        "max_num_seqs": draw(st.integers(1, min(6, budget))),
        "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 1, 5])),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "fair_prefill": draw(st.booleans()),
        "admission_lookahead": draw(st.sampled_from([0, 1, 8])),
        "scheduler_reserve_full_isl": draw(st.booleans()),
        "log_stats": draw(st.booleans()),
    }


class SchedulerMachine(RuleBasedStateMachine):
    """A scheduler, a worker's mirror that checks every KV slot it reads, and random events."""

    scheduler_class: type[Scheduler] = Scheduler
    depth = 1

    @initialize(options=scheduler_options())
    def start(self, options: dict[str, Any]) -> None:
        self.options = options
        scheduler = make_scheduler(scheduler_class=self.scheduler_class, **options)
        self.driver = Driver(scheduler, depth=self.depth)
        self.scheduler = self.driver.scheduler
        self.count = 0
        self.idle: dict[str, int] = {}
        self.steps_without_token = 0

    @rule(
        family=st.integers(0, 2),
        shared=st.integers(0, 20),
        own=st.integers(0, 12),
        max_tokens=st.integers(1, 12) | st.none(),
        min_tokens=st.integers(0, 6),
        stops=st.lists(st.integers(0, VOCAB - 1), max_size=2),
        ignore_eos=st.booleans(),
        priority=st.integers(-1, 2),
        read_cache=st.sampled_from([True, True, False]),
    )
    def add(
        self,
        family: int,
        shared: int,
        own: int,
        max_tokens: int | None,
        min_tokens: int,
        stops: list[int],
        ignore_eos: bool,
        priority: int,
        read_cache: bool,
    ) -> None:
        prompt = [family * 31 + i for i in range(shared)] + [self.count] * own
        prompt = prompt[: self.scheduler.max_model_len - 1] or [family]
        if max_tokens is not None:
            min_tokens = min(min_tokens, max_tokens)
        request = make_request(
            f"r{self.count}",
            prompt,
            max_tokens,
            # Several arrive at one time.
            arrival=float(self.count // 2),
            priority=priority if self.options["scheduling_policy"] == "priority" else 0,
            min_tokens=min_tokens,
            stop_token_ids=stops,
            ignore_eos=ignore_eos,
            skip_reading_prefix_cache=not read_cache,
            eos=EOS,
        )
        self.count += 1
        self.driver.add(request)

    def _a_request(self, choice: int) -> Request | None:
        live = list(self.scheduler.requests.values())
        return live[choice % len(live)] if live else None

    @rule(choice=st.integers(0, 20))
    def abort(self, choice: int) -> None:
        request = self._a_request(choice)
        if request is not None:
            self.driver.abort(request.request_id, "unknown")
            self.driver.abort(request.request_id)

    @rule()
    def step(self) -> None:
        self._step(None)

    @rule(choice=st.integers(0, 20))
    def step_with_abort_in_flight(self, choice: int) -> None:
        self._step(choice)

    def _step(self, abort: int | None) -> None:
        step = self.driver.schedule()
        self._watch_progress(step)
        self.driver.in_flight.append((step, self.driver.mirror.execute(step)))
        if abort is not None:
            request = self._a_request(abort)
            if request is not None:
                self.driver.abort(request.request_id)
        produced = []
        if len(self.driver.in_flight) >= self.depth:
            produced = self.driver.take_result()
        self.steps_without_token += 1
        if produced or not self.scheduler.requests:
            self.steps_without_token = 0
        assert self.steps_without_token < PATIENCE
        if not self.scheduler.has_requests():
            check_all_free(self.scheduler)

    def _watch_progress(self, step: Any) -> None:
        for request in self.scheduler.running:
            request_id = request.request_id
            served = request_id in step.num_scheduled_tokens
            self.idle[request_id] = 0 if served else self.idle.get(request_id, 0) + 1
            assert self.idle[request_id] < PATIENCE

    @precondition(lambda self: self.driver.in_flight)
    @rule()
    def take_result(self) -> None:
        self.driver.take_result()

    @precondition(lambda self: self.scheduler.running and self.depth == 1)
    @rule(right=st.integers(0, 3), wrong=st.integers(0, 2), which=st.integers(0, 63))
    def draft(self, right: int, wrong: int, which: int) -> None:
        req_ids, drafts = ["gone"], [[1, 2]]
        for index, request in enumerate(self.scheduler.running):
            if not which >> index & 1:
                continue
            tokens = list(request.all_token_ids)
            for _ in range(right):
                tokens.append(next_token(tokens))
            guess = tokens[request.num_tokens :] + [VOCAB + 1] * wrong
            req_ids.append(request.request_id)
            drafts.append(guess)
        self.scheduler.update_draft_token_ids(DraftTokenIds(req_ids, drafts))

    @rule(running_too=st.booleans())
    def reset_prefix_cache(self, running_too: bool) -> None:
        in_use = bool(self.scheduler.running)
        done = self.scheduler.reset_prefix_cache(reset_running_requests=running_too)
        assert done == (running_too or not in_use)

    def teardown(self) -> None:
        if hasattr(self, "driver"):
            self.driver.run()
            self.driver.check_answers()
            assert self.scheduler.reset_prefix_cache() is True


class AsyncSchedulerMachine(SchedulerMachine):
    """The same with steps in flight, more than an engine ever has."""

    scheduler_class = AsyncScheduler
    depth = 3


SETTINGS = settings(
    max_examples=2000 if NIGHTLY else 200,
    stateful_step_count=120 if NIGHTLY else 50,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = SETTINGS
TestAsyncScheduler = AsyncSchedulerMachine.TestCase
TestAsyncScheduler.settings = SETTINGS
