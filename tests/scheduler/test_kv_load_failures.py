"""KV that was promised and did not arrive, or in part, or never: what is computed instead?"""

from __future__ import annotations

import random
from typing import Any

import pytest

from jubako.scheduler import (
    AsyncScheduler,
    FinishReason,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.fake_model import Context, Prefixes
from tests.scheduler.fakes import FakeKVConnector
from tests.scheduler.harness import Driver, finish, make_request, make_scheduler, scheduled
from tests.scheduler.kv_loading import fresh_lookup, make, no_leak, table, with_transfer
from tests.scheduler.mirror import WorkerMirror


def test_after_a_failed_load_outside_steps_the_rest_is_computed():
    connector = ScriptedConnector(a=(16, True))
    scheduler = make(connector)
    request = make_request("a", 19, 1)
    scheduler.add_request(request)
    step = scheduler.schedule()
    bad = table(scheduler, "a")[2]
    finish_step(scheduler, step, invalid={bad})
    # Nothing is freed before the workers are done with it.
    assert len(table(scheduler, "a")) == 4
    run_step(scheduler, received={"a"})
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 11}
    assert step.scheduled_new_reqs[0].num_computed_tokens == 8
    assert (request.num_cached_tokens, request.num_external_computed_tokens) == (8, 8)
    assert connector.named("lookup") == [("a", 0)]
    output = finish_step(scheduler, step)["a"]
    assert (output.num_cached_tokens, output.num_external_computed_tokens) == (8, 8)
    scheduler.schedule()
    no_leak(scheduler)


def test_a_load_that_failed_as_a_whole_is_computed_from_the_local_hits():
    connector = ScriptedConnector(b=(8, True))
    scheduler = make(connector)
    prompt = list(range(100, 121))
    scheduler.add_request(make_request("a", prompt[:8], 1))
    run_step(scheduler)
    scheduler.add_request(make_request("b", prompt, 1))
    step = scheduler.schedule()
    finish_step(scheduler, step, failed={"b"})
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 13}
    assert scheduler.requests["b"].num_cached_tokens == 8
    assert scheduler.requests["b"].num_external_computed_tokens == 0


def test_a_failed_load_at_the_first_block_is_not_tried_for_ever():
    connector = ScriptedConnector(a=(8, True))
    scheduler = make(connector)
    scheduler.add_request(make_request("a", 11, 1))
    step = scheduler.schedule()
    finish_step(scheduler, step, received={"a"}, invalid={table(scheduler, "a")[0]})
    assert scheduled(run_step(scheduler)) == {"a": 11}
    assert connector.named("lookup") == [("a", 0)]
    scheduler.schedule()
    no_leak(scheduler)


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_a_step_that_ran_on_missing_kv_is_void(scheduler_class):
    connector = ScriptedConnector(a=(8, False))
    scheduler = make(connector, scheduler_class=scheduler_class)
    request = make_request("a", 13, 2, ignore_eos=True)
    scheduler.add_request(request)
    scheduler.add_request(make_request("b", 5, 9, ignore_eos=True))
    step = scheduler.schedule()
    later = scheduler.schedule() if scheduler_class is AsyncScheduler else None
    # Nor does planning ahead make anything findable.
    assert fresh_lookup(scheduler, request.all_token_ids) == 0
    outputs = finish_step(scheduler, step, invalid={table(scheduler, "a")[1]})
    assert list(outputs) == ["b"]
    assert request.status is RequestStatus.PREEMPTED
    assert (request.num_computed_tokens, request.num_output_tokens) == (4, 0)
    assert fresh_lookup(scheduler, request.all_token_ids) == 4
    if later is not None:
        assert list(finish_step(scheduler, later)) == ["b"]
    step = scheduler.schedule()
    assert step.preempted_req_ids == {"a"}
    assert scheduled(step) == {"b": 1}
    finish_step(scheduler, step)
    step = scheduler.schedule()
    assert scheduled(step) == {"b": 1, "a": 9}
    assert step.scheduled_cached_reqs.resumed_req_ids == {"a"}
    output = finish_step(scheduler, step)["a"]
    assert (output.new_token_ids, output.num_cached_tokens) == ([3], 4)
    assert output.num_external_computed_tokens == 4
    finish(scheduler, "a", "b")
    scheduler.schedule()
    no_leak(scheduler)


def test_damage_counts_although_the_table_has_let_the_block_go():
    """The next step may be planned before the report, and a window moves on with it."""
    connector = ScriptedConnector(a=(8, False))
    scheduler = make(connector, scheduler_class=AsyncScheduler, window=3)
    request = make_request("a", 13, 5, ignore_eos=True)
    scheduler.add_request(request)
    step = scheduler.schedule()
    bad = scheduler.kv_cache_manager.get_block_ids("a")[1][1]
    later = scheduler.schedule()
    assert bad not in scheduler.kv_cache_manager.get_block_ids("a")[1]
    assert finish_step(scheduler, step, invalid={bad}) == {}
    assert finish_step(scheduler, later) == {}
    assert request.num_output_tokens == 0


def test_what_a_victims_step_read_wrongly_is_not_delivered():
    """It gave way while the step was under way that loads its KV."""
    connector = ScriptedConnector(a=(8, False))
    scheduler = make(
        connector, scheduler_class=AsyncScheduler, scheduling_policy="priority", max_num_seqs=1
    )
    request = make_request("a", 13, 5, ignore_eos=True, priority=1)
    scheduler.add_request(request)
    step = scheduler.schedule()
    bad = table(scheduler, "a")[1]
    scheduler.add_request(make_request("urgent", 5, 1, priority=0))
    later = scheduler.schedule()
    assert request.status is RequestStatus.PREEMPTED
    assert finish_step(scheduler, step, invalid={bad}) == {}
    finish_step(scheduler, later)
    assert request.num_output_tokens == 0
    while not request.num_output_tokens:
        run_step(scheduler)
    assert connector.named("lookup") == [("a", 0), ("urgent", 0)]
    finish(scheduler, "a")
    scheduler.schedule()


@pytest.mark.parametrize("is_async", [True, False])
def test_by_policy_a_failed_load_ends_the_request(is_async: bool):
    connector = ScriptedConnector(a=(8, is_async))
    scheduler = with_transfer(make(connector), kv_load_failure_policy="fail")
    scheduler.add_request(make_request("a", 11, 5))
    scheduler.add_request(make_request("b", 6, 9, ignore_eos=True))
    step = scheduler.schedule()
    outputs = finish_step(scheduler, step, invalid={table(scheduler, "a")[1]})
    assert outputs["a"].finish_reason is FinishReason.ERROR
    assert "could not be loaded" in outputs["a"].error
    assert outputs["b"].new_token_ids == [3]
    assert bool(scheduler.transfers.holds) == is_async
    run_step(scheduler, received={"a"} if is_async else ())
    assert connector.named("finished")[0][0] == "a"
    finish(scheduler, "b")
    scheduler.schedule()
    no_leak(scheduler)


def test_all_holders_of_a_damaged_block_go_back():
    connector = ScriptedConnector()
    scheduler = make(connector)
    prompt = list(range(100, 109))
    scheduler.add_request(make_request("a", prompt, 9, ignore_eos=True))
    run_step(scheduler)
    connector.answers["c"] = (4, False)
    scheduler.add_request(make_request("b", prompt, 9, ignore_eos=True))
    scheduler.add_request(make_request("c", [*prompt[:8], *range(200, 209)], 9, ignore_eos=True))
    step = scheduler.schedule()
    first = table(scheduler, "c")[1]
    assert table(scheduler, "a")[1] == table(scheduler, "b")[1] == first
    outputs = finish_step(scheduler, step, invalid={first})
    assert outputs == {}
    assert {r.request_id: r.num_computed_tokens for r in scheduler.requests.values()} == {
        "a": 4,
        "b": 4,
        "c": 4,
    }
    assert fresh_lookup(scheduler, prompt) == 4
    assert scheduler.schedule().preempted_req_ids == {"a", "b", "c"}
    assert sorted(scheduled(scheduler.schedule())) == ["a", "b", "c"]


def test_reports_about_unknown_blocks_and_requests_are_counted():
    connector = ScriptedConnector()
    scheduler = make(connector, log_stats=True)
    scheduler.add_request(make_request("a", 6, 9, ignore_eos=True))
    step = scheduler.schedule()
    outputs = finish_step(
        scheduler, step, invalid={1, 50, 10_000}, received={"x"}, sent={"y"}, failed={"z"}
    )
    assert outputs["a"].new_token_ids == [3]
    assert scheduler.transfers.num_unknown_reports == 6
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.kv_unknown_reports == 6


def test_a_load_without_a_report_is_cancelled_and_then_given_up():
    connector = ScriptedConnector(a=(8, True))
    scheduler = with_transfer(make(connector), kv_load_timeout_s=1e-9)
    scheduler.add_request(make_request("a", 11, 1))
    scheduler.schedule()
    scheduler.schedule()
    assert connector.named("cancel_load") == [("a",)]
    step = scheduler.schedule()
    # Its old blocks are never used again.
    assert len(scheduler.transfers.holds.quarantined) == 2
    assert scheduled(step) == {"a": 11}
    lost = {block.block_id for block in scheduler.transfers.holds.quarantined}
    assert not lost & set(table(scheduler, "a"))


def test_what_arrives_of_a_cancelled_load_is_not_used():
    connector = ScriptedConnector(a=(8, True))
    scheduler = with_transfer(make(connector), kv_load_timeout_s=1e-9)
    scheduler.add_request(make_request("a", 11, 1))
    scheduler.schedule()
    with_transfer(scheduler, kv_load_timeout_s=1e9)
    step = scheduler.schedule()
    assert connector.named("cancel_load") == [("a",)]
    finish_step(scheduler, step, received={"a"})
    assert scheduled(run_step(scheduler)) == {"a": 11}
    scheduler.schedule()
    no_leak(scheduler)


@pytest.mark.parametrize("is_async", [True, False])
def test_loads_that_the_workers_never_hear_of_count_as_failed(is_async: bool):
    connector = ScriptedConnector(a=(8, is_async))
    scheduler = make(connector)
    connector.broken = {"meta"}
    scheduler.add_request(make_request("a", 11, 1))
    step = scheduler.schedule()
    assert step.kv_connector_metadata is None
    connector.broken = set()
    finish_step(scheduler, step)
    while scheduler.has_requests():
        step = scheduler.schedule()
        output = finish_step(scheduler, step)
    assert connector.named("alloc")[-1] == ("a", 0)
    assert output == {}
    no_leak(scheduler)


@pytest.mark.parametrize("is_async", [True, False])
def test_by_policy_loads_that_the_workers_never_hear_of_end_the_request(is_async: bool):
    connector = ScriptedConnector(a=(8, is_async))
    scheduler = with_transfer(make(connector), kv_load_failure_policy="fail")
    connector.broken = {"meta"}
    scheduler.add_request(make_request("a", 11, 1))
    outputs: dict[str, Any] = {}
    while scheduler.has_requests():
        outputs |= finish_step(scheduler, scheduler.schedule())
    assert outputs["a"].finish_reason is FinishReason.ERROR
    no_leak(scheduler)


class ForgivingMirror(WorkerMirror):
    """What a request read wrongly spoils all its tokens, until it begins again."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.strict = False

    def apply(self, step: SchedulerOutput) -> None:
        super().apply(step)
        for request_id in step.scheduled_cached_reqs.resumed_req_ids:
            context = Context.of(self.scheduler.requests[request_id])
            self.requests[request_id].prefixes = Prefixes(context)


@pytest.mark.parametrize("window", [None, 7])
@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_random_failures_never_change_an_answer(scheduler_class, window):
    """Loads of every kind, some of which fail, in a machine that runs out of blocks."""
    for seed in range(12):
        rng = random.Random(seed)
        connector = FakeKVConnector()
        driver = Driver(
            make_scheduler(
                scheduler_class=scheduler_class,
                hooks={"connector": connector},
                num_blocks=40,
                max_model_len=48,
                window=window,
                max_num_batched_tokens=20,
                max_num_seqs=4,
            ),
            depth=1 if scheduler_class is Scheduler else 2,
        )
        driver.mirror = ForgivingMirror(driver.scheduler)
        for count in range(12):
            prompt = list(range(50, 50 + rng.randrange(16))) + [200 + count] * rng.randrange(1, 9)
            request = make_request(f"r{count}", prompt, rng.randrange(1, 12))
            connector.answers[request.request_id] = (
                rng.randrange(2),
                rng.randrange(30),
                rng.random() < 0.5,
            )
            if rng.random() < 0.6:
                connector.fails[request.request_id] = rng.randrange(4)
            driver.add(request)
            driver.step()
            if rng.random() < 0.2:
                driver.abort(f"r{rng.randrange(count + 1)}")
            for request_id in list(driver.mirror.loads):
                if rng.random() < 0.4:
                    driver.mirror.finish_load(request_id)
        for _ in range(400):
            if not driver.scheduler.has_requests():
                break
            for request_id in list(driver.mirror.loads):
                driver.mirror.finish_load(request_id)
            driver.step()
        while driver.in_flight:
            driver.take_result()
        driver.run()
        driver.check_answers()
        no_leak(driver.scheduler)
