"""Encoder outputs for a drafter, which reads one position further than the model."""

from __future__ import annotations

from typing import Any

import pytest

from jubako.scheduler import (
    EncoderCacheManager,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    Scheduler,
)
from jubako.scheduler.encoder_decoder_cache import EncoderDecoderCacheManager
from tests.scheduler.harness import finish, make_scheduler, result_for, scheduled


def with_images(request_id: str, *images: tuple[str, int, int], length: int = 40) -> Request:
    """Images by name, offset and length."""
    return Request(
        request_id,
        list(range(length)),
        mm_features=[
            MultiModalFeatureSpec(None, "image", name, PlaceholderRange(offset, size))
            for name, offset, size in images
        ],
    )


def make(**options: Any) -> Scheduler:
    values = {
        "max_num_encoder_input_tokens": 16,
        "encoder_cache_size": 16,
        "max_num_batched_tokens": 8,
    }
    scheduler = make_scheduler(**(values | options))
    scheduler.drafter_shift = 1
    return scheduler


def run(scheduler: Scheduler) -> dict[str, list[int]]:
    """A step; what it encodes."""
    step = scheduler.schedule()
    scheduler.update_from_output(
        step,
        result_for(
            step,
            **{
                request_id: [3]
                for request_id in step.num_scheduled_tokens
                if not scheduler.requests[request_id].is_prefill_chunk
            },
        ),
    )
    return step.scheduled_encoder_inputs


@pytest.mark.parametrize("shift", [0, 1])
def test_an_image_behind_a_chunk_is_there_for_the_drafter(shift: int):
    scheduler = make()
    scheduler.drafter_shift = shift
    scheduler.add_request(with_images("a", ("A", 8, 6)))
    assert run(scheduler) == ({"a": [0]} if shift else {})
    assert run(scheduler) == ({} if shift else {"a": [0]})


def test_no_room_for_the_drafter_costs_the_model_nothing():
    scheduler = make(encoder_cache_size=6, max_num_encoder_input_tokens=6)
    scheduler.add_request(with_images("a", ("A", 3, 5), ("B", 8, 6)))
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == {"a": [0]}
    assert scheduled(step) == {"a": 8}


def test_what_the_drafter_may_read_stays_until_it_has_passed_too():
    scheduler = make()
    cache = scheduler.encoder_cache_manager
    scheduler.add_request(with_images("a", ("A", 2, 6)))
    run(scheduler)
    assert scheduler.requests["a"].num_computed_tokens == 8
    assert cache.cached == {"A": {("a", 0)}}
    assert cache.num_freeable_slots == 10
    run(scheduler)
    assert cache.cached == {"A": set()}
    assert cache.num_freeable_slots == 16


def test_the_next_image_is_not_kept_waiting_by_the_drafter():
    """In a cache that holds one, the prompt would never end."""
    scheduler = make(encoder_cache_size=8)
    images = [(name, 8 * i, 8) for i, name in enumerate("ABCDE")]
    scheduler.add_request(with_images("a", *images))
    encoded = []
    for _ in range(5):
        encoded += run(scheduler).get("a", [])
    assert encoded == [0, 1, 2, 3, 4]
    assert scheduler.requests["a"].num_computed_tokens == 40


def test_others_need_not_wait_for_the_drafter_either():
    scheduler = make(encoder_cache_size=8, max_num_batched_tokens=16)
    cache = scheduler.encoder_cache_manager
    scheduler.add_request(with_images("a", ("A", 8, 8), length=17))
    run(scheduler)
    assert cache.cached == {"A": {("a", 0)}}
    scheduler.add_request(with_images("b", ("B", 0, 8)))
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == {"b": [0]}
    assert step.free_encoder_mm_hashes == ["A"]
    finish(scheduler, "a", "b")
    assert cache.num_freeable_slots == 8


def test_what_others_hold_stays_when_the_drafter_gives_way():
    cache = EncoderCacheManager(10)
    first, second = with_images("a", ("A", 0, 6)), with_images("b", ("A", 0, 6))
    cache.allocate(first, 0)
    assert cache.check_and_update_cache(second, 0)
    cache.yield_encoder_input(first, 0)
    assert not cache.make_room(5)
    assert cache.cached == {"A": {("b", 0)}}
    cache.yield_encoder_input(second, 0)
    # Whoever holds nothing gives up nothing.
    cache.yield_encoder_input(first, 0)
    assert cache.make_room(5)
    assert cache.cached == {}
    assert cache.get_freed_mm_hashes() == ["A"]


@pytest.mark.parametrize("end", ["free", "rollback", "drop"])
def test_a_claim_that_ended_gives_way_no_more(end: str):
    cache = EncoderCacheManager(10)
    request = with_images("a", ("A", 0, 6))
    cache.allocate(request, 0)
    cache.yield_encoder_input(request, 0)
    if end == "free":
        cache.free(request)
    elif end == "rollback":
        cache.rollback(request, [0])
    else:
        cache.drop("A")
    assert not cache._yielding
    cache.allocate(request, 0)
    assert not cache.make_room(5)


def test_an_encoder_decoder_model_keeps_nothing_for_a_drafter():
    cache = EncoderDecoderCacheManager(10)
    request = with_images("a", ("A", 0, 6))
    cache.allocate(request, 0)
    cache.yield_encoder_input(request, 0)
    assert cache.num_free_slots == 10
