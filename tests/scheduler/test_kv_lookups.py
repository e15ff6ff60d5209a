"""How much KV can be had elsewhere: what a connector answers, and who asks again."""

from __future__ import annotations

import pytest

from jubako.scheduler import (
    external_lookup,
)
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.harness import finish, make_request, scheduled
from tests.scheduler.kv_loading import REMOTE, make, table, with_transfer


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


def test_violations_are_told_once(caplog):
    connector = ScriptedConnector(a=(-1, False), b=(0, True))
    scheduler = make(connector)
    with caplog.at_level("ERROR", logger=external_lookup.__name__):
        for request_id in ("a", "b"):
            scheduler.add_request(make_request(request_id, 5))
        scheduler.schedule()
    assert len(caplog.records) == 1
    assert "ScriptedConnector" in caplog.text
