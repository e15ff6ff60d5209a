"""Requests that no scheduler can serve are refused when they come, and leave nothing behind."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jubako.errors import ConfigError, ValidationError
from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler import (
    AsyncScheduler,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
    Scheduler,
)
from tests.scheduler.harness import finish, make_request, make_scheduler, result_for, scheduled


def item(offset: int, length: int, mask: list[bool] | None = None) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(
        None, "image", f"I{offset}", PlaceholderRange(offset, length, mask)
    )


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "id of no string": ({"request_id": 7}, "request_id must be a string, got 7"),
    "no prompt": ({"prompt_token_ids": []}, "prompt is empty"),
    "ids in words": ({"prompt_token_ids": list("word" * 4)}, "cannot be named"),
    "halves of ids": ({"prompt_token_ids": [1.5] * 8}, "cannot be named"),
    "ids of too many bits": ({"prompt_token_ids": [2**31] * 8}, "32-bit integers"),
    "embeddings that are no array": (
        {"prompt_token_ids": None, "prompt_embeds": [[1.0, 2.0]] * 8},
        "embeddings an array",
    ),
    "adapter that is none": ({"lora_request": "adapter"}, "cannot be named"),
    "two kinds of parameters": (
        {"sampling_params": SamplingParams(), "pooling_params": PoolingParams()},
        "not both",
    ),
    "urgency in words": ({"priority": "high"}, "priority must be an integer, got 'high'"),
    "arrival in words": ({"arrival_time": "now"}, "arrival_time must be a number"),
    "arrival at no time": ({"arrival_time": float("nan")}, "arrival_time must be a number"),
    "item beyond the prompt": ({"mm_features": [item(10, 7)]}, "inside the 16 tokens"),
    "item before the prompt": ({"mm_features": [item(-1, 3)]}, "3 positions from -1"),
    "item of no length": ({"mm_features": [item(4, 0)]}, "0 positions from 4"),
    "items out of order": ({"mm_features": [item(8, 2), item(2, 2)]}, "in order"),
    "items on each other": ({"mm_features": [item(2, 4), item(5, 3)]}, "at position 5"),
    "masks on each other": (
        {"mm_features": [item(2, 4, [False, True, True, False]), item(2, 3, [False, False, True])]},
        "at position 4",
    ),
    "mask of another length": ({"mm_features": [item(2, 4, [True])]}, "1 entries"),
}


@pytest.mark.parametrize(("fields", "message"), BAD.values(), ids=BAD)
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_a_bad_request_is_refused_and_forgotten(policy: str, fields: dict[str, Any], message: str):
    scheduler = make_scheduler(scheduling_policy=policy)
    good = make_request("good", 5, 2)
    scheduler.add_request(good)
    values = {"request_id": "a", "prompt_token_ids": list(range(16))} | fields
    with pytest.raises(ValidationError, match=message):
        scheduler.add_request(Request(**values))
    assert list(scheduler.requests) == ["good"]
    assert list(scheduler.waiting) == [good]
    # Nothing of it is in the way of who comes later under its id.
    scheduler.add_request(make_request("a", 5, 2))
    assert set(scheduled(scheduler.schedule())) == {"good", "a"}


def test_ids_may_come_in_any_sequence_of_integers():
    for prompt in ((1, 2, 3, 4), range(4), np.arange(4), list(np.arange(4, dtype=np.int64))):
        scheduler = make_scheduler()
        scheduler.add_request(Request("a", prompt))
        assert scheduled(scheduler.schedule()) == {"a": 4}


def test_media_whose_embeddings_interleave_are_served():
    """The sound of a video stands among its frames."""
    frames = item(2, 6, [True, False, False, False, False, False])
    sound = item(3, 4)
    scheduler = make_scheduler()
    scheduler.add_request(Request("a", list(range(16)), mm_features=[frames, sound]))
    assert scheduler.schedule().scheduled_encoder_inputs == {"a": [0, 1]}


@pytest.mark.parametrize("status", ["running", "ended", "preempted"])
def test_a_request_serves_one_life_in_one_scheduler(status: str):
    """Its counts are of a table that the other scheduler does not have."""
    scheduler, other = make_scheduler(), make_scheduler()
    request = make_request("a", 5, 9, ignore_eos=True)
    scheduler.add_request(request)
    scheduler.schedule()
    if status == "ended":
        finish(scheduler, "a")
    elif status == "preempted":
        scheduler.reset_prefix_cache(reset_running_requests=True)
    with pytest.raises(ValidationError, match="has been scheduled before"):
        other.add_request(request)
    assert not other.has_requests()


@pytest.mark.parametrize("name", ["block_size", "hash_block_size"])
@pytest.mark.parametrize("size", [0, -4, 6, "4"])
def test_sizes_that_are_no_sizes_are_refused(name: str, size: Any):
    scheduler = make_scheduler()
    with pytest.raises(ConfigError, match=name):
        Scheduler(scheduler.config, scheduler.kv_cache_config, **{name: size})


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_unknown_and_ended_ids_can_be_aborted_any_number_of_times(scheduler_class):
    scheduler = make_scheduler(scheduler_class=scheduler_class)
    scheduler.add_request(make_request("a", 5, 9, ignore_eos=True))
    step = scheduler.schedule()
    for _ in range(2):
        finish(scheduler, "a", "a", "unknown")
        scheduler.finish_requests([], RequestStatus.FINISHED_ABORTED)
    assert scheduler.update_from_output(step, result_for(step, a=[3])) == {}
    assert scheduler.schedule().finished_req_ids == {"a"}
    finish(scheduler, "a")
    assert not scheduler.schedule().finished_req_ids
    assert scheduler.kv_cache_manager.usage == 0
