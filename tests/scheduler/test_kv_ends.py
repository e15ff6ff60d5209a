"""Requests with KV on its way in or out end: which blocks are kept, and until when?"""

from __future__ import annotations

import pytest

from jubako.errors import ConfigError, ValidationError
from jubako.scheduler import (
    FinishReason,
    Request,
    RequestStatus,
)
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.harness import finish, make_request, scheduled
from tests.scheduler.kv_loading import REMOTE, fresh_lookup, make, no_leak, table, with_transfer


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
    assert scheduler.transfers.holds.of_request["a"].reasons == {"send", "recv"}
    run_step(scheduler, sent={"a"})
    assert scheduler.transfers.holds.of_request["a"].reasons == {"recv"}
    assert scheduler.has_transfers()
    run_step(scheduler, sent={"a"}, received={"a"})
    assert scheduler.transfers.num_unknown_reports == 1
    assert not scheduler.has_requests()
    no_leak(scheduler)


def test_blocks_that_are_never_reported_as_sent_come_free_in_the_end(caplog):
    connector = ScriptedConnector()
    connector.keeps = {"a"}
    scheduler = with_transfer(make(connector), kv_send_timeout_s=1e-9)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    assert scheduler.has_requests()
    assert not scheduler.requests
    run_step(scheduler)
    assert connector.named("cancel_send") == [("a",)]
    assert "was not reported as sent" in caplog.text
    assert scheduler.transfers.holds.num_expired == 1
    assert not scheduler.has_requests()
    no_leak(scheduler)
    # A report that comes after all is about nothing, and frees nothing twice.
    run_step(scheduler, sent={"a"})
    assert scheduler.transfers.num_unknown_reports == 1
    no_leak(scheduler)


def test_a_pause_does_not_keep_blocks_from_coming_free():
    connector = ScriptedConnector()
    connector.keeps = {"a"}
    scheduler = with_transfer(make(connector), kv_send_timeout_s=1e-9)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    scheduler.pause()
    run_step(scheduler)
    no_leak(scheduler)


def test_only_overdue_holds_end():
    connector = ScriptedConnector()
    connector.keeps = {"a", "b"}
    scheduler = with_transfer(make(connector), kv_send_timeout_s=1e9)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    with_transfer(scheduler, kv_send_timeout_s=1e-9)
    scheduler.add_request(make_request("b", 11, 1))
    run_step(scheduler)
    run_step(scheduler)
    assert list(scheduler.transfers.holds.of_request) == ["a"]
    run_step(scheduler, sent={"a"})
    no_leak(scheduler)


def test_blocks_of_an_aborted_load_that_nobody_reports_are_never_used_again():
    connector = ScriptedConnector(a=(8, True))
    scheduler = with_transfer(make(connector), kv_load_timeout_s=1e9)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    held = table(scheduler, "a")
    with_transfer(scheduler, kv_load_timeout_s=1e-9)
    finish(scheduler, "a")
    # First its end is asked for, and it has as long again to be confirmed.
    run_step(scheduler)
    assert connector.named("cancel_load") == [("a",)]
    assert list(scheduler.transfers.holds.of_request) == ["a"]
    run_step(scheduler)
    assert not scheduler.has_requests()
    assert not scheduler.transfers.holds
    assert {b.block_id for b in scheduler.transfers.holds.quarantined} == set(held)
    run_step(scheduler, received={"a"})
    free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
    assert free == scheduler.kv_cache_config.num_blocks - 1 - len(held)


def test_a_cancelled_load_of_an_ended_request_that_is_confirmed_loses_nothing():
    connector = ScriptedConnector(a=(8, True))
    scheduler = with_transfer(make(connector), kv_load_timeout_s=1e9)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    with_transfer(scheduler, kv_load_timeout_s=1e-9)
    finish(scheduler, "a")
    run_step(scheduler, failed={"a"})
    assert connector.named("cancel_load") == [("a",)]
    no_leak(scheduler)


def test_overdue_sending_leaves_blocks_to_a_load_that_may_write_them():
    connector = ScriptedConnector(a=(8, True))
    connector.keeps = {"a"}
    scheduler = with_transfer(make(connector), kv_send_timeout_s=1e-9)
    scheduler.add_request(make_request("a", 11, 1))
    run_step(scheduler)
    finish(scheduler, "a")
    run_step(scheduler)
    assert scheduler.transfers.holds.of_request["a"].reasons == {"recv"}
    run_step(scheduler, received={"a"})
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
        check_hooks(object(), None, is_encoder_decoder=True)
    check_hooks(None, None, is_encoder_decoder=True)


def test_an_id_is_in_use_while_its_blocks_wait_for_a_report():
    connector = ScriptedConnector()
    connector.keeps = {"a"}
    scheduler = make(connector)
    request: Request = make_request("a", 5, 1)
    scheduler.add_request(request)
    run_step(scheduler)
    assert "a" not in scheduler.requests
    run_step(scheduler)
    # A report that comes now is about the blocks of this one, not of another with its id.
    with pytest.raises(ValidationError, match="in use"):
        scheduler.add_request(make_request("a", 5, 1))
    run_step(scheduler, sent={"a"})
    connector.keeps = set()
    scheduler.add_request(make_request("a", 5, 1))
    run_step(scheduler)
    run_step(scheduler)
    no_leak(scheduler)
