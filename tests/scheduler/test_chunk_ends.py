"""Chunks end where recurrent layers can keep a state that others go on from."""

from __future__ import annotations

from typing import Any

import pytest

from jubako.config import CacheConfig, JubakoConfig, ModelConfig, SchedulerConfig
from jubako.kv_cache import KVCacheConfig, KVCacheGroupSpec, MambaSpec
from jubako.sampling_params import SamplingParams
from jubako.scheduler import MultiModalFeatureSpec, PlaceholderRange, Request, Scheduler
from jubako.scheduler.chunk_ends import ChunkEnds
from tests.scheduler.fake_connector import run_step
from tests.scheduler.harness import full_spec, make_request, scheduled


def recurrent(mode: str = "align", block_size: int = 8) -> MambaSpec:
    return MambaSpec(
        block_size=block_size, shapes=((4,),), dtypes=("float32",), mamba_cache_mode=mode
    )


def make(budget: int = 30, mode: str = "align", **options: Any) -> Scheduler:
    values: dict[str, Any] = {
        "max_num_batched_tokens": budget,
        "max_num_seqs": 4,
        "fair_prefill": False,
    }
    return Scheduler(
        JubakoConfig(
            model_config=ModelConfig(max_model_len=200),
            cache_config=CacheConfig(
                block_size=4, enable_prefix_caching=True, mamba_cache_mode=mode
            ),
            scheduler_config=SchedulerConfig(**(values | options)),
        ),
        KVCacheConfig(
            num_blocks=200,
            kv_cache_groups=[
                KVCacheGroupSpec(["full"], full_spec(4)),
                KVCacheGroupSpec(["state"], recurrent(mode)),
            ],
        ),
    )


def chunks(scheduler: Scheduler, request: Request, steps: int) -> list[int]:
    scheduler.add_request(request)
    return [
        run_step(scheduler).num_scheduled_tokens.get(request.request_id, 0) for _ in range(steps)
    ]


def test_chunks_end_at_borders_and_one_of_them_at_the_last():
    assert chunks(make(), make_request("a", 69), 5) == [24, 24, 16, 5, 1]
    # All in one chunk would leave no state behind.
    assert chunks(make(), make_request("a", 20), 3) == [16, 4, 1]
    assert chunks(make(), make_request("a", 24), 2) == [24, 1]
    assert chunks(make(), make_request("a", 7), 2) == [7, 1]


@pytest.mark.parametrize("mode", ["all"])
def test_other_modes_need_no_borders(mode: str):
    assert chunks(make(mode=mode), make_request("a", 69), 3) == [30, 30, 9]


def test_without_room_for_a_block_chunks_stay_as_they_are():
    assert chunks(make(budget=6), make_request("a", 20), 4) == [6, 6, 6, 2]
    scheduler = make(long_prefill_token_threshold=5)
    scheduler.add_request(make_request("other", 3, 50, ignore_eos=True))
    assert chunks(scheduler, make_request("a", 12), 3) == [5, 5, 2]


def test_decodes_that_take_the_room_for_a_border_do_not_stop_a_prompt():
    scheduler = make(budget=9)
    for name in ("x", "y", "z"):
        scheduler.add_request(make_request(name, 2, 99, ignore_eos=True))
    run_step(scheduler)
    assert chunks(scheduler, make_request("a", 20), 4) == [6, 6, 6, 2]


def test_a_fair_share_grows_to_the_next_border():
    scheduler = make(budget=16, fair_prefill=True)
    for name in ("a", "b", "c", "d"):
        scheduler.add_request(make_request(name, 20))
    assert scheduled(run_step(scheduler)) == {"a": 8, "b": 8}
    assert scheduled(run_step(scheduler)) == {"a": 8, "b": 8}
    while scheduler.requests["d"].num_computed_tokens < 20:
        before = scheduler.requests["d"].num_computed_tokens
        run_step(scheduler)
        assert before <= scheduler.requests["d"].num_computed_tokens


def test_a_state_is_kept_where_another_prompt_begins_in_the_same_way():
    scheduler = make(budget=100)
    shared = list(range(1000, 1024))
    run = chunks(scheduler, make_request("a", [*shared, *range(2000, 2030)], 1), 3)
    assert run == [48, 6, 0]
    # The full layers know 24 tokens, but there is a state after 48 only: nothing is hit.
    run = chunks(scheduler, make_request("b", [*shared, *range(3000, 3030)], 1), 4)
    assert run == [24, 24, 6, 0]
    # Now there is one after 24.
    run = chunks(scheduler, make_request("c", [*shared, *range(4000, 4030)], 1), 3)
    assert run == [24, 6, 0]
    assert scheduler.requests == {}


def test_media_that_cut_a_chunk_cut_it_at_a_border_if_there_is_one():
    def with_media(*places: int) -> Request:
        return Request(
            "a",
            list(range(40)),
            SamplingParams(max_tokens=2),
            mm_features=[
                MultiModalFeatureSpec(None, "image", f"i{place}", PlaceholderRange(place, 4))
                for place in places
            ],
        )

    options = {"max_num_encoder_input_tokens": 4, "encoder_cache_size": 4}
    assert chunks(make(**options), with_media(1, 20), 3) == [16, 24, 1]
    # Two items in a block: no border can be reached between them.
    assert chunks(make(**options), with_media(1, 6), 3) == [6, 26, 8]


def test_items_that_may_not_be_split_come_before_borders():
    scheduler = make(
        max_num_encoder_input_tokens=30,
        encoder_cache_size=30,
        disable_chunked_mm_input=True,
        budget=24,
    )
    request = Request(
        "a",
        list(range(40)),
        SamplingParams(max_tokens=2),
        mm_features=[MultiModalFeatureSpec(None, "image", "i", PlaceholderRange(6, 23))],
    )
    counts = chunks(scheduler, request, 4)
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    assert not any(6 < end < 29 for end in ends)
    assert ends[-1] >= 40


def test_rounding():
    ends = ChunkEnds([full_spec(4), recurrent(block_size=8), recurrent(block_size=12)])
    assert ends.block_size == 24
    request = make_request("a", 100)

    def rounded(computed: int, count: int, possible: int = 0, reachable: int = 999) -> int:
        return ends.round(request, computed, count, possible=possible, reachable=reachable)

    assert rounded(0, 60) == 48
    assert rounded(48, 52) == 48
    assert rounded(96, 4) == 4
    assert rounded(0, 10) == 0
    assert rounded(0, 10, possible=30) == 24
    assert rounded(0, 10, reachable=23) == 10
    # Not at a border itself, it gets to one.
    assert rounded(10, 60) == 38
    request.shared_prefix_tokens = 50
    assert rounded(0, 90) == 48
    assert rounded(48, 40) == 24
    assert ChunkEnds([full_spec(4)]).block_size == 1
