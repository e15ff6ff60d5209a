"""Requests whose input comes piece by piece."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jubako.sampling_params import PoolingParams, SamplingParams
from jubako.scheduler import (
    AsyncScheduler,
    EngineCoreOutput,
    FinishReason,
    MultiModalFeatureSpec,
    PlaceholderRange,
    Request,
    RequestStatus,
    Scheduler,
)
from tests.scheduler.fake_connector import ScriptedConnector, finish_step, run_step
from tests.scheduler.fake_model import next_token
from tests.scheduler.harness import finish, ids, make_request, make_scheduler, scheduled
from tests.scheduler.mirror import WorkerMirror

PARKED = RequestStatus.WAITING_FOR_STREAMING_REQ


def piece(
    tokens: list[int],
    max_tokens: int = 2,
    *,
    last: bool = False,
    session: str = "s",
    stops: tuple[int, ...] = (),
    **options: Any,
) -> Request:
    """A piece of a session's input; the `last` one only ends it."""
    return Request(
        session,
        tokens,
        SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, stop_token_ids=list(stops)
        ),
        resumable=not last,
        **options,
    )


class Engine:
    """A scheduler and a worker that checks what it reads, with up to `depth` steps in flight."""

    def __init__(self, scheduler: Scheduler, depth: int = 1) -> None:
        self.scheduler = scheduler
        self.mirror = WorkerMirror(scheduler)
        self.depth = depth
        self.outputs: dict[str, list[EngineCoreOutput]] = {}
        self.in_flight: list[tuple[Any, Any]] = []

    def step(self) -> None:
        step = self.scheduler.schedule()
        self.in_flight.append((step, self.mirror.execute(step)))
        if len(self.in_flight) >= self.depth:
            self.take()

    def take(self) -> None:
        for message in self.scheduler.update_from_output(*self.in_flight.pop(0)).values():
            for output in message.outputs:
                self.outputs.setdefault(output.request_id, []).append(output)

    def settle(self) -> None:
        """Step until nobody has anything to do."""
        for _ in range(500):
            if not self.scheduler.has_requests():
                break
            self.step()
        assert not self.scheduler.has_requests()
        while self.in_flight:
            self.take()

    def answers(self, request_id: str) -> list[list[int]]:
        """The tokens of each finished answer."""
        answers: list[list[int]] = [[]]
        for output in self.outputs.get(request_id, []):
            answers[-1] += output.new_token_ids
            if output.finished:
                answers.append([])
        assert answers.pop() == []
        return answers


def expected(
    pieces: list[list[int]], max_tokens: int, stops: tuple[int, ...] = ()
) -> list[list[int]]:
    """What the model answers to each piece; it knows all before, but each answer's last token."""
    text: list[int] = []
    answers = []
    for tokens in pieces:
        text += tokens
        answer = []
        for _ in range(max_tokens):
            answer.append(next_token(text + answer))
            if answer[-1] in stops:
                break
        answers.append(answer)
        text += answer[:-1]
    return answers


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_answers_become_part_of_the_prompt(scheduler_class):
    engine = Engine(make_scheduler(scheduler_class=scheduler_class), depth=2)
    if scheduler_class is Scheduler:
        engine.depth = 1
    pieces = [[5, 6, 7], [8, 9], [4], list(range(20, 40))]
    for tokens in pieces:
        engine.scheduler.add_request(piece(tokens, 3))
        engine.settle()
        assert engine.scheduler.requests["s"].status is PARKED
    assert engine.answers("s") == expected(pieces, 3)
    assert all(o.finish_reason is FinishReason.LENGTH for o in engine.outputs["s"][2::3])
    engine.scheduler.add_request(piece([1], last=True))
    engine.settle()
    assert engine.answers("s") == expected(pieces, 3)
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_pieces_queue_up_and_are_applied_in_order():
    engine = Engine(make_scheduler())
    pieces = [[5, 6, 7], [8, 9], [4]]
    for tokens in pieces:
        engine.scheduler.add_request(piece(tokens))
    engine.scheduler.add_request(piece([1], last=True))
    assert engine.scheduler.get_num_unfinished_requests() == 1
    engine.settle()
    assert engine.answers("s") == expected(pieces, 2)
    assert engine.scheduler.requests == {}
    assert "s" in engine.mirror.finished


def test_kv_of_earlier_pieces_is_not_computed_again():
    scheduler = make_scheduler(caching=False)
    scheduler.add_request(piece([5, 6, 7, 8, 9], 3))
    for _ in range(3):
        run_step(scheduler)
    session = scheduler.requests["s"]
    assert (session.status, session.num_tokens, session.num_computed_tokens) == (PARKED, 7, 7)
    scheduler.add_request(piece([1, 2], 3))
    step = scheduler.schedule()
    assert scheduled(step) == {"s": 2}
    (new,) = step.scheduled_new_reqs
    assert new.num_computed_tokens == 7
    assert new.prompt_token_ids == [5, 6, 7, 8, 9, 3, 3, 1, 2]


def test_parked_sessions_are_not_unfinished_and_cost_nothing():
    scheduler = make_scheduler(log_stats=True)
    scheduler.add_request(piece([5, 6, 7], 1))
    run_step(scheduler)
    run_step(scheduler)
    assert not scheduler.has_unfinished_requests()
    assert not scheduler.has_requests()
    assert scheduler.get_num_unfinished_requests() == 0
    assert not scheduler.waiting.has_ready
    assert ids(scheduler.waiting) == ["s"]
    stats = scheduler.make_stats()
    assert stats is not None
    assert stats.num_parked_reqs == 1
    scheduler.add_request(piece([1], 1))
    assert scheduler.has_schedulable_requests()
    assert scheduled(scheduler.schedule()) == {"s": 1}


@pytest.mark.parametrize("when", ["waiting", "running", "parked"])
def test_a_session_can_be_aborted_at_any_time(when: str):
    scheduler = make_scheduler()
    scheduler.add_request(piece([5, 6, 7], 2))
    scheduler.add_request(piece([8], 2))
    if when != "waiting":
        run_step(scheduler)
    if when == "parked":
        while scheduler.requests["s"].status is not PARKED:
            run_step(scheduler)
    finish(scheduler, "s")
    assert scheduler.schedule().finished_req_ids == {"s"}
    assert not scheduler.has_requests()
    assert scheduler.kv_cache_manager.usage == 0
    assert len(scheduler.waiting) == 0


def test_hashes_name_what_is_in_the_blocks_after_the_last_token_is_gone():
    scheduler = make_scheduler()
    scheduler.add_request(piece([5, 6, 7], 5))
    for _ in range(5):
        run_step(scheduler)
    session = scheduler.requests["s"]
    # Eight tokens were known, and two blocks were full; the eighth is discarded.
    assert (session.num_tokens, len(session.block_hashes)) == (7, 1)
    scheduler.add_request(piece([9, 10], 1))
    run_step(scheduler)
    same = make_request("same", [5, 6, 7, 3, 3, 3, 3, 9, 10, 11])
    scheduler.add_request(same)
    scheduler.schedule()
    assert same.num_cached_tokens == 8
    assert same.block_hashes[:2] == session.block_hashes[:2]


def test_media_of_later_pieces_stand_behind_what_came_before():
    scheduler = make_scheduler(max_num_encoder_input_tokens=8, encoder_cache_size=16)

    def image(name: str) -> MultiModalFeatureSpec:
        return MultiModalFeatureSpec(None, "image", name, PlaceholderRange(1, 3))

    scheduler.add_request(piece([1, 0, 0, 0, 2], 2, mm_features=[image("A")]))
    step = run_step(scheduler)
    assert step.scheduled_encoder_inputs == {"s": [0]}
    run_step(scheduler)
    scheduler.add_request(piece([1, 0, 0, 0], 2, mm_features=[image("B")]))
    step = scheduler.schedule()
    assert step.scheduled_encoder_inputs == {"s": [1]}
    places = [f.mm_position.offset for f in step.scheduled_new_reqs[0].mm_features]
    assert places == [1, 7]


def test_a_piece_may_change_how_it_is_answered():
    scheduler = make_scheduler()
    scheduler.add_request(piece([5, 6], 1))
    run_step(scheduler)
    params = SamplingParams(max_tokens=9, stop_token_ids=[3])
    scheduler.add_request(Request("s", [7], params, resumable=True))
    step = scheduler.schedule()
    assert step.scheduled_new_reqs[0].sampling_params is params
    assert scheduled(step) == {"s": 1}
    output = finish_step(scheduler, step)["s"]
    assert (output.finish_reason, output.stop_reason) == (FinishReason.STOP, 3)


def test_a_session_that_waits_gives_its_blocks_to_others_and_goes_on_all_the_same():
    engine = Engine(make_scheduler(num_blocks=8))
    scheduler = engine.scheduler
    scheduler.add_request(piece([5, 6, 7, 8, 9], 3))
    engine.settle()
    scheduler.add_request(make_request("large", 20, 4, ignore_eos=True))
    engine.settle()
    assert len(engine.answers("large")[0]) == 4
    assert scheduler.requests["s"].num_computed_tokens == 0
    scheduler.add_request(piece([1, 2], 3))
    engine.settle()
    assert engine.answers("s") == expected([[5, 6, 7, 8, 9], [1, 2]], 3)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Request("s", [], SamplingParams(), resumable=True), "empty"),
        (Request("s", [1], pooling_params=PoolingParams(), resumable=True), "generation"),
        (piece(list(range(60))), "at most 63"),
    ],
)
def test_a_piece_that_cannot_be_taken_ends_its_session_with_an_error(bad, message):
    engine = Engine(make_scheduler(max_model_len=64))
    engine.scheduler.add_request(piece([5, 6, 7, 8], 2))
    engine.scheduler.add_request(bad)
    engine.settle()
    last = engine.outputs["s"][-1]
    assert last.finish_reason is FinishReason.ERROR
    assert message in str(last.error)
    assert engine.scheduler.kv_cache_manager.usage == 0


def test_an_end_is_told_to_the_connector_once():
    connector = ScriptedConnector()
    scheduler = make_scheduler(hooks={"connector": connector})
    scheduler.add_request(piece([5, 6], 1))
    run_step(scheduler)
    scheduler.add_request(piece([7], 1))
    run_step(scheduler)
    assert connector.named("finished") == []
    scheduler.add_request(piece([1], last=True))
    scheduler.schedule()
    assert len(connector.named("finished")) == 1


@pytest.mark.parametrize(("scheduler_class", "depth"), [(Scheduler, 1), (AsyncScheduler, 3)])
@pytest.mark.parametrize("window", [None, 3])
def test_random_sessions_are_answered_like_one_text(scheduler_class, depth, window):
    """Among other requests, in a machine that runs out of blocks."""
    # Tokens that stop an answer come when more tokens are under way.
    stops = (2, 5, 9)
    for seed in range(10):
        rng = random.Random(seed)
        engine = Engine(
            make_scheduler(
                scheduler_class=scheduler_class,
                num_blocks=24 if window is None else 40,
                max_model_len=48,
                window=window,
                max_num_batched_tokens=12,
                max_num_seqs=3,
                caching=rng.random() < 0.5,
            ),
            depth,
        )
        pieces: dict[str, list[list[int]]] = {f"s{i}": [] for i in range(3)}
        for count in range(20):
            name = f"s{rng.randrange(3)}"
            if rng.random() < 0.5 and sum(len(p) + 3 for p in pieces[name]) < 36:
                tokens = [50 + count] * rng.randrange(1, 6)
                pieces[name].append(tokens)
                engine.scheduler.add_request(piece(tokens, 3, session=name, stops=stops))
            elif rng.random() < 0.3:
                engine.scheduler.add_request(make_request(f"r{count}", rng.randrange(1, 20), 4))
            for _ in range(rng.randrange(4)):
                engine.step()
        engine.settle()
        for name, given in pieces.items():
            assert engine.answers(name) == expected(given, 3, stops)
            if given:
                engine.scheduler.add_request(piece([1], last=True, session=name))
        engine.settle()
        assert engine.scheduler.kv_cache_manager.usage == 0
