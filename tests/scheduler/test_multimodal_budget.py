"""How many media items a step and the encoder cache must be able to take."""

from __future__ import annotations

from typing import Any

import pytest

from jubako.config import SchedulerConfig
from jubako.errors import ConfigError, ValidationError
from jubako.scheduler import (
    MediaSize,
    MultiModalBudget,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
)
from tests.scheduler.harness import make_scheduler

IMAGE = {"image": MediaSize(256, 260)}
SLICED = {"image": MediaSize(1280, 1320)}


def budget(
    largest: dict[str, MediaSize],
    limits: dict[str, int] | None = None,
    *,
    max_model_len: int = 8192,
    num_spec_tokens: int = 0,
    **options: Any,
) -> MultiModalBudget:
    values: dict[str, Any] = {"max_num_batched_tokens": 2048, "max_num_seqs": 128}
    return MultiModalBudget(
        SchedulerConfig(**(values | options)),
        max_model_len,
        largest,
        {"image": 16} if limits is None else limits,
        num_spec_tokens=num_spec_tokens,
    )


@pytest.mark.parametrize(("largest", "items"), [(IMAGE, 8), (SLICED, 1)])
def test_as_many_items_as_the_budget_has_room_for(largest, items: int):
    sizes = budget(largest)
    assert sizes.encoder_compute_budget == sizes.encoder_cache_size == 2048
    assert sizes.get_max_items_per_batch("image") == items


def test_the_largest_item_always_fits():
    sizes = budget(
        {"image": MediaSize(256, 260), "audio": MediaSize(3000, 3000)},
        {"image": 1, "audio": 1},
        max_num_encoder_input_tokens=100,
        encoder_cache_size=200,
    )
    assert sizes.max_tokens_per_mm_item == 3000
    assert sizes.encoder_compute_budget == sizes.encoder_cache_size == 3000
    assert sizes.get_max_items_per_batch("audio") == 1
    assert sizes.get_max_items_per_batch("image") == 11


def test_given_budgets_are_kept():
    sizes = budget(IMAGE, max_num_encoder_input_tokens=300, encoder_cache_size=5000)
    assert (sizes.encoder_compute_budget, sizes.encoder_cache_size) == (300, 5000)
    assert sizes.get_max_items_per_batch("image") == 1


@pytest.mark.parametrize(
    ("limits", "max_model_len", "options", "per_prompt", "per_batch"),
    [
        # By what a prompt may have, and what fits into one.
        ({"image": 2}, 8192, {"max_num_seqs": 2}, 2, 4),
        ({"image": 16}, 600, {"max_num_seqs": 2}, 2, 4),
        ({"image": 16}, 100, {"max_num_seqs": 2}, 1, 2),
        ({}, 8192, {"max_num_seqs": 3}, 1, 3),
        # Whole prompts in a step: at least one item each.
        ({"image": 1}, 8192, {"enable_chunked_prefill": False}, 1, 8),
        ({"image": 1}, 100, {"enable_chunked_prefill": False, "max_num_batched_tokens": 128}, 1, 1),
    ],
)
def test_no_more_items_than_requests_bring(limits, max_model_len, options, per_prompt, per_batch):
    sizes = budget(IMAGE, limits, max_model_len=max_model_len, **options)
    assert sizes.get_max_items_per_prompt("image") == per_prompt
    assert sizes.get_max_items_per_batch("image") == per_batch


@pytest.mark.parametrize(("largest", "limits"), [({}, {}), (IMAGE, {"image": 0})])
def test_without_media_there_is_no_budget(largest, limits):
    sizes = budget(largest, limits, max_num_encoder_input_tokens=5, encoder_cache_size=5)
    assert (sizes.encoder_compute_budget, sizes.encoder_cache_size) == (0, 0)
    assert sizes.largest == {}


@pytest.mark.parametrize(
    ("batched", "seqs", "drafts", "fits"),
    [
        # Positions count: 1280 embeddings stand at 1320 places.
        (1320 + 8, 8, 0, True),
        (1320 + 7, 8, 0, False),
        (1320 + 32, 8, 3, True),
        (1320 + 31, 8, 3, False),
        (4, 4, 3, False),
    ],
)
def test_an_item_that_is_not_split_fits_beside_all_that_decode(batched, seqs, drafts, fits):
    def build() -> MultiModalBudget:
        return budget(
            SLICED,
            max_num_batched_tokens=batched,
            max_num_seqs=seqs,
            num_spec_tokens=drafts,
            disable_chunked_mm_input=True,
        )

    if fits:
        build()
        return
    with pytest.raises(ConfigError, match="1320") as error:
        build()
    assert error.value.parameter == "max_num_batched_tokens"


@pytest.mark.parametrize("size", [MediaSize(0, 4), MediaSize(5, 4), MediaSize(-1, 4)])
def test_sizes_that_no_item_has_are_refused(size: MediaSize):
    with pytest.raises(ConfigError, match="image"):
        budget({"image": size})


# -- in the scheduler ---------------------------------------------------------------------------


def with_image(embeds: int, positions: int) -> Request:
    mask = [True] * embeds + [False] * (positions - embeds)
    place = PlaceholderRange(0, positions, mask)
    item = MultiModalFeatureSpec(None, "image", "A", place)
    return Request("a", list(range(positions + 4)), mm_features=[item])


def test_without_options_a_step_encodes_as_much_as_it_computes():
    scheduler = make_scheduler(max_num_batched_tokens=16)
    assert scheduler.max_encoder_tokens == scheduler.encoder_cache_manager.cache_size == 16
    with pytest.raises(ValidationError, match="17 embeddings"):
        scheduler.add_request(with_image(17, 17))
    scheduler.add_request(with_image(16, 20))
    assert scheduler.schedule().scheduled_encoder_inputs == {"a": [0]}


def test_an_item_that_no_step_could_hold_is_refused():
    scheduler = make_scheduler(max_num_batched_tokens=16, disable_chunked_mm_input=True)
    with pytest.raises(ValidationError, match="17 positions"):
        scheduler.add_request(with_image(4, 17))
    assert not scheduler.has_requests()
    scheduler.add_request(with_image(4, 16))
    assert scheduler.schedule().num_scheduled_tokens == {"a": 16}


@pytest.mark.parametrize("name", ["max_num_encoder_input_tokens", "encoder_cache_size"])
def test_budgets_below_nothing_are_refused(name: str):
    with pytest.raises(ConfigError, match=name):
        SchedulerConfig(**{name: -1})
