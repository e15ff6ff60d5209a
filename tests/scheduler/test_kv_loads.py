"""KV that comes from elsewhere and arrives: when is it found, and what may the request do?"""

from __future__ import annotations

import pytest

from jubako.errors import ConfigError
from jubako.scheduler import (
    RequestStatus,
)
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.harness import finish, ids, make_request, scheduled
from tests.scheduler.kv_loading import REMOTE, fresh_lookup, make, no_leak, table


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
