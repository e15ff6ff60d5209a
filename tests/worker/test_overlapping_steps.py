"""A scheduler that plans ahead and a worker: everybody gets what one step after the other gives."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from jubako.scheduler import (
    AsyncScheduler,
    ModelRunnerOutput,
    Request,
    RequestStatus,
    Scheduler,
    SchedulerOutput,
)
from jubako.scheduler.model_output import LogprobsLists
from tests.worker.stub_model import GROUPS, make_config, make_kv_config, make_runner
from tests.worker.test_random_steps import random_jobs


@dataclass
class Answer:
    """What one request got."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    prompt_logprobs: Any = None
    end: Any = None


def lists(rows: LogprobsLists) -> list[Any]:
    return [
        rows.logprob_token_ids.tolist(),
        np.round(rows.logprobs, 5).tolist(),
        rows.sampled_token_ranks.tolist(),
    ]


def run(scheduler_class: type[Scheduler], depth: int, seed: int, **events: float) -> dict[str, Any]:
    """Random requests, all of them at once; answers by id.

    `events` are the chances that a step is followed by an abort or a reset of the cache.
    """
    rng = random.Random(seed)
    jobs = random_jobs(rng, 12)
    events_rng = random.Random(seed + 1)
    config = make_config(max_num_batched_tokens=rng.choice([8, 24]), max_num_seqs=5)
    runner = make_runner(config, num_blocks=32)
    kv_config = make_kv_config(list(runner.layers.values()), GROUPS, num_blocks=32)
    scheduler = scheduler_class(config, kv_config)
    for job in jobs:
        params = job.params.clone()
        params.max_tokens = job.max_tokens
        params.min_tokens = min(params.min_tokens, job.max_tokens)
        scheduler.add_request(
            Request(job.req_id, job.prompt, params, eos_token_id=3, seed=job.seed)
        )
    answers = {job.req_id: Answer() for job in jobs}
    in_flight: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()

    def take_result() -> None:
        for output in [
            o
            for m in scheduler.update_from_output(*in_flight.popleft()).values()
            for o in m.outputs
        ]:
            answer = answers[output.request_id]
            assert answer.end is None
            answer.tokens += output.new_token_ids
            if output.new_logprobs is not None:
                answer.logprobs += zip(*lists(output.new_logprobs))
            if output.new_prompt_logprobs_tensors is not None:
                assert answer.prompt_logprobs is None
                answer.prompt_logprobs = lists(output.new_prompt_logprobs_tensors)
            if output.finished:
                answer.end = (output.finish_reason, output.stop_reason)

    preempted = 0
    for _ in range(3000):
        if not scheduler.has_requests() and not in_flight:
            break
        if scheduler.has_requests():
            step = scheduler.schedule()
            preempted += len(step.preempted_req_ids or ())
            result = runner.execute_model(step) or runner.sample_tokens(None)
            assert result is not None
            in_flight.append((step, result))
        if events_rng.random() < events.get("abort", 0) and scheduler.requests:
            name = events_rng.choice(sorted(scheduler.requests))
            scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
            answers[name].end = "aborted"
        if events_rng.random() < events.get("reset", 0):
            assert scheduler.reset_prefix_cache(reset_running_requests=True)
        if len(in_flight) >= depth or not scheduler.has_requests():
            take_result()
    assert all(answer.end is not None for answer in answers.values())
    assert not runner.requests
    assert scheduler.reset_prefix_cache()
    return {"answers": answers, "preempted": preempted}


@pytest.mark.parametrize("seed", range(6))
def test_answers_are_those_of_one_step_after_the_other(seed: int) -> None:
    expected = run(Scheduler, 1, seed)
    for depth in (2, 3):
        found = run(AsyncScheduler, depth, seed)
        assert found["answers"] == expected["answers"]


@pytest.mark.parametrize("seed", range(6))
def test_resets_and_aborts_in_flight_change_no_answer(seed: int) -> None:
    expected = run(Scheduler, 1, seed)["answers"]
    found = run(AsyncScheduler, 2, seed, abort=0.05, reset=0.1)["answers"]
    for name, answer in found.items():
        if answer.end == "aborted":
            assert answer.tokens == expected[name].tokens[: len(answer.tokens)]
        else:
            assert answer == expected[name]


def test_the_pool_is_small_enough_to_matter() -> None:
    assert sum(run(AsyncScheduler, 2, seed)["preempted"] for seed in range(6)) > 0
