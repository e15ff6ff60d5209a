"""The account of encoder outputs under random requests, evictions, hits and undone steps.

A worker's copy is kept beside it: what is dropped, encoded and expected to be there.
"""

from __future__ import annotations

import os
from random import Random

import pytest

from jubako.scheduler import (
    EncoderCacheManager,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
)
from jubako.scheduler.encoder_decoder_cache import EncoderDecoderCacheManager
from jubako.scheduler.encoder_scheduling import commit, plan_encoder_chunk, release_claims
from tests.scheduler.harness import Driver, make_request, make_scheduler

NIGHTLY = os.environ.get("JUBAKO_NIGHTLY") == "1"
SIZES = {"A": 3, "B": 5, "C": 7, "D": 12, "E": 12, "F": 1}


def request_with(request_id: str, names: str, gap: int = 2) -> Request:
    features, position = [], gap
    for name in names:
        place = PlaceholderRange(position, SIZES[name])
        features.append(MultiModalFeatureSpec(None, "image", name, place))
        position += SIZES[name] + gap
    return Request(request_id, list(range(position)), mm_features=features)


class Played:
    """Prompts are computed in chunks, each of which may be undone before its step runs."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.capacity = rng.randint(12, 40)
        self.cache = EncoderCacheManager(self.capacity)
        self.live: dict[str, tuple[Request, int]] = {}
        self.on_worker: set[str] = set()
        self.count = 0

    def arrive(self) -> None:
        names = "".join(self.rng.choice("ABCDEF") for _ in range(self.rng.randint(1, 4)))
        request = request_with(f"r{self.count}", names)
        self.live[request.request_id] = (request, 0)
        self.count += 1

    def step(self) -> None:
        cache, rng = self.cache, self.rng
        cache.new_step_starts()
        budget = self.rng.randint(12, 24)
        planned: dict[str, tuple[Request, int, list[int]]] = {}
        held_before = {i: cache.get_cached_input_ids(r) for i, (r, _) in self.live.items()}
        for request_id, (request, start) in list(self.live.items()):
            want = min(rng.randint(1, 20), request.num_tokens - start)
            chunk = plan_encoder_chunk(
                request, start, want, budget, cache, split_items=True, shift=rng.choice([0, 0, 1])
            )
            if chunk.num_new_tokens <= 0 or rng.random() < 0.2:
                release_claims(request, chunk, cache)
                assert cache.get_cached_input_ids(request) == held_before[request_id]
                continue
            commit(request, chunk, cache)
            budget = chunk.compute_budget
            planned[request_id] = (request, start + chunk.num_new_tokens, chunk.inputs)
        self._undo_some(planned)
        evicted = cache.get_freed_mm_hashes()
        encoded = [r.mm_features[i].identifier for r, _, inputs in planned.values() for i in inputs]
        assert len(encoded) == len(set(encoded))
        self.on_worker -= set(evicted)
        assert self.on_worker.isdisjoint(encoded)
        self.on_worker |= set(encoded)
        # Exactly what the account says is on the worker.
        assert self.on_worker == set(cache.cached)
        for request_id, (request, stop, _) in planned.items():
            self._finish_chunk(request_id, request, stop)

    def _undo_some(self, planned: dict[str, tuple[Request, int, list[int]]]) -> None:
        """Preemptions inside the step: whoever counts on the victim's work takes over."""
        for request_id in list(planned):
            if self.rng.random() < 0.2:
                request, _, inputs = planned.pop(request_id)
                for _, (heir_id, input_id) in self.cache.rollback(request, inputs):
                    assert heir_id in planned
                    planned[heir_id][2].append(input_id)
                assert self.cache.get_cached_input_ids(request) == set()
                self.live[request_id] = (request, 0)

    def _finish_chunk(self, request_id: str, request: Request, stop: int) -> None:
        start = self.live[request_id][1]
        self.live[request_id] = (request, stop)
        for input_id, feature in enumerate(request.mm_features):
            place = feature.mm_position
            if place.offset < stop and place.offset + place.length > start:
                assert feature.identifier in self.on_worker
            if place.offset + place.length <= stop:
                self.cache.free_encoder_input(request, input_id)
        if stop == request.num_tokens:
            self.leave(request_id)

    def leave(self, request_id: str) -> None:
        request, _ = self.live.pop(request_id)
        self.cache.free(request)
        assert self.cache.get_cached_input_ids(request) == set()

    def check(self) -> None:
        cache = self.cache
        used = sum(SIZES[identifier] for identifier in cache.cached)
        assert cache.num_free_slots + used == self.capacity
        assert set(cache.freeable) == {i for i, refs in cache.cached.items() if not refs}
        assert cache.num_freeable_slots == cache.num_free_slots + sum(cache.freeable.values())
        assert 0 <= cache.num_free_slots <= cache.num_freeable_slots <= self.capacity
        assert cache.usage == used / self.capacity


@pytest.mark.parametrize("seed", range(600 if NIGHTLY else 40))
def test_the_account_is_what_the_worker_has(seed: int):
    rng = Random(seed)
    played = Played(rng)
    for _ in range(60):
        if len(played.live) < 5 and rng.random() < 0.5:
            played.arrive()
        if played.live and rng.random() < 0.1:
            played.leave(rng.choice(list(played.live)))
        played.step()
        played.check()
    for request_id in list(played.live):
        played.leave(request_id)
    assert played.cache.num_freeable_slots == played.capacity


@pytest.mark.parametrize("seed", range(200 if NIGHTLY else 30))
def test_outputs_of_an_encoder_decoder_never_exceed_the_cache(seed: int):
    """However often and in whatever order they are given back."""
    rng = Random(seed)
    capacity = rng.randint(12, 40)
    cache = EncoderDecoderCacheManager(capacity)
    held: dict[tuple[str, int], int] = {}
    requests = [request_with(f"r{i}", rng.choice(["A", "BC", "D", "AFB"])) for i in range(6)]
    told: list[list[str]] = []
    for _ in range(80):
        cache.new_step_starts()
        begun: list[str] = []
        for request in rng.sample(requests, 3):
            index = rng.randrange(len(request.mm_features))
            assert not cache.check_and_update_cache(request, index)
            size = request.media_embeds[index]
            key = (request.request_id, index)
            fits = cache.can_allocate(request, index, 99, 0)
            assert fits == (size <= capacity - sum(held.values()))
            if fits and key not in held and rng.random() < 0.7:
                cache.allocate(request, index)
                held[key] = size
                begun.append(request.mm_features[index].identifier)
        told.append(begun)
        freed = cache.get_freed_mm_hashes()
        # What a step encodes is dropped at the beginning of the next.
        assert sorted(freed) == sorted(told[-2] if len(told) > 1 else [])
        for _ in range(3):
            request = rng.choice(requests)
            if rng.random() < 0.5:
                cache.free(request)
                for key in [k for k in held if k[0] == request.request_id]:
                    del held[key]
            else:
                index = rng.randrange(len(request.mm_features))
                cache.free_encoder_input(request, index)
                held.pop((request.request_id, index), None)
        assert cache.num_free_slots == capacity - sum(held.values())
        assert cache.num_free_slots <= capacity


def test_a_victim_that_only_found_an_output_leaves_it_to_who_computes_it():
    cache = EncoderCacheManager(40)
    first, victim = request_with("first", "A"), request_with("victim", "A")
    cache.allocate(first, 0)
    assert cache.check_and_update_cache(victim, 0)
    # The victim was to compute nothing.
    assert cache.rollback(victim, []) == []
    assert cache.cached == {"A": {("first", 0)}}


def test_a_victim_with_two_equal_items_has_one_heir():
    cache = EncoderCacheManager(40)
    victim, other = request_with("victim", "AA"), request_with("other", "A")
    cache.allocate(victim, 0)
    cache.allocate(victim, 1)
    assert cache.check_and_update_cache(other, 0)
    assert cache.rollback(victim, [0]) == [("A", ("other", 0))]
    assert cache.cached == {"A": {("other", 0)}}


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_request_that_gives_way_inside_an_item_gives_it_back(policy: str):
    scheduler = make_scheduler(
        num_blocks=8,
        max_model_len=28,
        max_num_batched_tokens=8,
        scheduling_policy=policy,
        max_num_encoder_input_tokens=16,
        encoder_cache_size=16,
        watermark=0.0,
        scheduler_reserve_full_isl=False,
    )
    driver = Driver(scheduler)
    driver.add(make_request("grows", 7, 20, ignore_eos=True))
    driver.step()
    place = PlaceholderRange(3, 16)
    item = MultiModalFeatureSpec(None, "image", "A", place)
    slow = make_request("slow", 24, 2, arrival=1.0, ignore_eos=True)
    driver.add(Request("slow", slow.prompt_token_ids, slow.sampling_params, mm_features=[item]))
    cache = scheduler.encoder_cache_manager
    while scheduler.requests["slow"].num_preemptions == 0:
        driver.step()
        assert len(driver.outputs["grows"]) < 20
    # Its step that gave way had begun the item.
    assert cache.cached == {"A": set()}
    assert cache.num_freeable_slots == 16
    driver.run()
    driver.check_answers()


def test_one_clip_never_makes_a_cache_larger():
    cache = EncoderDecoderCacheManager(3000)
    place = PlaceholderRange(0, 1500)
    clip = Request(
        "clip", [1, 2, 3], mm_features=[MultiModalFeatureSpec(None, "audio", "A", place)]
    )
    cache.allocate(clip, 0)
    assert cache.num_free_slots == 1500
    for _ in range(4):
        cache.free_encoder_input(clip, 0)
    cache.free(clip)
    assert cache.num_free_slots == 3000
