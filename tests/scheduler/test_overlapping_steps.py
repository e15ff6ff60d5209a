"""Steps in flight, with and without drafts: the answers are those of one step after the other."""

from __future__ import annotations

import os
import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jubako.errors import ValidationError
from jubako.kv_cache import SlidingWindowSpec
from jubako.scheduler import (
    AsyncScheduler,
    DraftTokenIds,
    LogprobsLists,
    ModelRunnerOutput,
    OverlappingScheduler,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from tests.scheduler.harness import (
    Driver,
    check_all_free,
    check_invariants,
    make_request,
    make_scheduler,
    result_for,
    scheduled,
)

NIGHTLY = os.environ.get("JUBAKO_NIGHTLY") == "1"
EOS = 1
VOCAB = 11
NEVER_RIGHT = VOCAB + 1


def prefix_hashes(tokens: Sequence[int]) -> list[int]:
    """For each position, a number that stands for all tokens up to it: their KV."""
    state, hashes = 17, []
    for token in tokens:
        state = (state * 1_000_003 + token * 7919 + 11) % (2**61 - 1)
        hashes.append(state)
    return hashes


def next_token(tokens: Sequence[int]) -> int:
    """The model: what follows `tokens`, depending on every one of them."""
    return (prefix_hashes(tokens)[-1] >> 7) % VOCAB


def answer(request: Request, max_model_len: int) -> list[int]:
    """What `request` gets when it runs alone, token by token."""
    params = request.sampling_params
    assert params is not None
    tokens = list(request.prompt_token_ids or ())
    output: list[int] = []
    while True:
        tokens.append(next_token(tokens))
        output.append(tokens[-1])
        if tokens[-1] == EOS and not params.ignore_eos:
            return output
        if tokens[-1] in params.stop_ids:
            return output
        if len(tokens) >= max_model_len or len(output) == params.max_tokens:
            return output


@dataclass
class Known:
    """What the worker knows of a request."""

    tokens: list[int]
    block_ids: list[list[int]]
    num_computed: int
    drafts: list[int] = field(default_factory=list)


class DraftingWorker:
    """Samples, verifies drafts, and makes up to `num_drafts` new ones of which some are wrong.

    It counts computed tokens itself: what the scheduler says may include drafts that were refused
    in a step that has not come back. Every KV slot that a step reads is looked at.
    """

    def __init__(self, scheduler: Scheduler, num_drafts: int, seed: int) -> None:
        self.scheduler = scheduler
        self.specs = [g.kv_cache_spec for g in scheduler.kv_cache_config.kv_cache_groups]
        self.num_drafts = num_drafts
        self.seed = seed
        self.requests: dict[str, Known] = {}
        self.kv: dict[tuple[int, int, int], int] = {}
        self.finished: set[str] = set()
        self.proposed = DraftTokenIds([], [])
        self.num_accepted = 0
        self.num_refused = 0

    def _apply(self, step: SchedulerOutput) -> None:
        for request_id in step.finished_req_ids:
            assert request_id not in self.finished
            self.finished.add(request_id)
            self.requests.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self.requests[new.req_id] = Known(
                list(new.prompt_token_ids or ()),
                [list(ids) for ids in new.block_ids],
                new.num_computed_tokens,
            )
        cached = step.scheduled_cached_reqs
        for row, request_id in enumerate(cached.req_ids):
            known, told = self.requests[request_id], cached.num_computed_tokens[row]
            new_ids = cached.new_block_ids[row]
            if request_id in cached.resumed_req_ids:
                assert new_ids is not None
                known.block_ids = [list(ids) for ids in new_ids]
                known.tokens = list(cached.all_token_ids[request_id])
                known.num_computed, known.drafts = told, []
                continue
            assert told >= known.num_computed
            for table, ids in zip(known.block_ids, new_ids or ()):
                table += ids

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        self._apply(step)
        self.proposed = DraftTokenIds([], [])
        sampled: dict[str, list[int]] = {}
        chunks: dict[str, list[int]] = {}
        for request_id, count in step.num_scheduled_tokens.items():
            known = self.requests[request_id]
            drafts = self._drafts(known, step.scheduled_spec_decode_tokens.get(request_id, []))
            end = known.num_computed + count
            assert end <= len(known.tokens) + len(drafts)
            chunks[request_id] = (known.tokens + drafts)[:end]
            self._write(known, chunks[request_id])
        for request_id, tokens in chunks.items():
            known = self.requests[request_id]
            self._check_reads(known, tokens)
            sampled[request_id] = self._sample(known, tokens)
            if sampled[request_id]:
                self._propose(request_id, known)
        req_ids = list(chunks)
        return ModelRunnerOutput(
            req_ids=req_ids,
            req_id_to_index={request_id: row for row, request_id in enumerate(req_ids)},
            sampled_token_ids=[sampled[request_id] for request_id in req_ids],
        )

    def _drafts(self, known: Known, planned: list[int]) -> list[int]:
        if planned and planned[0] == -1:
            own = known.drafts[: len(planned)]
            return own + [NEVER_RIGHT] * (len(planned) - len(own))
        return planned

    def _slot(self, known: Known, group: int, position: int) -> tuple[int, int, int]:
        size = self.specs[group].block_size
        block_id = known.block_ids[group][position // size]
        return group, block_id, position % size

    def _write(self, known: Known, tokens: list[int]) -> None:
        hashes = prefix_hashes(tokens)
        for group in range(len(self.specs)):
            for position in range(known.num_computed, len(tokens)):
                slot = self._slot(known, group, position)
                if slot[1]:
                    self.kv[slot] = hashes[position]

    def _check_reads(self, known: Known, tokens: list[int]) -> None:
        hashes = prefix_hashes(tokens)
        for group, spec in enumerate(self.specs):
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(0, known.num_computed - spec.sliding_window + 1)
            for position in range(first, len(tokens)):
                assert self.kv.get(self._slot(known, group, position)) == hashes[position]

    def _sample(self, known: Known, tokens: list[int]) -> list[int]:
        start = len(known.tokens)
        known.num_computed = len(tokens)
        if len(tokens) < start:
            return []
        accepted: list[int] = []
        for position in range(start, len(tokens) + 1):
            accepted.append(next_token(tokens[:position]))
            if position < len(tokens) and tokens[position] != accepted[-1]:
                break
        self.num_accepted += len(accepted) - 1
        self.num_refused += len(tokens) - start - (len(accepted) - 1)
        known.tokens += accepted
        known.num_computed = len(known.tokens) - 1
        return accepted

    def _propose(self, request_id: str, known: Known) -> None:
        rng = random.Random(f"{self.seed} {request_id} {len(known.tokens)}")
        tokens = list(known.tokens)
        for _ in range(rng.randint(0, self.num_drafts)):
            tokens.append(next_token(tokens))
        right = tokens[len(known.tokens) :]
        known.drafts = right + [NEVER_RIGHT] * (self.num_drafts - len(right))
        self.proposed.req_ids.append(request_id)
        self.proposed.draft_token_ids.append(known.drafts)


class Runner:
    """Runs the steps of a scheduler with up to `depth` in flight, and gathers what comes out."""

    def __init__(self, scheduler: Scheduler, num_drafts: int, seed: int, depth: int) -> None:
        self.scheduler = scheduler
        self.worker = DraftingWorker(scheduler, num_drafts, seed)
        self.depth = depth
        self.in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput, DraftTokenIds]] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, list[int]] = {}
        self.ended: set[str] = set()
        self.aborted: set[str] = set()
        self.num_preemptions = 0

    def add(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.outputs[request.request_id] = []
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)
        self.aborted.add(request_id)
        check_invariants(self.scheduler)

    def step(self) -> None:
        scheduler = self.scheduler
        step = scheduler.schedule()
        check_invariants(scheduler)
        for request in scheduler.requests.values():
            assert 0 <= request.num_draft_placeholders <= request.num_output_placeholders
        self.num_preemptions += len(step.preempted_req_ids or ())
        self.in_flight.append((step, self.worker.execute(step), self.worker.proposed))
        if len(self.in_flight) >= self.depth:
            self.take_result()

    def take_result(self) -> None:
        step, result, proposed = self.in_flight.popleft()
        for message in self.scheduler.update_from_output(step, result).values():
            for output in message.outputs:
                request_id = output.request_id
                assert request_id not in self.ended | self.aborted
                self.outputs[request_id] += output.new_token_ids
                if output.finished:
                    self.ended.add(request_id)
        if not isinstance(self.scheduler, AsyncScheduler):
            self.scheduler.update_draft_token_ids(proposed)
        check_invariants(self.scheduler)

    def finish(self) -> None:
        """Run to the end; everybody got what the model says, and nothing is left behind."""
        limit = 100 + 400 * len(self.scheduler.requests)
        while self.scheduler.has_requests() or self.in_flight:
            if self.scheduler.has_requests():
                self.step()
            else:
                self.take_result()
            limit -= 1
            assert limit, "no progress"
        for request_id, request in self.requests.items():
            expected, got = answer(request, self.scheduler.max_model_len), self.outputs[request_id]
            if request_id in self.aborted:
                assert got == expected[: len(got)]
                continue
            assert request_id in self.ended
            assert got == expected
        assert self.worker.finished == set(self.requests)
        assert not getattr(self.scheduler, "_ended_in_flight", None)
        check_all_free(self.scheduler)


def options(rng: random.Random) -> dict[str, Any]:
    block_size = rng.choice([1, 2, 4])
    max_model_len = rng.randint(12, 40)
    window = rng.choice([None, None, 1, 3, 7])
    longest = -(-max_model_len // block_size)
    budget = rng.randint(1, 24)
    return {
        "block_size": block_size,
        "max_model_len": max_model_len,
        "window": window,
        "num_blocks": 1 + (1 + (window is not None)) * longest + rng.randint(0, 2 * longest),
        "caching": rng.random() < 0.6,
        "max_num_batched_tokens": budget,
        "max_num_seqs": rng.randint(1, min(6, budget)),
        "scheduling_policy": rng.choice(["fcfs", "priority"]),
        "fair_prefill": rng.random() < 0.5,
    }


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize(
    "scheduler_class", [Scheduler, OverlappingScheduler, AsyncScheduler], ids=lambda c: c.__name__
)
def test_answers_do_not_depend_on_drafts_or_on_steps_in_flight(
    scheduler_class: type[Scheduler], depth: int, num_drafts: int
) -> None:
    """Small pools and budgets: chunks, preemptions, aborts and resets at every moment."""
    if scheduler_class is Scheduler and depth > 1:
        pytest.skip("one step after the other only")
    accepted = refused = preemptions = 0
    for seed in range(400 if NIGHTLY else 25):
        rng = random.Random(seed)
        scheduler = make_scheduler(scheduler_class=scheduler_class, **options(rng))
        scheduler.num_spec_tokens = num_drafts
        runner = Runner(scheduler, num_drafts, seed, depth)
        for number in range(60):
            if rng.random() < 0.3:
                length = rng.randint(1, scheduler.max_model_len - 1)
                runner.add(
                    make_request(
                        f"r{number}",
                        [7 * rng.randrange(2) + i for i in range(length)],
                        rng.randint(1, 14),
                        arrival=float(number),
                        priority=rng.randrange(3) if scheduler.policy == "priority" else 0,
                        eos=EOS,
                        ignore_eos=rng.random() < 0.7,
                        stop_token_ids=[3] if rng.random() < 0.2 else [],
                    )
                )
            if rng.random() < 0.08 and scheduler.requests:
                runner.abort(rng.choice(sorted(scheduler.requests)))
            if rng.random() < 0.05:
                assert scheduler.reset_prefix_cache(reset_running_requests=True)
                check_invariants(scheduler)
            runner.step()
        runner.finish()
        accepted += runner.worker.num_accepted
        refused += runner.worker.num_refused
        preemptions += runner.num_preemptions
    assert preemptions > 10
    if num_drafts:
        assert accepted > 100
        assert refused > 100


def test_counters_of_a_request_that_drafts() -> None:
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    scheduler.num_spec_tokens = 2
    request = make_request("a", 5, 20, ignore_eos=True)
    scheduler.add_request(request)
    first, second, third = (scheduler.schedule() for _ in range(3))
    assert [scheduled(s) for s in (first, second, third)] == [{"a": 5}, {"a": 3}, {"a": 3}]
    assert first.scheduled_spec_decode_tokens == {}
    assert second.scheduled_spec_decode_tokens == {"a": [-1, -1]}
    assert second.scheduled_cached_reqs.num_computed_tokens == [5]
    # As if both drafts of the second step were accepted.
    assert third.scheduled_cached_reqs.num_computed_tokens == [8]
    assert third.scheduled_cached_reqs.num_output_tokens == [4]
    assert (request.num_output_placeholders, request.num_in_flight_tokens) == (7, 11)
    scheduler.update_from_output(first, result_for(first, a=[10]))
    assert (request.num_computed_tokens, request.num_output_placeholders) == (11, 6)
    scheduler.update_from_output(second, result_for(second, a=[11, 12]))
    # One draft of two was refused.
    assert (request.num_computed_tokens, request.num_output_placeholders) == (10, 3)
    scheduler.update_from_output(third, result_for(third, a=[13]))
    assert request.output_token_ids == [10, 11, 12, 13]
    assert request.num_computed_tokens == request.num_tokens - 1
    assert request.num_output_placeholders == request.num_in_flight_tokens == 0


def test_refused_drafts_let_a_request_go_on_until_its_limit() -> None:
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    scheduler.num_spec_tokens = 3
    scheduler.add_request(make_request("a", 5, 4, ignore_eos=True))
    first, second = scheduler.schedule(), scheduler.schedule()
    scheduler.update_from_output(first, result_for(first, a=[10]))
    # Four tokens may be on their way, but perhaps it is one: two are still wanted then.
    third = scheduler.schedule()
    assert scheduled(third) == {"a": 4}
    scheduler.update_from_output(second, result_for(second, a=[11]))
    # With the third step's token, one is left.
    fourth = scheduler.schedule()
    assert scheduled(fourth) == {"a": 4}
    scheduler.update_from_output(third, result_for(third, a=[12]))
    assert scheduled(scheduler.schedule()) == {}
    (output,) = scheduler.update_from_output(fourth, result_for(fourth, a=[13, 14]))[0].outputs
    assert output.new_token_ids == [13]
    assert output.finished


def test_drafts_are_shortened_before_anybody_starves() -> None:
    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler, max_num_batched_tokens=6, max_num_seqs=4
    )
    scheduler.num_spec_tokens = 3
    for name in "abc":
        scheduler.add_request(make_request(name, 2, 30, ignore_eos=True))
    scheduler.schedule()
    assert scheduled(scheduler.schedule()) == {"a": 2, "b": 2, "c": 2}


def test_drafts_are_trimmed_and_padded_to_what_was_scheduled() -> None:
    class Grammars:
        """No token above 50."""

        def is_ready(self, request: Any) -> bool:
            return True

        def validate_drafts(self, request: Any, token_ids: list[int]) -> list[int]:
            bad = [i for i, token_id in enumerate(token_ids) if token_id > 50]
            return token_ids[: bad[0]] if bad else token_ids

        def grammar_bitmask(self, requests: Any, drafts: Any) -> Any:
            return np.zeros((sum(1 + len(drafts.get(r.request_id, ())) for r in requests), 1))

        def accept_tokens(self, request: Any, token_ids: Any) -> None:
            """Nothing to advance."""

        def release(self, request: Any) -> None:
            """Nothing to release."""

    scheduler = make_scheduler(
        scheduler_class=AsyncScheduler, hooks={"structured_output_manager": Grammars()}
    )
    scheduler.num_spec_tokens = 3
    for name in "abc":
        request = make_request(name, 4, 30, ignore_eos=True)
        request.uses_grammar = name != "c"
        scheduler.add_request(request)
    first = scheduler.schedule()
    assert not first.pending_structured_output_tokens
    step = scheduler.schedule()
    assert step.pending_structured_output_tokens
    scheduler.update_from_output(first, result_for(first, a=[5], b=[6], c=[7]))
    drafts = DraftTokenIds(["a", "b", "c", "gone"], [[1, 2, 3, 4], [1, 99, 2], [99], [1]])
    scheduler.update_draft_token_ids_in_output(drafts, step)
    assert step.scheduled_spec_decode_tokens == {
        "a": [1, 2, 3],
        "b": [1, -1, -1],
        "c": [99, -1, -1],
    }
    assert step.num_invalid_spec_tokens == {"b": 2}
    grammar = scheduler.get_grammar_bitmask(step)
    assert grammar is not None
    assert grammar.structured_output_request_ids == ["a", "b"]
    assert len(grammar.grammar_bitmask) == 8


def test_drafts_of_a_request_in_flight_are_the_workers_business() -> None:
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    scheduler.num_spec_tokens = 2
    request = make_request("a", 4, 30, ignore_eos=True)
    scheduler.add_request(request)
    step = scheduler.schedule()
    scheduler.update_draft_token_ids(DraftTokenIds(["a", "gone"], [[5], [6]]))
    assert request.spec_token_ids == [-1, -1]
    scheduler.update_from_output(step, result_for(step, a=[9]))
    scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[5]]))
    assert request.spec_token_ids == [5]
    assert scheduler.schedule().scheduled_spec_decode_tokens == {"a": [5]}


def test_an_id_is_in_use_until_its_last_step_is_back() -> None:
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    scheduler.add_request(make_request("a", 4, 9, ignore_eos=True))
    steps = deque([scheduler.schedule(), scheduler.schedule()])
    scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    steps.append(scheduler.schedule())
    assert steps[-1].finished_req_ids == {"a"}
    for _ in range(2):
        with pytest.raises(ValidationError, match="'a' is in use"):
            scheduler.add_request(make_request("a", 4, 9))
        step = steps.popleft()
        # What the first request would have got must not reach a second.
        assert not scheduler.update_from_output(step, result_for(step, a=[8]))
    scheduler.add_request(make_request("a", 4, 1))
    step = scheduler.schedule()
    outputs = scheduler.update_from_output(step, result_for(step, a=[8]))[0].outputs
    assert [o.new_token_ids for o in outputs] == [[8]]
    scheduler.schedule()
    check_all_free(scheduler)


def test_an_id_that_fails_as_its_last_step_comes_back_is_free_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It ends before its turn in that step, as when its KV did not arrive."""
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    request = make_request("a", 4, 9, ignore_eos=True)
    scheduler.add_request(request)
    steps = [scheduler.schedule(), scheduler.schedule()]

    def fail(*_: Any) -> set[str]:
        scheduler._fail(request, "It did not arrive.")
        return set()

    monkeypatch.setattr(scheduler, "_take_failures", fail)
    scheduler.update_from_output(steps[0], result_for(steps[0], a=[8]))
    monkeypatch.undo()
    scheduler.schedule()
    with pytest.raises(ValidationError, match="'a' is in use"):
        scheduler.add_request(make_request("a", 4, 9))
    scheduler.update_from_output(steps[1], result_for(steps[1], a=[8]))
    scheduler.add_request(make_request("a", 4, 1))


def test_prompt_logprobs_survive_a_token_that_is_thrown_away() -> None:
    """A worker scores a prompt once, whatever becomes of the step's token."""
    scheduler = make_scheduler(scheduler_class=AsyncScheduler)
    scheduler.add_request(make_request("a", 3, 2, ignore_eos=True, prompt_logprobs=0))
    step = scheduler.schedule()
    assert scheduler.reset_prefix_cache(reset_running_requests=True)
    result = result_for(step, a=[8])
    scored = LogprobsLists(
        np.zeros((2, 1), np.int32), np.zeros((2, 1), np.float32), np.ones(2, np.int32)
    )
    result.prompt_logprobs_dict = {"a": scored}
    again = scheduler.schedule()
    assert again.scheduled_cached_reqs.resumed_req_ids == {"a"}
    assert not scheduler.update_from_output(step, result)
    (output,) = scheduler.update_from_output(again, result_for(again, a=[8]))[0].outputs
    assert output.new_prompt_logprobs_tensors is scored
    assert output.new_token_ids == [8]


@pytest.mark.parametrize("scheduler_class", [Scheduler, AsyncScheduler])
def test_the_next_turn_finds_all_blocks_of_an_answer(scheduler_class):
    driver = Driver(make_scheduler(scheduler_class=scheduler_class, block_size=2), depth=2)
    driver.add(make_request("first", 8, 3, ignore_eos=True))
    driver.run()
    answered = driver.requests["first"].all_token_ids
    assert len(answered) == 11
    driver.add(make_request("second", [*answered, 1], 2))
    (data,) = driver.schedule().scheduled_new_reqs
    # The last token has no KV.
    assert data.num_computed_tokens == 10
