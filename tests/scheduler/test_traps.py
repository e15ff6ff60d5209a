"""Known weak spots of schedulers like this one, each with a test that ours does not have it."""

from __future__ import annotations

import pytest

from jubako.errors import NotImplementedFeatureError, ValidationError
from jubako.sampling_params import PoolingParams
from jubako.scheduler import (
    AsyncScheduler,
    DraftTokenIds,
    FinishReason,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
)
from tests.scheduler.harness import (
    Driver,
    answer,
    ids,
    make_request,
    make_scheduler,
    result_for,
    scheduled,
)

# -- min_tokens beyond the room left ------------------------------------------------------------


def test_min_tokens_beyond_the_context_ends_with_length():
    driver = Driver(make_scheduler(max_model_len=20))
    driver.add(make_request("a", 15, 100, min_tokens=50))
    driver.run()
    assert driver.ended["a"].finish_reason is FinishReason.LENGTH
    assert len(driver.outputs["a"]) == 5
    driver.check_answers()


def test_min_tokens_holds_back_stop_tokens_and_end_of_sequence_only():
    for stop, reason in ((50, None), (7, 7)):
        scheduler = make_scheduler()
        scheduler.add_request(
            make_request("a", 5, 4, eos=50, stop_token_ids=[7], min_tokens=3),
        )
        for count in range(1, 4):
            step = scheduler.schedule()
            output = scheduler.update_from_output(step, result_for(step, a=[stop]))[0].outputs[0]
            assert output.finished == (count == 3)
        assert output.finish_reason is FinishReason.STOP
        assert output.stop_reason == reason


def test_stop_beats_length_on_the_same_token():
    scheduler = make_scheduler()
    scheduler.add_request(make_request("a", 5, 1, eos=50))
    step = scheduler.schedule()
    output = scheduler.update_from_output(step, result_for(step, a=[50]))[0].outputs[0]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None


def test_ignored_end_of_sequence_still_stops_when_listed():
    scheduler = make_scheduler()
    scheduler.add_request(
        make_request("a", 5, 9, eos=50, ignore_eos=True, stop_token_ids=[50]),
    )
    step = scheduler.schedule()
    output = scheduler.update_from_output(step, result_for(step, a=[50]))[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 50)


# -- reset of the prefix cache while steps overlap ----------------------------------------------


@pytest.mark.parametrize("steps_before", range(6))
def test_reset_while_steps_overlap_loses_no_token(steps_before: int):
    driver = Driver(
        make_scheduler(scheduler_class=AsyncScheduler, max_num_batched_tokens=6), depth=2
    )
    driver.add(make_request("decoding", 4, 8, ignore_eos=True))
    driver.add(make_request("prefilling", 19, 5, ignore_eos=True))
    for _ in range(steps_before):
        driver.step()
    assert driver.scheduler.reset_prefix_cache(reset_running_requests=True)
    driver.run()
    driver.check_answers()
    for request in driver.requests.values():
        assert request.num_stale_tokens == request.num_in_flight_tokens == 0


def test_reset_drops_only_the_tokens_that_were_in_flight():
    scheduler = make_scheduler(scheduler_class=AsyncScheduler, max_num_batched_tokens=8)
    scheduler.add_request(make_request("a", 12, 4, ignore_eos=True))
    first = scheduler.schedule()
    scheduler.update_from_output(first, result_for(first, a=[]))
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    # Nothing was in flight, so the next token counts.
    second, third = scheduler.schedule(), scheduler.schedule()
    assert (scheduled(second), scheduled(third)) == ({"a": 8}, {"a": 4})
    scheduler.update_from_output(second, result_for(second, a=[]))
    outputs = scheduler.update_from_output(third, result_for(third, a=[5]))[0].outputs
    assert outputs[0].new_token_ids == [5]


def test_a_preempted_request_waits_for_its_tokens_in_flight():
    driver = Driver(
        make_scheduler(
            scheduler_class=AsyncScheduler, max_num_seqs=1, scheduling_policy="priority"
        ),
        depth=9,
    )
    driver.add(make_request("a", 4, 9, priority=1, ignore_eos=True))
    assert driver.run(2) == [{"a": 4}, {"a": 1}]
    driver.add(make_request("urgent", 3, 1, priority=0))
    assert driver.step().preempted_req_ids == {"a"}
    driver.abort("urgent")
    # Two tokens of "a" are still on their way, so what follows them cannot be computed.
    assert scheduled(driver.step()) == {}
    while driver.in_flight:
        driver.take_result()
    assert len(driver.outputs["a"]) == 2
    step = driver.step()
    assert step.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert len(step.scheduled_cached_reqs.all_token_ids["a"]) == 6
    driver.run()
    driver.check_answers()


def test_overlapping_steps_stop_when_what_is_in_flight_reaches_the_end():
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    scheduler.add_request(make_request("a", 10, 3, ignore_eos=True))
    assert [scheduled(scheduler.schedule()) for _ in range(4)] == [
        {"a": 10},
        {"a": 1},
        {"a": 1},
        {},
    ]


# -- one request's fault ends one request -------------------------------------------------------


def test_duplicate_id_is_an_error_of_the_second_request():
    driver = Driver(make_scheduler())
    driver.add(make_request("a", 5, 3))
    driver.step()
    with pytest.raises(ValidationError, match="'a' is in use") as caught:
        driver.scheduler.add_request(make_request("a", 9, 3))
    assert caught.value.parameter == "request_id"
    driver.run()
    driver.check_answers()


class BrokenGrammars:
    """Grammars of which one does not compile, and another fails at its first token."""

    def __init__(self) -> None:
        self.released: list[str] = []

    def is_ready(self, request: Request) -> bool:
        if request.request_id == "bad":
            raise ValueError("unbalanced parenthesis in /srv/secret")
        return True

    def accept_tokens(self, request: Request, token_ids: list[int]) -> None:
        if request.request_id == "late":
            raise RuntimeError("no way on")

    def grammar_bitmask(self, requests, drafts):
        raise NotImplementedError

    def validate_drafts(self, request: Request, token_ids: list[int]) -> list[int]:
        return token_ids

    def release(self, request: Request) -> None:
        self.released.append(request.request_id)


def test_failing_grammars_end_only_their_own_requests():
    grammars = BrokenGrammars()
    driver = Driver(make_scheduler(hooks={"structured_output_manager": grammars}))
    driver.add(make_request("good", 5, 3, ignore_eos=True))
    for request_id in ("bad", "late", "fine"):
        request = make_request(request_id, 6, 3, ignore_eos=True)
        request.uses_grammar = True
        request.status = RequestStatus.WAITING_FOR_FSM
        driver.add(request)
    driver.run()
    for request_id in ("bad", "late"):
        end = driver.ended[request_id]
        assert end.finish_reason is FinishReason.ERROR
        assert end.error == "The request failed inside the engine."
    for request_id in ("good", "fine"):
        assert driver.outputs[request_id] == answer(driver.requests[request_id], 256).tokens
    assert sorted(grammars.released) == ["bad", "fine", "late"]
    assert driver.scheduler.kv_cache_manager.usage == 0
    assert driver.flushed == {"good", "bad", "late", "fine"}


def test_an_allocation_that_raises_ends_only_its_own_request(monkeypatch):
    driver = Driver(make_scheduler())
    driver.add(*(make_request(i, 6, 9, ignore_eos=True) for i in ("a", "b", "c")))
    driver.step()
    manager = driver.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def broken(request, *args, **kwargs):
        if request.request_id == "b":
            raise AssertionError("table")
        return allocate(request, *args, **kwargs)

    def broken_for_all(requests, *args):
        raise AssertionError("table")

    monkeypatch.setattr(manager, "allocate_slots", broken)
    monkeypatch.setattr(manager, "grow_decodes", broken_for_all)
    driver.run()
    assert driver.ended["b"].finish_reason is FinishReason.ERROR
    for request_id in ("a", "c"):
        assert driver.outputs[request_id] == answer(driver.requests[request_id], 256).tokens
    assert manager.usage == 0


class BrokenConnector:
    """A KV connector that fails when the blocks of request "bad" are known."""

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int):
        return 0, False

    def update_state_after_alloc(self, request: Request, blocks, num_external_tokens: int) -> None:
        if request.request_id == "bad":
            raise RuntimeError("lost the other side")

    def build_connector_meta(self, scheduler_output):
        return None

    def request_finished(self, request: Request, block_ids):
        return False, None


def test_an_admission_that_fails_leaves_no_prefix_behind():
    driver = Driver(make_scheduler(hooks={"connector": BrokenConnector()}))
    prompt = list(range(100, 117))
    driver.add(make_request("bad", prompt, 3), make_request("good", prompt, 3, ignore_eos=True))
    assert scheduled(driver.step()) == {"good": 17}
    driver.run()
    assert driver.ended["bad"].finish_reason is FinishReason.ERROR
    assert driver.outputs["good"] == answer(driver.requests["good"], 256).tokens
    assert driver.scheduler.kv_cache_manager.usage == 0


class BrokenEncoderConnector:
    """An encoder-cache connector that fails for request "bad" when it asks for an output.

    `fails_at` is the request's `num_computed_tokens` then.
    """

    def __init__(self, fails_at: int) -> None:
        self.fails_at = fails_at

    def has_cache_item(self, identifier: str) -> bool:
        return True

    def update_state_after_alloc(self, request: Request, index: int) -> None:
        if request.request_id == "bad" and request.num_computed_tokens == self.fails_at:
            raise RuntimeError("lost the other side")

    def build_connector_meta(self, scheduler_output):
        return None

    def request_finished(self, request: Request):
        return False, None


@pytest.mark.parametrize("fails_at", [0, 8])
def test_an_encoder_load_that_fails_ends_only_its_own_request(fails_at: int):
    """At admission, and while the request runs."""
    scheduler = make_scheduler(
        hooks={"ec_connector": BrokenEncoderConnector(fails_at)},
        max_num_encoder_input_tokens=8,
        encoder_cache_size=16,
        long_prefill_token_threshold=8,
        caching=False,
    )
    for request_id in ("bad", "good"):
        request = Request(
            request_id,
            list(range(100, 112)),
            mm_features=[
                MultiModalFeatureSpec(None, "image", f"{request_id}{at}", PlaceholderRange(at, 3))
                for at in (2, 9)
            ],
        )
        scheduler.add_request(request)
    step = scheduler.schedule()
    if fails_at:
        scheduler.update_from_output(step, result_for(step))
        step = scheduler.schedule()
    assert list(step.num_scheduled_tokens) == ["good"]
    assert step.total_num_scheduled_tokens == sum(step.num_scheduled_tokens.values())
    (output,) = scheduler.update_from_output(step, result_for(step))[0].outputs
    assert (output.request_id, output.finish_reason) == ("bad", FinishReason.ERROR)
    assert f"bad{9 if fails_at else 2}" not in scheduler.encoder_cache_manager.cached
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    assert scheduler.kv_cache_manager.usage == 0


def test_a_row_that_is_missing_ends_only_its_own_request():
    driver = Driver(make_scheduler())
    driver.add(make_request("a", 6, 3, ignore_eos=True), make_request("b", 6, 3, ignore_eos=True))
    step = driver.schedule()
    result = driver.mirror.execute(step)
    del result.req_id_to_index["b"]
    driver.update(step, result)
    assert driver.ended["b"].finish_reason is FinishReason.ERROR
    driver.run()
    assert driver.ended["a"].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("reserve", [True, False])
def test_a_request_that_outgrows_the_whole_cache_ends_and_others_go_on(reserve: bool):
    driver = Driver(
        make_scheduler(
            block_size=4,
            num_blocks=6,
            max_model_len=100,
            max_num_batched_tokens=8,
            scheduler_reserve_full_isl=reserve,
        )
    )
    driver.add(
        make_request("prompt too long", 30, 3, ignore_eos=True),
        make_request("answer too long", 10, 50, ignore_eos=True),
        make_request("fits", 10, 5, ignore_eos=True),
    )
    driver.run()
    for request_id in ("prompt too long", "answer too long"):
        end = driver.ended[request_id]
        assert end.finish_reason is FinishReason.ERROR
        assert end.error is not None
        assert "5 blocks" in end.error
    assert len(driver.outputs["answer too long"]) == 11
    assert driver.outputs["fits"] == answer(driver.requests["fits"], 100).tokens
    assert driver.scheduler.kv_cache_manager.usage == 0


# -- speculation beyond the budget --------------------------------------------------------------


def test_drafts_are_shortened_before_anybody_starves():
    driver = Driver(make_scheduler(max_num_batched_tokens=10, max_num_seqs=4))
    driver.add(*(make_request(i, 2, 40, ignore_eos=True) for i in "abcd"))
    driver.step()
    for _ in range(5):
        drafts = DraftTokenIds(list("abcd"), [[1, 1, 1, 1, 1]] * 4)
        driver.scheduler.update_draft_token_ids(drafts)
        counts = scheduled(driver.step())
        assert sorted(counts) == list("abcd")
        assert sum(counts.values()) == 10
        assert max(counts.values()) - min(counts.values()) <= 2
    driver.run()
    driver.check_answers()


def test_drafts_never_reach_beyond_the_context():
    driver = Driver(make_scheduler(max_model_len=12, block_size=4))
    driver.add(make_request("a", 9, None, ignore_eos=True))
    driver.step()
    driver.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[1, 1, 1, 1]]))
    # Ten tokens are known; positions 9 and 10 are computed, and 11 is only sampled into.
    step = driver.step()
    assert scheduled(step) == {"a": 2}
    assert step.scheduled_spec_decode_tokens == {"a": [1]}
    driver.run()
    driver.check_answers()


def test_drafts_that_fit_are_all_verified():
    driver = Driver(make_scheduler(max_num_batched_tokens=10, max_num_seqs=4))
    driver.add(*(make_request(i, 2, 40, ignore_eos=True) for i in "ab"))
    driver.step()
    driver.scheduler.update_draft_token_ids(DraftTokenIds(["b"], [[1] * 7]))
    assert scheduled(driver.step()) == {"a": 1, "b": 8}


# -- a long prompt before short ones ------------------------------------------------------------


def test_short_prompt_behind_a_long_one_starts_at_once():
    driver = Driver(make_scheduler(max_num_batched_tokens=16, fair_prefill=True))
    driver.add(make_request("long", 100, 2, ignore_eos=True))
    assert scheduled(driver.step()) == {"long": 16}
    driver.add(make_request("short", 3, 2, ignore_eos=True))
    assert scheduled(driver.step()) == {"long": 13, "short": 3}
    assert len(driver.outputs["short"]) == 1
    driver.run()
    driver.check_answers()


def test_without_fair_prefill_the_short_prompt_waits():
    driver = Driver(make_scheduler(max_num_batched_tokens=16))
    driver.add(make_request("long", 100, 2, ignore_eos=True))
    driver.step()
    driver.add(make_request("short", 3, 2, ignore_eos=True))
    steps = driver.run()
    assert ["short" in step for step in steps[:6]] == [False] * 5 + [True]


def test_equal_prompts_share_a_step_equally():
    driver = Driver(make_scheduler(max_num_batched_tokens=16, fair_prefill=True))
    driver.add(*(make_request(i, 40, 2, ignore_eos=True) for i in "ab"))
    assert scheduled(driver.step()) == {"a": 8, "b": 8}


def test_a_crowd_does_not_split_a_step_into_crumbs():
    driver = Driver(make_scheduler(max_num_batched_tokens=16, fair_prefill=True))
    driver.add(*(make_request(i, 40, 2, ignore_eos=True) for i in "abcdefgh"))
    assert scheduled(driver.step()) == {"a": 4, "b": 4, "c": 4, "d": 4}


def test_decodes_come_before_a_prompt_that_was_admitted_earlier():
    driver = Driver(make_scheduler(max_num_batched_tokens=8, fair_prefill=True))
    driver.add(make_request("long", 100, 2, ignore_eos=True))
    driver.add(make_request("short", 2, 9, ignore_eos=True))
    driver.step()
    for _ in range(5):
        assert scheduled(driver.step()) == {"long": 7, "short": 1}


def test_a_share_that_nobody_takes_is_not_wasted():
    # "other" waits for a place, so nothing can be gained by cutting "long".
    driver = Driver(make_scheduler(max_num_batched_tokens=16, max_num_seqs=1, fair_prefill=True))
    driver.add(make_request("long", 40, 2, ignore_eos=True), make_request("other", 40, 2))
    assert driver.run(3) == [{"long": 16}, {"long": 16}, {"long": 8}]
    # Here "other" finds its prompt cached, and "long" takes what it left.
    driver = Driver(make_scheduler(max_num_batched_tokens=16, fair_prefill=True))
    prompt = list(range(500, 541))
    driver.add(make_request("first", prompt, 1))
    driver.run()
    driver.add(make_request("long", 100, 2, ignore_eos=True))
    driver.add(make_request("other", prompt, 2, ignore_eos=True))
    assert scheduled(driver.step()) == {"long": 15, "other": 1}
    driver.run()
    driver.check_answers()


def test_what_is_given_back_to_a_running_prompt_brings_its_blocks():
    driver = Driver(make_scheduler(max_num_batched_tokens=16, fair_prefill=True))
    prompt = list(range(500, 541))
    driver.add(make_request("first", prompt, 1))
    driver.run()
    driver.add(make_request("long", 100, 2, ignore_eos=True))
    driver.step()
    driver.add(make_request("other", prompt, 2, ignore_eos=True))
    # The share of "long" is 8 tokens, two blocks; it ends up with 15, four blocks.
    step = driver.step()
    assert scheduled(step) == {"long": 15, "other": 1}
    assert [len(ids) for ids in step.scheduled_cached_reqs.new_block_ids[0]] == [4]
    driver.run()
    driver.check_answers()


def test_a_leftover_that_cannot_be_allocated_ends_only_its_own_request(monkeypatch):
    driver = Driver(make_scheduler(max_num_batched_tokens=16, fair_prefill=True))
    prompt = list(range(500, 541))
    driver.add(make_request("first", prompt, 1))
    driver.run()
    driver.add(make_request("long", 100, 2, ignore_eos=True))
    driver.add(make_request("other", prompt, 2, ignore_eos=True))
    manager = driver.scheduler.kv_cache_manager
    allocate = manager.allocate_slots

    def broken(request, count, *args, **kwargs):
        if request.request_id == "long" and count == 15:
            raise AssertionError("table")
        return allocate(request, count, *args, **kwargs)

    monkeypatch.setattr(manager, "allocate_slots", broken)
    assert scheduled(driver.step()) == {"other": 1}
    driver.run()
    assert driver.ended["long"].finish_reason is FinishReason.ERROR
    assert driver.outputs["other"] == answer(driver.requests["other"], 256).tokens
    assert manager.usage == 0


def test_fair_prefill_does_not_serve_the_less_urgent():
    driver = Driver(
        make_scheduler(max_num_batched_tokens=16, fair_prefill=True, scheduling_policy="priority")
    )
    driver.add(make_request("urgent", 100, 2, priority=0))
    driver.add(make_request("patient", 3, 2, priority=1))
    assert scheduled(driver.step()) == {"urgent": 16}
    driver.add(make_request("as urgent", 3, 2, priority=0))
    assert scheduled(driver.step()) == {"urgent": 13, "as urgent": 3}


# -- one that does not fit before others that do ------------------------------------------------


def block_head(lookahead: int) -> Driver:
    """12 usable blocks of 4: "big" runs with 7 of them, "large" needs 8 and waits."""
    driver = Driver(make_scheduler(num_blocks=13, max_model_len=48, admission_lookahead=lookahead))
    driver.add(make_request("big", 28, 20, ignore_eos=True))
    driver.step()
    driver.add(make_request("large", 32, 2, ignore_eos=True))
    return driver


def test_small_requests_overtake_one_that_does_not_fit():
    driver = block_head(lookahead=8)
    driver.add(make_request("small", 4, 2, ignore_eos=True))
    assert list(scheduled(driver.step())) == ["big", "small"]
    assert ids(driver.scheduler.waiting) == ["large"]
    driver.run()
    driver.check_answers()


def test_overtaking_ends_so_that_the_large_one_gets_its_turn():
    driver = block_head(lookahead=3)
    order = []
    driver.add(*(make_request(f"s{i}", 4, 2, ignore_eos=True) for i in range(12)))
    while driver.scheduler.has_requests():
        step = driver.step()
        order += [data.req_id for data in step.scheduled_new_reqs]
    assert order.index("large") == 3
    driver.check_answers()


def test_without_lookahead_nobody_overtakes():
    driver = block_head(lookahead=0)
    driver.add(make_request("small", 4, 2, ignore_eos=True))
    assert list(scheduled(driver.step())) == ["big"]


def test_a_preempted_request_is_not_overtaken():
    driver = Driver(make_scheduler(num_blocks=13, max_model_len=40, admission_lookahead=8))
    driver.add(*(make_request(i, 15, ignore_eos=True) for i in "abc"))
    driver.run(2)
    assert driver.step().preempted_req_ids == {"c"}
    driver.add(make_request("small", 3, 2))
    assert list(scheduled(driver.step())) == ["a", "b"]


# -- priorities ---------------------------------------------------------------------------------


def test_urgent_request_displaces_the_least_urgent_when_places_are_taken():
    driver = Driver(make_scheduler(max_num_seqs=2, scheduling_policy="priority"))
    driver.add(
        make_request("p1", 5, 9, priority=1, ignore_eos=True),
        make_request("p2", 5, 9, priority=2, ignore_eos=True),
    )
    driver.step()
    driver.add(make_request("p0", 5, 3, priority=0, ignore_eos=True))
    step = driver.step()
    assert step.preempted_req_ids == {"p2"}
    assert scheduled(step) == {"p1": 1}
    assert list(scheduled(driver.step())) == ["p1", "p0"]
    driver.run()
    driver.check_answers()


def test_a_victim_leaves_no_prefix_that_its_step_did_not_compute():
    driver = Driver(
        make_scheduler(num_blocks=9, long_prefill_token_threshold=8, scheduling_policy="priority")
    )
    driver.add(make_request("worst", 24, 3, priority=5, ignore_eos=True))
    driver.step()
    driver.add(make_request("best", 8, 2, priority=0, ignore_eos=True))
    assert scheduled(driver.step()) == {"worst": 8, "best": 8}
    # "worst" gets its last two blocks, which are full; then "best" needs one.
    step = driver.step()
    assert step.preempted_req_ids == {"worst"}
    assert scheduled(step) == {"best": 1}
    # What "worst" finds of itself when it resumes has been computed: the mirror checks each slot.
    driver.run()
    driver.check_answers()


def test_equally_urgent_request_displaces_nobody():
    driver = Driver(make_scheduler(max_num_seqs=1, scheduling_policy="priority"))
    driver.add(make_request("late", 5, 9, priority=1, arrival=5, ignore_eos=True))
    driver.step()
    driver.add(make_request("early", 5, 9, priority=1, arrival=1, ignore_eos=True))
    assert scheduled(driver.step()) == {"late": 1}


def test_undoing_a_scheduled_victim_gives_its_tokens_back():
    driver = Driver(
        make_scheduler(
            num_blocks=9,
            max_model_len=28,
            max_num_batched_tokens=8,
            scheduling_policy="priority",
        )
    )
    driver.add(make_request("worst", 9, 9, priority=5, ignore_eos=True))
    driver.step()
    driver.add(make_request("best", 20, 4, priority=0, ignore_eos=True))
    assert driver.run(3) == [
        {"worst": 1, "best": 7},
        {"worst": 1, "best": 7},
        {"worst": 1, "best": 6},
    ]
    # "worst" has a place for its 12th token and gets it; then "best" needs a sixth block.
    step = driver.step()
    assert step.preempted_req_ids == {"worst"}
    assert scheduled(step) == {"best": 1}
    assert step.scheduled_cached_reqs.req_ids == ["best"]
    driver.run()
    driver.check_answers()


def test_drafts_of_a_victim_leave_the_step_with_it():
    driver = Driver(make_scheduler(num_blocks=4, max_model_len=12, scheduling_policy="priority"))
    driver.add(make_request("worst", 5, 5, priority=5, ignore_eos=True))
    driver.step()
    driver.add(make_request("best", 4, 5, priority=0, ignore_eos=True))
    driver.step()
    driver.scheduler.update_draft_token_ids(DraftTokenIds(["worst"], [[1]]))
    step = driver.step()
    assert step.preempted_req_ids == {"worst"}
    assert scheduled(step) == {"best": 1}
    assert step.scheduled_spec_decode_tokens == {}
    driver.run()
    driver.check_answers()


def test_tokens_of_a_victim_go_to_others_in_the_same_step():
    driver = Driver(
        make_scheduler(
            num_blocks=10,
            max_model_len=28,
            max_num_batched_tokens=8,
            scheduling_policy="priority",
            scheduler_reserve_full_isl=False,
        )
    )
    driver.add(make_request("worst", 9, 9, priority=5, ignore_eos=True))
    driver.step()
    driver.add(make_request("best", 20, 4, priority=0, ignore_eos=True))
    driver.add(make_request("next", 24, 2, priority=1, ignore_eos=True))
    assert driver.run(3)[-1] == {"worst": 1, "best": 6, "next": 1}
    step = driver.step()
    assert step.preempted_req_ids == {"worst"}
    assert scheduled(step) == {"best": 1, "next": 7}
    driver.run()
    driver.check_answers()


def test_preempting_one_before_the_cursor_skips_nobody():
    driver = Driver(
        make_scheduler(
            num_blocks=10,
            max_model_len=36,
            scheduling_policy="priority",
            scheduler_class=AsyncScheduler,
        ),
        depth=2,
    )
    driver.add(make_request("worst", 12, 1, priority=9, ignore_eos=True))
    driver.schedule()
    driver.add(
        make_request("mid", 11, 9, priority=1, ignore_eos=True),
        make_request("best", 12, 9, priority=0, ignore_eos=True),
    )
    step = driver.schedule()
    assert ids(driver.scheduler.running) == ["worst", "best", "mid"]
    # The only token of "worst" is in flight, so it is passed by. "best" needs its blocks.
    assert scheduled(step) == {"best": 12, "mid": 11}
    step = driver.schedule()
    assert step.preempted_req_ids == {"worst"}
    assert scheduled(step) == {"best": 1, "mid": 1}


def test_priority_needs_priority_scheduling():
    scheduler = make_scheduler()
    with pytest.raises(ValidationError, match="scheduling_policy=priority, got 3") as caught:
        scheduler.add_request(make_request("a", 5, priority=3))
    assert caught.value.parameter == "priority"
    assert not scheduler.has_requests()


# -- requests that can never run ----------------------------------------------------------------


@pytest.mark.parametrize("caching", [True, False])
def test_memory_that_nobody_can_find_is_used_again_first(caching: bool):
    driver = Driver(make_scheduler(caching=caching, block_size=4))
    driver.add(make_request("a", 10, 1))
    step = driver.step()
    (used,) = step.scheduled_new_reqs[0].block_ids
    driver.add(make_request("b", range(50, 60), 1))
    (used_next,) = driver.step().scheduled_new_reqs[0].block_ids
    # The first two blocks of `a` can be found if there is a cache.
    assert set(used) & set(used_next) == set(used[2:] if caching else used)


def test_requests_that_can_never_run_are_refused_with_value_and_limit():
    scheduler = make_scheduler(max_model_len=20)
    with pytest.raises(ValidationError, match="20 tokens; at most 19") as caught:
        scheduler.add_request(make_request("long", 20))
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(ValidationError, match="empty"):
        scheduler.add_request(make_request("empty", 0))
    with pytest.raises(NotImplementedFeatureError, match="Streaming input"):
        scheduler.add_request(
            Request("piece", [1, 2], pooling_params=PoolingParams(), resumable=True)
        )
    grammar = make_request("grammar", 5)
    grammar.uses_grammar = True
    with pytest.raises(NotImplementedFeatureError, match="Structured outputs"):
        scheduler.add_request(grammar)
    assert not scheduler.has_requests()
    scheduler.add_request(make_request("fits", 19))
