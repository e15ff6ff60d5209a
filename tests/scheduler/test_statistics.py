"""What the scheduler counts."""

from __future__ import annotations

from jubako.scheduler import (
    DraftTokenIds,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
)
from tests.scheduler.fake_connector import run_step
from tests.scheduler.harness import make_request, make_scheduler, result_for


def test_drafts_are_counted_by_position():
    scheduler = make_scheduler(log_stats=True)
    for request_id in ("a", "b"):
        scheduler.add_request(make_request(request_id, 5, 20, ignore_eos=True))
    run_step(scheduler)
    scheduler.make_stats()
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "b"], [[3, 4, 5], [6]]))
    step = scheduler.schedule()
    scheduler.make_stats = (original := scheduler.make_stats) and (lambda: None)
    scheduler.update_from_output(step, result_for(step, a=[3, 4, 9], b=[7]))
    stats = original()
    assert stats is not None
    drafts = stats.spec_decoding_stats
    assert drafts is not None
    assert (drafts.num_drafts, drafts.num_draft_tokens, drafts.num_accepted_tokens) == (2, 4, 2)
    assert drafts.num_accepted_tokens_per_pos == [1, 1, 0]
    assert drafts.num_spec_tokens == 3
    stats = original()
    assert stats is not None
    assert stats.spec_decoding_stats is None


def test_drafts_that_a_grammar_refused_do_not_count():
    scheduler = make_scheduler(log_stats=True)
    scheduler.add_request(make_request("a", 5, 20, ignore_eos=True))
    run_step(scheduler)
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[3, 4, 5]]))
    step = scheduler.schedule()
    step.num_invalid_spec_tokens = {"a": 2}
    messages = scheduler.update_from_output(step, result_for(step, a=[3, 9]))
    stats = messages[0].scheduler_stats
    assert stats is not None
    assert stats.spec_decoding_stats is not None
    assert stats.spec_decoding_stats.num_draft_tokens == 1
    assert stats.spec_decoding_stats.num_accepted_tokens_per_pos == [1]


def test_media_are_counted_by_where_they_come_from():
    scheduler = make_scheduler(
        log_stats=True, max_num_encoder_input_tokens=16, encoder_cache_size=32
    )
    for first, request_id in enumerate(("a", "b")):
        scheduler.add_request(
            Request(
                request_id,
                list(range(first, first + 12)),
                mm_features=[MultiModalFeatureSpec(None, "image", "A", PlaceholderRange(2, 4))],
            )
        )
        scheduler.schedule()
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.encoder_cache_stats is not None
    assert (stats.encoder_cache_stats.queries, stats.encoder_cache_stats.hits) == (2, 1)
    assert stats.encoder_cache_usage == 4 / 32
