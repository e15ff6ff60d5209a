"""What each event may cost, counted in calls: nothing grows with what does not change.

A count of calls is the same on every machine, unlike a time. C functions count too, so that a list
that is rebuilt by a method shows; what one built-in call does inside does not.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any

import pytest

from jubako.sampling_params import SamplingParams, StructuredOutputsParams
from jubako.scheduler import LoRARequest, Request, RequestStatus, Scheduler
from tests.scheduler.fakes import EventfulGrammars, FakeKVConnector
from tests.scheduler.harness import Driver, make_request, make_scheduler, result_for


def calls_of(action: Callable[[], Any]) -> int:
    """How many functions `action` calls, in Python and in C."""
    count = 0

    def profile(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    # Whoever listens to the cycle collector would be counted too.
    gc.disable()
    sys.setprofile(profile)
    try:
        action()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


def scheduler_for(running: int, **options: Any) -> Scheduler:
    values: dict[str, Any] = {
        "block_size": 16,
        "num_blocks": 60 * running + 100,
        "max_num_batched_tokens": 40 * running + 64,
        "max_num_seqs": running,
        "max_model_len": 4096,
    }
    return make_scheduler(**(values | options))


def one_step(scheduler: Scheduler) -> None:
    step = scheduler.schedule()
    tokens = {
        request_id: [3]
        for request_id in step.num_scheduled_tokens
        if not scheduler.requests[request_id].is_prefill_chunk
    }
    scheduler.update_from_output(step, result_for(step, **tokens))


def steady_step_calls(context: int, running: int = 8) -> int:
    """Calls of a step in which everybody decodes inside a block."""
    # All prompts fit one step, so that all requests are at the same place in their blocks.
    scheduler = scheduler_for(
        running,
        num_blocks=running * context // 8 + 100,
        max_num_batched_tokens=2 * running * context,
    )
    for i in range(running):
        scheduler.add_request(make_request(f"r{i}", context + 1, 100, ignore_eos=True))
    while scheduler.waiting or any(r.is_prefill_chunk for r in scheduler.running):
        one_step(scheduler)
    # Away from the borders of blocks.
    while scheduler.requests["r0"].num_tokens % 16 not in (4, 5, 6):
        one_step(scheduler)
    return calls_of(lambda: one_step(scheduler))


def test_a_decode_step_costs_the_same_in_a_long_context():
    assert steady_step_calls(16) == steady_step_calls(1024)


def test_decodes_are_taken_through_a_step_together():
    """Another hundred requests add less than ten calls each."""
    few, many = steady_step_calls(16, 20), steady_step_calls(16, 120)
    assert many - few < 10 * 100


# -- ends ---------------------------------------------------------------------------------------


def abort_calls(state: str, others: int) -> int:
    scheduler = scheduler_for(others + 1 if state == "running" else 1)
    for i in range(others // 2):
        scheduler.add_request(make_request(f"before{i}", 20, 9, ignore_eos=True))
    scheduler.add_request(make_request("it", 20, 9, ignore_eos=True))
    for i in range(others // 2):
        scheduler.add_request(make_request(f"behind{i}", 20, 9, ignore_eos=True))
    if state == "running":
        one_step(scheduler)
        one_step(scheduler)
        assert len(scheduler.running) == others + 1
    assert (scheduler.requests["it"].status is RequestStatus.RUNNING) == (state == "running")
    return calls_of(lambda: scheduler.finish_requests("it", RequestStatus.FINISHED_ABORTED))


@pytest.mark.parametrize("state", ["waiting", "running"])
def test_an_abort_costs_the_same_among_few_and_many(state: str):
    assert abort_calls(state, 10) == abort_calls(state, 200)


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_an_arrival_costs_the_same_behind_few_and_many(policy: str):
    counts = []
    for others in (10, 300):
        scheduler = scheduler_for(1, scheduling_policy=policy)
        for i in range(others):
            scheduler.add_request(make_request(f"r{i}", 20, 9, arrival=float(i)))
        request = make_request("late", 20, 9, arrival=1e9)
        counts.append(calls_of(lambda s=scheduler, r=request: s.add_request(r)))
    assert counts[0] == counts[1]


# -- who waits for something --------------------------------------------------------------------


def with_grammar(request_id: str) -> Request:
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a+"))
    return Request(request_id, list(range(20)), params)


def blocked_step_calls(kind: str, blocked: int) -> int:
    hooks: dict[str, object] = {}
    connector = FakeKVConnector()
    if kind == "grammar":
        hooks["structured_output_manager"] = EventfulGrammars()
    if kind == "load":
        hooks["connector"] = connector
    scheduler = scheduler_for(4, hooks=hooks, num_blocks=10_000)
    if kind == "adapter":
        scheduler.max_loras = 1
    first = make_request("first", 20, 400, ignore_eos=True)
    first.lora_request = LoRARequest("first", 1)
    scheduler.add_request(first)
    one_step(scheduler)
    for i in range(blocked):
        request_id = f"r{i}"
        if kind == "grammar":
            request = with_grammar(request_id)
        else:
            request = make_request(request_id, 20, 9)
        if kind == "adapter":
            request.lora_request = LoRARequest("other", 2)
        if kind == "load":
            connector.answers[request_id] = (0, 16, True)
        scheduler.add_request(request)
    # The first looks find out what each of them waits for.
    for _ in range(3):
        one_step(scheduler)
    assert len(scheduler.waiting) == blocked
    while scheduler.requests["first"].num_tokens % 16 not in (4, 5, 6):
        one_step(scheduler)
    return calls_of(lambda: one_step(scheduler))


@pytest.mark.parametrize("kind", ["grammar", "load", "adapter"])
def test_who_waits_for_something_costs_nothing_until_it_comes(kind: str):
    assert blocked_step_calls(kind, 3) == blocked_step_calls(kind, 100)


def test_a_waiting_queue_that_does_not_fit_costs_the_same_however_long():
    counts = []
    for waiting in (20, 300):
        scheduler = scheduler_for(2, admission_lookahead=0)
        for i in range(2 + waiting):
            scheduler.add_request(make_request(f"r{i}", 20, 200, ignore_eos=True))
        for _ in range(3):
            one_step(scheduler)
        while scheduler.requests["r0"].num_tokens % 16 not in (4, 5, 6):
            one_step(scheduler)
        counts.append(calls_of(lambda s=scheduler: one_step(s)))
    assert counts[0] == counts[1]


# -- records ------------------------------------------------------------------------------------


def test_unchanged_decodes_bring_no_lists_of_tokens_and_no_blocks():
    driver = Driver(scheduler_for(8))
    driver.add(*(make_request(f"r{i}", 20, 60, ignore_eos=True) for i in range(8)))
    driver.run(2)
    step = driver.step()
    cached = step.scheduled_cached_reqs
    assert step.scheduled_new_reqs == []
    assert cached.all_token_ids == {}
    assert cached.new_token_ids == []
    assert not any(cached.new_block_ids)
    assert step.finished_req_ids == set()
