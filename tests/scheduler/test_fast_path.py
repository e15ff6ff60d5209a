"""Leaving out calls that would change nothing changes nothing."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jubako.scheduler import DraftTokenIds, Request, Scheduler
from tests.scheduler.harness import Driver, make_request, make_scheduler, next_token


class ThoroughScheduler(Scheduler):
    """Takes every request the general way in every step, and lets nothing be skipped."""

    def schedule(self) -> Any:
        self._steady.clear(self.running)
        for request in self.requests.values():
            request.kv_event_tokens = 0
        for edges in self.kv_cache_manager._edges.values():
            edges.event = edges.hash = 0
        return super().schedule()


def state_of(scheduler: Scheduler) -> dict[str, Any]:
    """Everything about blocks that could differ."""
    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    return {
        "tables": {i: manager.get_block_ids(i) for i in scheduler.requests},
        "free": [block.block_id for block in pool.free_block_queue.get_all_free_blocks()],
        "hashed": [block.block_hash for block in pool.blocks],
        "references": [block.ref_cnt for block in pool.blocks if not block.is_null],
    }


def run(scheduler: Scheduler, seed: int) -> list[Any]:
    """Random traffic; all records and the state of the blocks after every step."""
    rng = random.Random(seed)
    driver = Driver(scheduler)
    history: list[Any] = []
    count = 0
    for _ in range(60):
        if rng.random() < 0.35:
            shared = list(range(rng.randrange(2) * 50, 80))[: rng.randrange(12)]
            prompt = shared + [200 + count] * rng.randrange(1, 8)
            driver.add(make_request(f"r{count}", prompt, rng.randrange(1, 25)))
            count += 1
        if rng.random() < 0.1 and scheduler.requests:
            driver.abort(rng.choice(sorted(scheduler.requests)))
        if rng.random() < 0.2:
            draft(scheduler, rng)
        step = driver.step()
        history.append(
            (
                step.num_scheduled_tokens,
                [(data.req_id, data.block_ids) for data in step.scheduled_new_reqs],
                step.scheduled_cached_reqs,
                step.preempted_req_ids,
                state_of(scheduler),
            )
        )
    driver.run()
    driver.check_answers()
    return history


def without_order(history: list[Any]) -> list[Any]:
    """The history, but for which of the free blocks was taken."""
    return [
        (
            num_scheduled,
            [(req_id, list(map(len, tables))) for req_id, tables in new],
            cached.req_ids,
            cached.num_computed_tokens,
            [tables and list(map(len, tables)) for tables in cached.new_block_ids],
            preempted,
            {i: [[bool(b) for b in t] for t in tables] for i, tables in state["tables"].items()},
            len(state["free"]),
            sorted(state["references"]),
        )
        for num_scheduled, new, cached, preempted, state in history
    ]


def draft(scheduler: Scheduler, rng: random.Random) -> None:
    req_ids, drafts = [], []
    for request in scheduler.running:
        tokens = list(request.all_token_ids)
        for _ in range(rng.randrange(3)):
            tokens.append(next_token(tokens))
        req_ids.append(request.request_id)
        drafts.append(tokens[request.num_tokens :] + [99] * rng.randrange(2))
    scheduler.update_draft_token_ids(DraftTokenIds(req_ids, drafts))


@pytest.mark.parametrize("window", [None, 3, 6])
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("lookahead", [0, 2])
@pytest.mark.parametrize("unhashed_first", [True, False])
def test_records_and_blocks_are_the_same_with_and_without_skipping(
    window, caching, lookahead, unhashed_first
):
    for seed in range(6):
        histories = []
        for scheduler_class in (Scheduler, ThoroughScheduler):
            scheduler = make_scheduler(
                scheduler_class=scheduler_class,
                num_blocks=40,
                max_model_len=48,
                window=window,
                caching=caching,
                max_num_batched_tokens=20,
                max_num_seqs=5,
            )
            scheduler.num_lookahead_tokens = lookahead
            scheduler.kv_cache_manager.block_pool.free_unhashed_first = unhashed_first
            # The same block hashes in both, whatever the seed of the process.
            histories.append(run(scheduler, seed))
        if unhashed_first and window and not caching:
            # One by one, a request takes what the one before it has just let go of.
            histories = [without_order(history) for history in histories]
        assert histories[0] == histories[1]


def test_decodes_inside_a_block_ask_for_nothing(monkeypatch):
    scheduler = make_scheduler(block_size=16, max_num_batched_tokens=256)
    driver = Driver(scheduler)
    driver.add(*(make_request(f"r{i}", 17, 40, ignore_eos=True) for i in range(8)))
    driver.step()
    asked: list[Request] = []
    manager = scheduler.kv_cache_manager
    allocate, grow = manager.allocate_slots, manager.grow_decodes

    def counting(request, *args, **kwargs):
        asked.append(request)
        return allocate(request, *args, **kwargs)

    def counting_all(requests, *args):
        asked.extend(requests)
        return grow(requests, *args)

    monkeypatch.setattr(manager, "allocate_slots", counting)
    monkeypatch.setattr(manager, "grow_decodes", counting_all)
    driver.run(14)
    assert asked == []
    driver.run(2)
    # Token 32 fills a block, which becomes findable; token 33 needs another.
    assert len(asked) == 16
