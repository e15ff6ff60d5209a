"""The account of encoder outputs, and which of them a chunk of a prompt needs."""

from __future__ import annotations

import random

import pytest

from jubako.errors import ValidationError
from jubako.scheduler import (
    EncoderCacheManager,
    ModelRunnerOutput,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
)
from jubako.scheduler.encoder_scheduling import commit, plan_encoder_chunk, release_claims
from tests.scheduler.harness import make_scheduler, result_for, scheduled


def item(identifier: str, offset: int, length: int, mask: tuple[int, int] | None = None):
    """A media item; `mask` is the part of it that takes embeddings, relative to its offset."""
    is_embed = None
    if mask is not None:
        is_embed = [mask[0] <= i < mask[1] for i in range(length)]
    return MultiModalFeatureSpec(
        None, "image", identifier, PlaceholderRange(offset, length, is_embed)
    )


def with_media(request_id: str, *items: MultiModalFeatureSpec, length: int = 2000) -> Request:
    return Request(request_id, list(range(length)), mm_features=list(items))


# -- the cache ----------------------------------------------------------------------------------


def test_worked_example_of_sharing_release_and_eviction():
    cache = EncoderCacheManager(1000)
    a, b, c, d, e = (item(name, 0, size) for name, size in zip("ABCDE", (300, 400, 256, 500, 300)))
    r1, r2 = with_media("r1", a), with_media("r2", a, b)
    r3, r4, r5 = with_media("r3", c), with_media("r4", d), with_media("r5", e)

    def state():
        return cache.num_free_slots, cache.num_freeable_slots

    cache.allocate(r1, 0)
    assert state() == (700, 700)
    assert cache.check_and_update_cache(r2, 0)
    assert state() == (700, 700)
    cache.allocate(r2, 1)
    assert state() == (300, 300)
    cache.free_encoder_input(r1, 0)
    assert state() == (300, 300)
    cache.free(r2)
    assert state() == (300, 1000)
    assert list(cache.freeable) == ["A", "B"]
    cache.allocate(r3, 0)
    assert state() == (44, 744)
    assert cache.can_allocate(r4, 0, 10_000, 0)
    assert state() == (744, 744)
    assert cache.freed == ["A", "B"]
    cache.allocate(r4, 0)
    assert state() == (244, 244)
    assert not cache.can_allocate(r5, 0, 10_000, 0)
    assert state() == (244, 244)
    assert cache.get_freed_mm_hashes() == ["A", "B"]
    assert cache.get_freed_mm_hashes() == []
    assert cache.get_cached_input_ids(r3) == {0}


def test_two_equal_items_of_a_prompt_are_two_references():
    cache = EncoderCacheManager(100)
    request = with_media("r", item("A", 0, 60), item("A", 100, 60))
    cache.allocate(request, 0)
    cache.allocate(request, 1)
    assert cache.num_free_slots == 40
    cache.free_encoder_input(request, 0)
    cache.free_encoder_input(request, 0)
    assert cache.num_freeable_slots == 40
    cache.free_encoder_input(request, 1)
    assert cache.num_freeable_slots == 100


def test_rollback_removes_what_nobody_else_needs_and_names_the_heir_of_the_rest():
    cache = EncoderCacheManager(100)
    first = with_media("first", item("A", 0, 10), item("B", 20, 10))
    second = with_media("second", item("B", 0, 10))
    cache.allocate(first, 0)
    cache.allocate(first, 1)
    assert cache.check_and_update_cache(second, 0)
    assert cache.rollback(first, [0, 1]) == [("B", ("second", 0))]
    assert set(cache.cached) == {"B"}
    assert cache.num_free_slots == 90
    cache.new_step_starts()
    # What an earlier step computed stays findable.
    assert cache.rollback(second, [0]) == []
    assert set(cache.cached) == {"B"}
    cache.drop("B")
    cache.drop("B")
    assert (cache.num_free_slots, cache.num_freeable_slots) == (100, 100)


def test_account_always_balances():
    for seed in range(30):
        rng = random.Random(seed)
        cache = EncoderCacheManager(50)
        requests = [
            with_media(f"r{i}", *(item(rng.choice("ABCDEF"), j * 30, 0) for j in range(3)))
            for i in range(4)
        ]
        sizes = {name: rng.randrange(1, 25) for name in "ABCDEF"}
        for request in requests:
            request.media_embeds = [sizes[f.identifier] for f in request.mm_features]
        for _ in range(80):
            request, index = rng.choice(requests), rng.randrange(3)
            action = rng.randrange(5)
            if action == 0:
                cache.new_step_starts()
                cache.free(request)
            elif action == 1:
                cache.free_encoder_input(request, index)
            elif action == 2:
                cache.drop(rng.choice("ABCDEF"))
            elif not cache.check_and_update_cache(request, index) and cache.can_allocate(
                request, index, 1000, 0
            ):
                cache.allocate(request, index)
            held = sum(sizes[name] for name in cache.cached)
            assert cache.num_free_slots + held == 50
            assert cache.num_freeable_slots == cache.num_free_slots + sum(cache.freeable.values())
            assert set(cache.freeable) == {n for n, refs in cache.cached.items() if not refs}
        for request in requests:
            cache.free(request)
        assert cache.num_freeable_slots == 50


# -- chunks -------------------------------------------------------------------------------------

MASK = (2, 258)


class Remote:
    """An encoder-cache connector that has some items."""

    def __init__(self, *identifiers: str) -> None:
        self.identifiers = identifiers
        self.loads: list[int] = []

    def has_cache_item(self, identifier: str) -> bool:
        return identifier in self.identifiers

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        self.loads.append(index)

    def build_connector_meta(self, scheduler_output):
        loads, self.loads = self.loads, []
        return loads

    def update_connector_output(self, output): ...

    def request_finished(self, request):
        return False, None

    def shutdown(self): ...


@pytest.mark.parametrize(
    ("start", "count", "budget", "items", "options", "inputs", "tokens", "left"),
    [
        (0, 12, 2048, [item("A", 10, 260, MASK)], {}, [], 12, 2048),
        (0, 13, 2048, [item("A", 10, 260, MASK)], {}, [0], 13, 1792),
        (0, 600, 300, [item("A", 10, 260), item("B", 300, 260)], {}, [0], 300, 40),
        (0, 600, 100, [item("A", 0, 260)], {}, [], 0, 100),
        (64, 300, 2048, [item("A", 10, 260)], {"cache": 100}, [], 0, 2048),
        (0, 100, 2048, [item("A", 10, 260)], {"split_items": False}, [], 10, 2048),
        (10, 100, 2048, [item("A", 10, 260)], {"split_items": False}, [], 0, 2048),
        (0, 360, 2048, [item("A", 100, 260)], {"split_items": False}, [0], 360, 1788),
        (0, 300, 100, [item("A", 100, 260)], {"shift": 1}, [], 100, 100),
        (0, 600, 300, [item("A", 10, 260), item("A", 300, 260)], {}, [0], 600, 40),
        (0, 100, 2048, [item("A", 100, 260)], {"shift": 1}, [0], 100, 1788),
        (
            0,
            400,
            2048,
            [item("A", 10, 260), item("A", 300, 260)],
            {"split_items": False},
            [0],
            300,
            1788,
        ),
    ],
)
def test_chunks_are_cut_where_an_item_cannot_be_had(
    start, count, budget, items, options, inputs, tokens, left
):
    cache = EncoderCacheManager(options.pop("cache", 4000))
    request = with_media("r", *items)
    chunk = plan_encoder_chunk(request, start, count, budget, cache, **options)
    assert (chunk.inputs, chunk.num_new_tokens, chunk.compute_budget) == (inputs, tokens, left)
    commit(request, chunk, cache)
    release_claims(request, chunk, cache)


def test_remote_items_take_no_compute_budget():
    request = with_media("r", item("A", 10, 260), item("B", 300, 260))
    remote = Remote("A")
    cache = EncoderCacheManager(4000)
    chunk = plan_encoder_chunk(request, 0, 600, 300, cache, ec_connector=remote)
    assert (chunk.external, chunk.inputs, chunk.num_new_tokens) == ([0], [1], 600)
    assert chunk.compute_budget == 40
    commit(request, chunk, cache, remote)
    assert remote.loads == [0]
    alone = with_media("s", item("A", 10, 260))
    chunk = plan_encoder_chunk(alone, 0, 600, 100, EncoderCacheManager(999), ec_connector=remote)
    assert (chunk.external, chunk.num_new_tokens, chunk.compute_budget) == ([0], 600, 100)


def test_a_cached_item_is_not_split_either():
    cache = EncoderCacheManager(4000)
    first, second = with_media("a", item("A", 0, 260)), with_media("b", item("A", 10, 260))
    cache.allocate(first, 0)
    chunk = plan_encoder_chunk(second, 0, 100, 2048, cache, split_items=False)
    assert (chunk.inputs, chunk.num_new_tokens) == ([], 10)


def test_claims_are_given_back_when_the_chunk_does_not_run():
    cache = EncoderCacheManager(500)
    first, second = with_media("a", item("A", 0, 60)), with_media("b", item("A", 0, 60))
    cache.allocate(first, 0)
    chunk = plan_encoder_chunk(second, 0, 100, 2048, cache)
    assert chunk.claimed == [0]
    release_claims(second, chunk, cache)
    assert cache.cached == {"A": {("a", 0)}}
    cache.free(first)
    assert cache.num_freeable_slots == 500


# -- in the scheduler ---------------------------------------------------------------------------


def media_scheduler(**options):
    values = {
        "max_num_encoder_input_tokens": 20,
        "encoder_cache_size": 40,
        "max_num_batched_tokens": 32,
    }
    return make_scheduler(**(values | options))


def sampled(step):
    return result_for(step, **{i: [3] for i in step.num_scheduled_tokens})


def test_items_are_encoded_once_shared_and_released_when_passed():
    scheduler = media_scheduler()
    scheduler.add_request(with_media("a", item("A", 4, 10), length=20))
    scheduler.add_request(with_media("b", item("A", 2, 10), item("B", 13, 10), length=30))
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 20, "b": 12}
    assert step.scheduled_encoder_inputs == {"a": [0]}
    # a has passed its image, b too; nobody holds it, but it stays.
    cache = scheduler.encoder_cache_manager
    assert cache.cached == {"A": set()}
    scheduler.update_from_output(step, result_for(step, a=[3]))
    step = scheduler.schedule()
    assert scheduled(step) == {"a": 1, "b": 18}
    assert step.scheduled_encoder_inputs == {"b": [1]}
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert cache.num_freeable_slots == 40
    assert scheduler.schedule().finished_req_ids == {"a", "b"}


def test_encoder_budget_cuts_the_chunk_and_eviction_reaches_the_worker():
    scheduler = media_scheduler()
    images = [item(name, 2 + 12 * i, 12) for i, name in enumerate("ABCDE")]
    scheduler.add_request(with_media("a", *images, length=64))
    chunks, encoded, freed = [], [], []
    while scheduler.requests:
        step = scheduler.schedule()
        chunks.append(scheduled(step)["a"])
        encoded += step.scheduled_encoder_inputs.get("a", [])
        freed += step.free_encoder_mm_hashes
        done = scheduler.requests["a"].num_computed_tokens == 64
        scheduler.update_from_output(step, sampled(step) if done else result_for(step))
        if done:
            break
    # One image of 12 a step, 20 embeddings being the limit.
    assert chunks == [14, 12, 12, 12, 14]
    assert encoded == [0, 1, 2, 3, 4]
    assert freed == ["A", "B"]


def test_unsplittable_items_are_never_split():
    scheduler = media_scheduler(
        disable_chunked_mm_input=True, long_prefill_token_threshold=6, max_num_batched_tokens=16
    )
    request = with_media("a", item("A", 5, 10), item("B", 16, 9), length=30)
    other = with_media("b", length=100)
    scheduler.add_request(request)
    scheduler.add_request(other)
    borders = [0]
    while request.num_computed_tokens < 30:
        step = scheduler.schedule()
        borders.append(request.num_computed_tokens)
        done = borders[-1] == 30
        scheduler.update_from_output(step, result_for(step, a=[3] if done else []))
        assert len(borders) < 20
    for feature in request.mm_features:
        start = feature.mm_position.offset
        assert not any(start < b < start + feature.mm_position.length for b in borders)


def test_victims_encoder_work_is_undone_and_taken_over():
    scheduler = media_scheduler(
        scheduling_policy="priority",
        num_blocks=11,
        max_model_len=32,
        long_prefill_token_threshold=8,
    )
    image = item("A", 9, 4)
    for request_id, priority, length, items in (
        ("worst", 9, 24, [image]),
        ("mid", 9, 24, [image]),
        ("best", 9, 8, []),
    ):
        request = Request(
            request_id,
            [ord(request_id[0])] * length,
            mm_features=items,
            priority=priority,
            arrival_time=float(len(scheduler.requests)),
        )
        scheduler.add_request(request)
    step = scheduler.schedule()
    assert scheduled(step) == {"worst": 8, "mid": 8, "best": 8}
    scheduler.update_from_output(step, result_for(step, best=[3]))
    scheduler.requests["mid"].priority, scheduler.requests["best"].priority = 1, 0
    # "worst" would encode the image and "mid" share it, but "best" needs the blocks of "worst".
    step = scheduler.schedule()
    assert step.preempted_req_ids == {"worst"}
    assert scheduled(step) == {"mid": 8, "best": 1}
    assert step.scheduled_encoder_inputs == {"mid": [0]}
    # "mid" has passed the image.
    assert scheduler.encoder_cache_manager.cached == {"A": set()}
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert scheduler.encoder_cache_manager.num_freeable_slots == 40


@pytest.mark.parametrize("how", ["abort", "failure"])
def test_a_request_that_ends_inside_an_item_gives_it_back(how: str):
    scheduler = media_scheduler(long_prefill_token_threshold=8)
    scheduler.add_request(Request("a", list(range(24)), mm_features=[item("A", 4, 9)]))
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == {"a": [0]}
    assert scheduler.encoder_cache_manager.num_freeable_slots == 40 - 9
    if how == "abort":
        scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    else:
        scheduler.update_from_output(step, ModelRunnerOutput())
    assert scheduler.encoder_cache_manager.num_freeable_slots == 40


def test_media_beyond_the_encoder_are_refused_with_size_and_limit():
    scheduler = media_scheduler()
    with pytest.raises(ValidationError, match="takes 21 embeddings; at most 20"):
        scheduler.add_request(with_media("a", item("A", 0, 21), length=30))


def test_connector_metadata_is_built_last():
    remote = Remote("A")
    scheduler = media_scheduler(hooks={"ec_connector": remote})
    scheduler.add_request(with_media("a", item("A", 0, 10), length=20))
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == {}
    assert step.ec_connector_metadata == [0]
