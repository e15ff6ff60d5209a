"""Requests that wait for an event cost nothing until it comes, and keep their place."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jubako.config import JubakoConfig, LoRAConfig, ModelConfig, SchedulerConfig
from jubako.kv_cache import KVCacheConfig, KVCacheGroupSpec
from jubako.scheduler import (
    FCFSRequestQueue,
    FinishReason,
    LoRARequest,
    PriorityRequestQueue,
    Request,
    RequestStatus,
    Scheduler,
)
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.harness import (
    finish,
    full_spec,
    ids,
    make_request,
    make_scheduler,
    scheduled,
)


class EventGrammars:
    """Grammars that tell when they are ready. Methods named in `broken` raise."""

    def __init__(self) -> None:
        self.ready: list[str] = []
        self.done: set[str] = set()
        self.bad: set[str] = set()
        self.broken: set[str] = set()
        self.asked: list[str] = []
        self.released: list[str] = []

    def compile(self, *request_ids: str) -> None:
        self.ready += request_ids
        self.done |= set(request_ids)

    def take_ready(self) -> list[str]:
        if "take_ready" in self.broken:
            raise RuntimeError("broken")
        ready, self.ready = self.ready, []
        return ready

    def is_ready(self, request: Request) -> bool:
        self.asked.append(request.request_id)
        if request.request_id in self.bad:
            raise ValueError("does not compile")
        return request.request_id in self.done

    def grammar_bitmask(self, requests: Any, drafts: Any) -> Any:
        if any(r.request_id in self.broken for r in requests):
            raise RuntimeError("broken")
        return np.full((len(requests), 1), -1, dtype=np.int32)

    def accept_tokens(self, request: Request, token_ids: Any) -> None: ...

    def validate_drafts(self, request: Request, token_ids: list[int]) -> list[int]:
        if request.request_id in self.broken:
            raise RuntimeError("broken")
        return token_ids

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)
        if "release" in self.broken:
            raise RuntimeError("broken")


def with_grammar(request_id: str, **options: Any) -> Request:
    request = make_request(request_id, 5, 9, ignore_eos=True, **options)
    request.uses_grammar = True
    request.status = RequestStatus.WAITING_FOR_FSM
    return request


def with_adapter(request_id: str, adapter: int, max_tokens: int = 9, **options: Any) -> Request:
    request = make_request(request_id, 5, max_tokens, ignore_eos=True, **options)
    request.lora_request = LoRARequest(f"adapter{adapter}", adapter)
    return request


# -- the queue ----------------------------------------------------------------------------------


@pytest.mark.parametrize("queue_class", [FCFSRequestQueue, PriorityRequestQueue])
def test_a_blocked_request_keeps_its_place(queue_class):
    queue = queue_class()
    requests = [make_request(f"r{i}", 1, arrival=float(i)) for i in range(5)]
    for request in requests:
        queue.add(request)
    queue.block(requests[1])
    queue.block(requests[0])
    queue.block(requests[0])
    assert ids(queue) == ["r0", "r1", "r2", "r3", "r4"]
    assert (len(queue), ids(queue.first(2))) == (5, ["r2", "r3"])
    assert queue.peek() is requests[2]
    assert queue.is_blocked(requests[0])
    assert requests[0] in queue
    queue.unblock(requests[1])
    queue.unblock(requests[1])
    queue.unblock(requests[4])
    assert ids(queue.first(9)) == ["r1", "r2", "r3", "r4"]
    queue.remove(requests[0])
    assert queue.pop() is requests[1]
    for request in list(queue):
        queue.block(request)
    assert not queue.has_ready
    with pytest.raises(IndexError):
        queue.peek()
    with pytest.raises(KeyError):
        queue.block(requests[0])


def test_who_comes_back_stands_before_all_that_wait_blocked_or_not():
    queue = FCFSRequestQueue()
    first, second, back = (make_request(name, 1) for name in ("first", "second", "back"))
    queue.add(first)
    queue.add(second)
    queue.block(first)
    queue.put_back([back])
    queue.unblock(first)
    assert ids(queue) == ["back", "first", "second"]


# -- grammars -----------------------------------------------------------------------------------


def test_a_waiting_grammar_is_asked_about_when_something_happens_to_it():
    grammars = EventGrammars()
    scheduler = make_scheduler(hooks={"structured_output_manager": grammars})
    for count in range(3):
        scheduler.add_request(with_grammar(f"g{count}"))
    scheduler.add_request(make_request("a", 5, 9, ignore_eos=True))
    assert scheduled(run_step(scheduler)) == {"a": 5}
    # Once at the beginning: they might have been ready before they came.
    assert grammars.asked == ["g0", "g1", "g2"]
    for _ in range(4):
        run_step(scheduler)
    assert len(grammars.asked) == 3
    grammars.compile("g2", "g1")
    assert list(scheduled(run_step(scheduler))) == ["a", "g1", "g2"]
    assert ids(scheduler.waiting) == ["g0"]


def test_a_grammar_that_was_ready_before_its_request_came():
    grammars = EventGrammars()
    grammars.done = {"g"}
    scheduler = make_scheduler(hooks={"structured_output_manager": grammars})
    scheduler.add_request(with_grammar("g"))
    assert scheduled(scheduler.schedule()) == {"g": 5}


def test_grammars_that_fail_end_their_own_requests_wherever_they_fail():
    grammars = EventGrammars()
    scheduler = make_scheduler(hooks={"structured_output_manager": grammars})
    for name in ("compiles", "masks", "drafts", "good"):
        scheduler.add_request(with_grammar(name))
    grammars.bad = {"compiles"}
    grammars.compile("compiles", "masks", "drafts", "good")
    step = scheduler.schedule()
    grammars.broken = {"masks"}
    mask = scheduler.get_grammar_bitmask(step)
    assert mask is not None
    assert mask.structured_output_request_ids == ["drafts", "good"]
    assert mask.grammar_bitmask.shape == (2, 1)
    outputs = finish_step(scheduler, step)
    assert {name: o.finish_reason for name, o in outputs.items()} == {
        "compiles": FinishReason.ERROR,
        "masks": FinishReason.ERROR,
        "drafts": None,
        "good": None,
    }
    from jubako.scheduler import DraftTokenIds

    grammars.broken = {"drafts", "release", "take_ready"}
    scheduler.update_draft_token_ids(DraftTokenIds(["drafts", "good"], [[1], [2]]))
    step = scheduler.schedule()
    assert step.scheduled_spec_decode_tokens == {"good": [2]}
    outputs = finish_step(scheduler, step)
    assert outputs["drafts"].finish_reason is FinishReason.ERROR
    assert sorted(grammars.released) == ["compiles", "drafts", "masks"]


def test_without_any_mask_left_there_is_none():
    grammars = EventGrammars()
    scheduler = make_scheduler(hooks={"structured_output_manager": grammars})
    scheduler.add_request(with_grammar("g"))
    grammars.compile("g")
    step = scheduler.schedule()
    grammars.broken = {"g"}
    assert scheduler.get_grammar_bitmask(step) is None
    assert finish_step(scheduler, step)["g"].finish_reason is FinishReason.ERROR


# -- loads --------------------------------------------------------------------------------------


def test_a_load_is_not_looked_at_before_it_is_reported(monkeypatch):
    connector = ScriptedConnector(a=(8, True), b=(8, True))
    scheduler = make_scheduler(hooks={"connector": connector})
    for request_id in ("a", "b"):
        scheduler.add_request(make_request(request_id, 11, 1))
    run_step(scheduler)
    looked_at: list[str] = []
    original = scheduler._is_unblocked
    monkeypatch.setattr(
        scheduler,
        "_is_unblocked",
        lambda request: looked_at.append(request.request_id) or original(request),
    )
    for _ in range(5):
        run_step(scheduler)
    assert looked_at == []
    run_step(scheduler, received={"b"})
    assert scheduled(run_step(scheduler)) == {"b": 3}
    assert looked_at == ["b"]


# -- adapters -----------------------------------------------------------------------------------


def lora_scheduler(max_loras: int) -> Scheduler:
    return Scheduler(
        JubakoConfig(
            model_config=ModelConfig(max_model_len=64),
            scheduler_config=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=16),
            lora_config=LoRAConfig(max_loras=max_loras),
        ),
        KVCacheConfig(num_blocks=99, kv_cache_groups=[KVCacheGroupSpec(["l"], full_spec(4))]),
        log_stats=True,
    )


def test_adapters_beyond_the_limit_wait_without_being_looked_at():
    scheduler = lora_scheduler(2)
    for name, adapter in (("a", 1), ("b", 2), ("c", 3), ("d", 1), ("e", 3), ("f", 4)):
        scheduler.add_request(with_adapter(name, adapter, 2 if name == "a" else 9))
    assert list(scheduled(run_step(scheduler))) == ["a", "b", "d"]
    assert not scheduler.waiting.has_ready
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.running_lora_adapters == {"adapter1": 2, "adapter2": 1}
    assert stats.waiting_lora_adapters == {"adapter3": 2, "adapter4": 1}
    run_step(scheduler)
    # "a" is gone, but "d" still has its adapter.
    assert list(scheduled(run_step(scheduler))) == ["b", "d"]
    finish(scheduler, "d")
    assert list(scheduled(run_step(scheduler))) == ["b", "c", "e"]
    assert ids(scheduler.waiting) == ["f"]
    finish(scheduler, "b", "f", "c", "e")
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.running_lora_adapters == stats.waiting_lora_adapters == {}


def test_who_waits_for_a_place_is_not_forgotten_when_the_one_before_it_leaves():
    scheduler = lora_scheduler(1)
    for name, adapter in (("a", 1), ("b", 2), ("c", 3)):
        scheduler.add_request(with_adapter(name, adapter))
    run_step(scheduler)
    finish(scheduler, "a", "b")
    assert scheduled(run_step(scheduler)) == {"c": 5}


def test_who_waits_for_an_adapter_goes_on_when_somebody_else_brings_it_in():
    scheduler = make_scheduler(scheduling_policy="priority")
    scheduler.max_loras = 1
    for name, adapter, priority in (("a", 1, 0), ("b", 2, 1), ("c", 3, 2)):
        scheduler.add_request(with_adapter(name, adapter, priority=priority))
    assert list(scheduled(run_step(scheduler))) == ["a"]
    finish(scheduler, "a")
    scheduler.add_request(with_adapter("urgent", 3, priority=0))
    assert list(scheduled(run_step(scheduler))) == ["urgent", "c"]
    assert ids(scheduler.waiting) == ["b"]


def test_a_preempted_request_gives_its_adapters_place_back():
    scheduler = make_scheduler(num_blocks=6)
    scheduler.max_loras = 2
    for name, adapter in (("a", 1), ("b", 2)):
        scheduler.add_request(with_adapter(name, adapter, 20))
    while "b" in ids(scheduler.running) or "a" not in ids(scheduler.running):
        run_step(scheduler)
    assert scheduler.adapters.num_running == {"adapter1": 1}
    assert scheduler.adapters.num_waiting == {"adapter2": 1}


def test_a_limit_of_no_adapters_is_refused():
    from jubako.errors import ConfigError

    with pytest.raises(ConfigError, match="max_loras=0"):
        LoRAConfig(max_loras=0)


# -- pauses -------------------------------------------------------------------------------------


def test_while_paused_nothing_is_scheduled_and_arrivals_queue_up():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, 9, ignore_eos=True))
    run_step(scheduler)
    run_step(scheduler)
    scheduler.pause()
    assert scheduler.is_paused
    scheduler.add_request(make_request("b", 5, 9, ignore_eos=True))
    assert scheduled(run_step(scheduler)) == {}
    # Its loop may sleep, though requests are unfinished.
    assert not scheduler.has_requests()
    assert not scheduler.has_schedulable_requests()
    assert scheduler.has_unfinished_requests()
    assert scheduler.get_request_counts() == (1, 1)
    scheduler.resume()
    step = run_step(scheduler)
    assert scheduled(step) == {"a": 1, "b": 5}
    assert list(step.scheduled_cached_reqs.all_token_ids) == ["a"]


def test_a_paused_scheduler_still_tells_of_ends_and_takes_results():
    connector = ScriptedConnector()
    connector.keeps = {"a"}
    scheduler = make_scheduler(hooks={"connector": connector})
    scheduler.add_request(make_request("a", 5, 9, ignore_eos=True))
    step = scheduler.schedule()
    scheduler.pause()
    assert finish_step(scheduler, step)["a"].new_token_ids == [3]
    finish(scheduler, "a")
    assert scheduler.has_requests()
    assert run_step(scheduler).finished_req_ids == {"a"}
    # The blocks are still being sent.
    assert scheduler.has_requests()
    run_step(scheduler, sent={"a"})
    assert not scheduler.has_requests()
