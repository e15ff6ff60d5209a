"""KV that comes from elsewhere: lookups, loads that succeed, fail or never end, delayed frees."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jubako.errors import ConfigError
from jubako.scheduler import (
    AsyncScheduler,
    FinishReason,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from jubako.scheduler import transfers as transfers_module
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.fake_model import Context, Prefixes
from tests.scheduler.fakes import FakeKVConnector
from tests.scheduler.harness import Driver, finish, ids, make_request, make_scheduler, scheduled
from tests.scheduler.mirror import WorkerMirror

REMOTE = RequestStatus.WAITING_FOR_REMOTE_KVS


def make(connector: ScriptedConnector, **options: Any) -> Scheduler:
    return make_scheduler(hooks={"connector": connector}, **options)


def with_transfer(scheduler: Scheduler, **options: Any) -> Scheduler:
    """The scheduler with other options of `KVTransferConfig`."""
    scheduler.config = scheduler.config.replace(kv_transfer_config=options)
    scheduler.transfers._options = scheduler.config.kv_transfer_config
    return scheduler


def table(scheduler: Scheduler, request_id: str) -> list[int]:
    return scheduler.kv_cache_manager.get_block_ids(request_id)[0]


def no_leak(scheduler: Scheduler) -> None:
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == scheduler.kv_cache_config.num_blocks - 1
    assert not scheduler.transfers.loads
    assert not scheduler.transfers.step_loads
    assert not scheduler.transfers.holds
    assert not scheduler.transfers._loading
    assert not scheduler.transfers._asked_since
    assert not scheduler._holders
    assert not scheduler._load_waiters


def fresh_lookup(scheduler: Scheduler, prompt: list[int]) -> int:
    """How many tokens a request with this prompt would find here."""
    request = make_request("fresh", prompt)
    assert scheduler.block_hasher is not None
    request.attach_block_hasher(scheduler.block_hasher, scheduler.hash_block_size)
    return scheduler.kv_cache_manager.get_computed_blocks(request)[1]


# -- lookups ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "length", "taken"),
    [
        ((8, True), 11, 8),
        # Lengths at which nobody could go on are rounded down.
        ((7, True), 11, 4),
        ((3, True), 11, 0),
        # All tokens may be loaded outside a step, one less inside.
        ((11, True), 11, 11),
        ((99, True), 11, 11),
        ((11, False), 11, 8),
        ((12, False), 12, 8),
        ((12, True), 12, 12),
        # Answers without a meaning count as nothing.
        ((-4, False), 11, 0),
        ((0, True), 11, 0),
    ],
)
def test_an_answer_is_cut_to_a_length_at_which_the_request_can_go_on(answer, length, taken):
    connector = ScriptedConnector(a=answer)
    scheduler = make(connector)
    scheduler.add_request(make_request("a", length))
    step = scheduler.schedule()
    assert connector.named("alloc") == [("a", taken)]
    loads_outside = answer[1] and taken > 0
    assert (scheduler.requests["a"].status is REMOTE) == loads_outside
    if not loads_outside:
        assert scheduled(step) == {"a": length - taken}


def test_a_handed_over_prompt_may_end_inside_a_block():
    connector = ScriptedConnector(a=(10, False))
    scheduler = make(connector)
    request = make_request("a", 11)
    request.kv_transfer_params = {"do_remote_prefill": True}
    request.append_output_token_ids([5])
    request.num_prompt_tokens = 10
    scheduler.add_request(request)
    assert scheduled(scheduler.schedule()) == {"a": 2}


def test_local_hits_come_before_what_is_elsewhere():
    connector = ScriptedConnector(b=(8, False))
    scheduler = make(connector)
    prompt = list(range(100, 121))
    scheduler.add_request(make_request("a", prompt[:8], 1))
    run_step(scheduler)
    scheduler.add_request(make_request("b", prompt, 4))
    step = scheduler.schedule()
    assert connector.named("lookup")[-1] == ("b", 8)
    assert scheduled(step) == {"b": 5}
    assert scheduler.requests["b"].num_cached_tokens == 16
    assert scheduler.requests["b"].num_external_computed_tokens == 8


def test_a_scored_prompt_is_not_offered():
    connector = ScriptedConnector(a=(8, True))
    scheduler = make(connector)
    scheduler.add_request(make_request("a", 11, prompt_logprobs=1))
    assert scheduled(scheduler.schedule()) == {"a": 11}
    assert connector.named("lookup") == []


def test_a_lookup_is_repeated_without_effect_until_there_is_room():
    connector = ScriptedConnector(big=(8, True))
    scheduler = make(connector, num_blocks=6)
    scheduler.add_request(make_request("small", 15, 9, ignore_eos=True))
    scheduler.add_request(make_request("big", 15))
    for _ in range(3):
        run_step(scheduler)
    assert connector.named("lookup").count(("big", 0)) == 3
    assert connector.named("alloc") == [("small", 0)]
    finish(scheduler, "small")
    scheduler.schedule()
    assert connector.named("alloc")[-1] == ("big", 8)


def test_an_overdue_lookup_counts_as_nothing():
    connector = ScriptedConnector(a=(None, False))
    scheduler = with_transfer(make(connector), kv_lookup_timeout_s=1e-9)
    scheduler.add_request(make_request("a", 11))
    assert scheduled(scheduler.schedule()) == {}
    assert scheduled(scheduler.schedule()) == {"a": 11}
    assert connector.named("cancel_lookup") == [("a",)]


def test_a_broken_lookup_counts_as_nothing():
    connector = ScriptedConnector(a=(8, True))
    connector.broken = {"lookup", "on_new_request"}
    scheduler = make(connector)
    scheduler.add_request(make_request("a", 11))
    assert scheduled(scheduler.schedule()) == {"a": 11}


def test_external_hits_are_counted_when_they_are_taken():
    connector = ScriptedConnector(a=(8, False))
    scheduler = make(connector, log_stats=True)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    scheduler.add_request(make_request("b", 5, 1))
    scheduler.schedule()
    stats = scheduler.transfers.take_stats()
    assert stats is not None
    assert (stats.queries, stats.hits) == (5, 0)


def test_nothing_is_fetched_twice():
    connector = ScriptedConnector(a=(8, True), b=(8, True))
    scheduler = make(connector)
    prompt = list(range(100, 111))
    scheduler.add_request(make_request("a", prompt, 1))
    scheduler.add_request(make_request("b", prompt, 1))
    scheduler.add_request(make_request("c", 5, 9, ignore_eos=True))
    assert scheduled(run_step(scheduler)) == {"c": 5}
    for _ in range(3):
        run_step(scheduler)
    # It waits without being asked about.
    assert connector.named("lookup").count(("b", 0)) == 1
    run_step(scheduler, received={"a"})
    connector.answers["b"] = (0, False)
    step = scheduler.schedule()
    assert scheduled(step) == {"c": 1, "a": 3, "b": 3}
    assert connector.named("lookup")[-1] == ("b", 8)
    assert connector.named("alloc")[-2:] == [("a", 0), ("b", 0)]


@pytest.mark.parametrize("ends", ["aborted", "failed"])
def test_who_waits_for_anothers_load_goes_on_when_that_ends_badly(ends: str):
    connector = ScriptedConnector(a=(8, True), b=(8, True))
    scheduler = make(connector)
    prompt = list(range(100, 111))
    for request_id in ("a", "b"):
        scheduler.add_request(make_request(request_id, prompt, 1))
    step = scheduler.schedule()
    if ends == "aborted":
        finish(scheduler, "a")
        scheduler.schedule()
    else:
        finish_step(scheduler, step, failed={"a"})
        scheduler.schedule()
    assert scheduler.requests["b"].status is REMOTE
    assert connector.named("alloc")[-1][0] == "b"


def test_loads_leave_what_prompts_that_have_begun_need():
    connector = ScriptedConnector(load=(8, True))
    for num_blocks, begins in ((8, True), (7, False)):
        scheduler = make(connector, num_blocks=num_blocks, long_prefill_token_threshold=8)
        scheduler.add_request(make_request("long", 20, 1))
        run_step(scheduler)
        scheduler.add_request(make_request("load", 8, 1))
        run_step(scheduler)
        # Four blocks are held, one more is spoken for, and the load takes two.
        assert len(table(scheduler, "long")) == 4
        assert (scheduler.requests["load"].status is REMOTE) == begins


def test_loads_hold_at_most_half_of_the_cache_while_somebody_runs():
    names = [f"l{i}" for i in range(5)]
    connector = ScriptedConnector(**dict.fromkeys(names, (16, True)))
    scheduler = make(connector, num_blocks=21)
    scheduler.add_request(make_request("run", 3, 9, ignore_eos=True))
    run_step(scheduler)
    for name in names:
        scheduler.add_request(make_request(name, 17, 1))
    run_step(scheduler)
    # Four blocks each: with the third, more than ten of twenty are held.
    assert list(scheduler.transfers.loads) == names[:3]


# -- completion ---------------------------------------------------------------------------------


def test_everything_but_the_last_token_can_be_loaded():
    connector = ScriptedConnector(a=(12, True))
    scheduler = make(connector)
    request = make_request("a", 12, 2, ignore_eos=True)
    scheduler.add_request(request)
    step = scheduler.schedule()
    assert len(table(scheduler, "a")) == 3
    finish_step(scheduler, step, received={"a"})
    assert request.status is REMOTE
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 1}
    assert step.scheduled_new_reqs[0].num_computed_tokens == 11
    assert request.num_cached_tokens == 11
    # The block of the last token is findable only now that it has been computed.
    assert fresh_lookup(scheduler, [*request.all_token_ids, 1]) == 12
    finish_step(scheduler, step)
    run_step(scheduler)
    scheduler.schedule()
    no_leak(scheduler)


def test_nothing_is_findable_before_it_has_arrived():
    connector = ScriptedConnector(a=(8, True))
    scheduler = make(connector)
    request = make_request("a", 11, 1)
    scheduler.add_request(request)
    step = scheduler.schedule()
    assert fresh_lookup(scheduler, request.all_token_ids) == 0
    finish_step(scheduler, step, received={"a"})
    scheduler.schedule()
    assert fresh_lookup(scheduler, request.all_token_ids) == 8


def test_a_load_inside_a_step_is_findable_when_the_step_has_come_back():
    connector = ScriptedConnector(a=(8, False))
    scheduler = make(connector)
    request = make_request("a", 13, 2, ignore_eos=True)
    scheduler.add_request(request)
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 5}
    # Neither what is loaded nor what is computed behind it.
    assert fresh_lookup(scheduler, request.all_token_ids) == 0
    finish_step(scheduler, step)
    assert fresh_lookup(scheduler, request.all_token_ids) == 12


def test_a_load_that_is_done_needs_no_place_to_be_noted():
    connector = ScriptedConnector(b=(8, True))
    scheduler = make(connector, max_num_seqs=1)
    scheduler.add_request(make_request("b", 11, 1))
    step = scheduler.schedule()
    scheduler.add_request(make_request("a", 5, 9, ignore_eos=True))
    finish_step(scheduler, step)
    run_step(scheduler)
    run_step(scheduler, received={"b"})
    scheduler.schedule()
    request = scheduler.requests["b"]
    assert (request.status, request.num_computed_tokens) == (RequestStatus.WAITING, 8)
    assert ids(scheduler.running) == ["a"]
    finish(scheduler, "a")
    assert scheduled(scheduler.schedule()) == {"b": 3}
    assert connector.named("lookup").count(("b", 0)) == 1


def test_requests_that_hold_kv_can_be_limited():
    connector = ScriptedConnector(a=(8, True), b=(8, True))
    scheduler = make(connector, max_num_active_seqs=1, max_num_seqs=2)
    for request_id in ("a", "b", "c"):
        scheduler.add_request(make_request(request_id, 11, 2, ignore_eos=True))
    run_step(scheduler)
    assert list(scheduler.transfers.loads) == ["a"]
    run_step(scheduler, received={"a"})
    assert scheduled(run_step(scheduler)) == {"a": 3}
    run_step(scheduler)
    run_step(scheduler, received={"b"})
    assert scheduled(run_step(scheduler)) == {"b": 3}
    with pytest.raises(ConfigError, match="max_num_active_seqs=0"):
        make(connector, max_num_active_seqs=0)


def test_who_waits_with_blocks_gives_them_to_who_runs():
    connector = ScriptedConnector(b=(8, True))
    scheduler = make(connector, max_num_seqs=1, num_blocks=6)
    scheduler.add_request(make_request("b", 11, 1))
    run_step(scheduler)
    scheduler.add_request(make_request("a", 11, 20, ignore_eos=True))
    run_step(scheduler, received={"b"})
    for _ in range(5):
        run_step(scheduler)
    assert scheduler.requests["b"].num_computed_tokens == 0
    assert table(scheduler, "b") == []
    assert ids(scheduler.running) == ["a"]


# -- failed loads -------------------------------------------------------------------------------


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
    assert len(scheduler.transfers.quarantined) == 2
    assert scheduled(step) == {"a": 11}
    assert not {b.block_id for b in scheduler.transfers.quarantined} & set(table(scheduler, "a"))


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


# -- ends ---------------------------------------------------------------------------------------


def test_every_end_is_told_once_with_its_status():
    connector = ScriptedConnector(load=(8, True))
    scheduler = make(connector, max_num_seqs=2)
    for request_id in ("load", "ends", "runs", "waits"):
        scheduler.add_request(make_request(request_id, 11, 1 if request_id == "ends" else 9))
    run_step(scheduler)
    finish(scheduler, "load", "runs", "waits", "ends")
    told = {call[0]: (call[1], call[2]) for call in connector.named("finished")}
    assert len(told) == len(connector.named("finished")) == 4
    assert told["ends"][1] is RequestStatus.FINISHED_LENGTH_CAPPED
    assert told["waits"] == (([],), RequestStatus.FINISHED_ABORTED)
    assert told["load"][0] == ([],)
    assert len(told["ends"][0][0]) == 3


def test_an_abort_during_a_load_may_wait_for_two_reports():
    connector = ScriptedConnector(a=(8, True))
    connector.keeps = {"a"}
    scheduler = make(connector)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    finish(scheduler, "a")
    assert scheduler.transfers.holds["a"].reasons == {"send", "recv"}
    run_step(scheduler, sent={"a"})
    assert scheduler.transfers.holds["a"].reasons == {"recv"}
    assert scheduler.has_transfers()
    run_step(scheduler, sent={"a"}, received={"a"})
    assert scheduler.transfers.num_unknown_reports == 1
    assert not scheduler.has_requests()
    no_leak(scheduler)


def test_a_load_that_was_reported_needs_no_hold():
    connector = ScriptedConnector(a=(8, True))
    scheduler = make(connector)
    request = make_request("a", 11, 1)
    scheduler.add_request(request)
    run_step(scheduler, received={"a"})
    finish(scheduler, "a")
    no_leak(scheduler)
    assert fresh_lookup(scheduler, request.all_token_ids) == 0


def test_only_blocks_with_kv_are_kept_for_sending():
    connector = ScriptedConnector()
    connector.keeps = {"a"}
    scheduler = make(connector)
    scheduler.num_lookahead_tokens = 9
    scheduler.add_request(make_request("a", 11, 3, ignore_eos=True))
    run_step(scheduler)
    run_step(scheduler)
    held = table(scheduler, "a")
    run_step(scheduler)
    ((_, block_ids, _),) = connector.named("finished")
    assert block_ids == (held[:4],)
    used = scheduler.kv_cache_manager.block_pool
    assert used.get_num_free_blocks() == scheduler.kv_cache_config.num_blocks - 1 - 4


def test_the_engine_is_busy_while_something_is_pushed():
    connector = ScriptedConnector()
    scheduler = make(connector)
    assert not scheduler.has_requests()
    connector.pending_pushes = 1
    assert scheduler.has_requests()


def test_a_preempted_request_is_looked_up_again():
    connector = ScriptedConnector()
    scheduler = make(connector, num_blocks=8)
    scheduler.add_request(make_request("a", 11, 20, ignore_eos=True))
    scheduler.add_request(make_request("b", 11, 20, ignore_eos=True))
    while scheduler.requests["b"].status is not RequestStatus.PREEMPTED:
        run_step(scheduler)
    connector.answers["b"] = (99, True)
    finish(scheduler, "a")
    scheduler.schedule()
    request = scheduler.requests["b"]
    assert request.status is REMOTE
    step = scheduler.schedule()
    finish_step(scheduler, step, received={"b"})
    step = scheduler.schedule()
    assert step.scheduled_cached_reqs.resumed_req_ids == {"b"}
    assert scheduled(step) == {"b": 1}


def test_a_load_never_gives_way():
    connector = ScriptedConnector(load=(16, True))
    scheduler = make(connector, num_blocks=9)
    scheduler.add_request(make_request("load", 17, 1))
    run_step(scheduler)
    scheduler.add_request(make_request("a", 11, 20, ignore_eos=True))
    for _ in range(8):
        run_step(scheduler)
    assert scheduler.requests["load"].status is REMOTE
    assert len(table(scheduler, "load")) == 4


def test_a_reset_cancels_loads_and_takes_back_blocks():
    connector = ScriptedConnector(a=(8, True))
    scheduler = make(connector)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    assert scheduler.reset_prefix_cache(reset_running_requests=True) is False
    assert connector.named("cancel_load") == [("a",)]
    run_step(scheduler, failed={"a"})
    run_step(scheduler)
    assert scheduler.reset_prefix_cache(reset_connector=True) is True
    assert connector.named("reset_cache") == [()]


def test_a_connector_that_breaks_everywhere_disturbs_nobody():
    connector = ScriptedConnector(a=(8, True), b=(8, False))
    connector.broken = {"on_new_request", "output", "finished", "reset_cache", "shutdown"}
    scheduler = make(connector)
    for request_id in ("a", "b", "c"):
        scheduler.add_request(make_request(request_id, 11, 2, ignore_eos=True))
    run_step(scheduler, received={"a"})
    while scheduler.has_requests():
        run_step(scheduler)
    assert scheduler.reset_prefix_cache(reset_connector=True) is False
    scheduler.shutdown()
    no_leak(scheduler)


def test_a_connector_that_cannot_take_blocks_ends_the_request_and_holds_nothing():
    connector = ScriptedConnector(a=(8, True))
    connector.broken = {"alloc"}
    scheduler = make(connector)
    scheduler.add_request(make_request("a", 11))
    step = scheduler.schedule()
    assert finish_step(scheduler, step)["a"].finish_reason is FinishReason.ERROR
    no_leak(scheduler)


def test_statistics_and_events_of_the_connector_are_passed_on():
    connector = ScriptedConnector()
    scheduler = make(connector, log_stats=True)
    scheduler.add_request(make_request("a", 11, 2))
    step = scheduler.schedule()
    scheduler._connector_stats = None
    messages_stats = []
    original = scheduler.make_stats
    scheduler.make_stats = lambda: messages_stats.append(original()) or messages_stats[-1]
    finish_step(scheduler, step, stats={"bytes": 7})
    assert messages_stats[0].kv_connector_stats == {"bytes": 7}
    assert scheduler.take_kv_cache_events() == ["event"]


def test_cross_attention_goes_without_a_connector():
    from jubako.scheduler.limits import check_hooks

    with pytest.raises(ConfigError, match="cross attention"):
        check_hooks(object(), is_encoder_decoder=True)
    check_hooks(None, is_encoder_decoder=True)


# -- whatever happens, the answers stay the same ------------------------------------------------


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


def test_violations_are_told_once(caplog):
    connector = ScriptedConnector(a=(-1, False), b=(0, True))
    scheduler = make(connector)
    with caplog.at_level("ERROR", logger=transfers_module.__name__):
        for request_id in ("a", "b"):
            scheduler.add_request(make_request(request_id, 5))
        scheduler.schedule()
    assert len(caplog.records) == 1
    assert "ScriptedConnector" in caplog.text


def test_a_request_object_is_not_needed_by_a_hold():
    connector = ScriptedConnector()
    connector.keeps = {"a"}
    scheduler = make(connector)
    request: Request = make_request("a", 5, 1)
    scheduler.add_request(request)
    run_step(scheduler)
    assert "a" not in scheduler.requests
    # The id may be used again as soon as the workers know.
    run_step(scheduler)
    scheduler.add_request(make_request("a", 5, 1))
