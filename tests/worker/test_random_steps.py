"""Whatever else runs and however a request is scheduled, it gets what it would get alone."""

from __future__ import annotations

import random

import pytest
import torch

from jubako.sampling_params import SamplingParams
from jubako.worker.staging import StepStaging
from tests.worker.driver import Driver, Job
from tests.worker.stub_model import GROUPS, VOCAB_SIZE, make_config, make_runner


def random_params(rng: random.Random) -> SamplingParams:
    """Every parameter that reaches the sampler, each now and then."""

    def some(share: float) -> bool:
        return rng.random() < share

    ids = range(VOCAB_SIZE)
    return SamplingParams(
        temperature=0.0 if some(0.4) else rng.choice([0.3, 0.8, 1.0, 1.7]),
        top_k=rng.choice([1, 2, 5, 20, 60]) if some(0.3) else 0,
        top_p=rng.choice([0.1, 0.5, 0.9, 0.99]) if some(0.3) else 1.0,
        min_p=rng.choice([0.01, 0.2, 1.0]) if some(0.2) else 0.0,
        repetition_penalty=rng.choice([0.7, 1.3, 2.0]) if some(0.2) else 1.0,
        frequency_penalty=rng.choice([-1.0, 0.5, 2.0]) if some(0.2) else 0.0,
        presence_penalty=rng.choice([-1.0, 0.5, 2.0]) if some(0.2) else 0.0,
        logit_bias={rng.choice(ids): rng.uniform(-9, 9) for _ in range(3)} if some(0.2) else None,
        allowed_token_ids=rng.sample(ids, rng.choice([1, 2, 20])) if some(0.2) else None,
        bad_words_token_ids=(
            [[rng.choice(ids) for _ in range(rng.choice([1, 1, 2]))] for _ in range(20)]
            if some(0.2)
            else None
        ),
        min_tokens=rng.choice([1, 3, 8]) if some(0.3) else 0,
        stop_token_ids=rng.sample(ids, 20) if some(0.3) else None,
        logprobs=rng.choice([0, 1, 4]) if some(0.3) else None,
        prompt_logprobs=rng.choice([0, 2]) if some(0.2) else None,
        max_tokens=64,
    )


def random_jobs(rng: random.Random, count: int) -> list[Job]:
    stems = [[rng.randrange(VOCAB_SIZE) for _ in range(24)] for _ in range(3)]
    jobs = []
    for number in range(count):
        stem = rng.choice(stems)[: rng.randint(0, 24)]
        prompt = stem + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(1, 12))]
        jobs.append(
            Job(f"r{number}", prompt, random_params(rng), rng.getrandbits(64), rng.randint(1, 14))
        )
    return jobs


def run_mixed(driver: Driver, jobs: list[Job], rng: random.Random) -> None:
    waiting = list(jobs)
    while waiting or driver.live:
        arrivals = []
        while waiting and rng.random() < 0.4 and len(driver.live) + len(arrivals) < 9:
            job = waiting.pop(0)
            if driver.finished and rng.random() < 0.5:
                # An id may come back as a new request in the step that ends the old one.
                job.req_id = sorted(driver.finished)[0]
            if job.req_id not in {j.req_id for j in driver.live + arrivals}:
                arrivals.append(job)
            else:
                waiting.insert(0, job)
                break
        driver.step(arrivals)


@pytest.mark.parametrize("seed", range(12))
def test_every_request_gets_what_it_gets_alone(seed: int) -> None:
    rng = random.Random(seed)
    jobs = random_jobs(rng, 14)
    driver = Driver(make_runner(), GROUPS, seed=seed)
    run_mixed(driver, jobs, rng)
    reference = Driver(make_runner(), GROUPS)
    for job in jobs:
        assert job.result() == reference.run_alone(job).result(), job.params


@pytest.mark.parametrize("seed", range(3))
def test_greedy_requests_get_the_models_own_tokens(seed: int) -> None:
    rng = random.Random(100 + seed)
    jobs = random_jobs(rng, 10)
    for job in jobs:
        job.params = SamplingParams(temperature=0)
    runner = make_runner()
    run_mixed(Driver(runner, GROUPS, seed=seed), jobs, rng)
    for job in jobs:
        assert job.output == runner.model.greedy(job.prompt, job.max_tokens)


@pytest.mark.parametrize(
    "variant",
    [
        {"groups": ((4, None, 1),)},
        {"groups": ((4, 6, 3),)},
        {"groups": ((16, None, 1), (4, 9, 1)), "kernel_block_sizes": [4]},
        {"staging": StepStaging(torch.device("cpu"), alias=False)},
    ],
    ids=["full only", "window only", "kernel blocks split", "packed copies"],
)
def test_other_layouts_give_the_models_own_tokens_too(variant: dict) -> None:
    rng = random.Random(7)
    jobs = random_jobs(rng, 10)
    for job in jobs:
        job.params = SamplingParams(temperature=0)
    runner = make_runner(**variant)
    run_mixed(Driver(runner, variant.get("groups", GROUPS), seed=7), jobs, rng)
    for job in jobs:
        assert job.output == runner.model.greedy(job.prompt, job.max_tokens)


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 30])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_any_chunking_gives_the_same_tokens_and_prompt_logprobs(
    chunk: int, temperature: float
) -> None:
    prompt = [(7 * i + 3) % VOCAB_SIZE for i in range(30)]
    params = SamplingParams(temperature=temperature, prompt_logprobs=3, logprobs=2)
    job = Job("a", prompt, params, seed=5, max_tokens=6)
    whole = Driver(make_runner(), GROUPS).run_alone(job)
    driver = Driver(make_runner(), GROUPS)
    driver.step([job], {"a": chunk}, calm=True)
    while not job.done:
        driver.step(chunks={"a": chunk}, calm=True)
    assert job.result() == whole.result()


def test_rows_inside_their_prompt_cost_no_logits() -> None:
    runner = make_runner()
    driver = Driver(runner, GROUPS)
    params = SamplingParams(temperature=1)
    driver.step([Job("a", [1] * 9, params, 1, 3)], {"a": 4}, calm=True)
    assert runner.model.num_logits_rows == 0
    driver.step([Job("b", [2] * 2, params, 2, 3)], {"a": 4, "b": 2}, calm=True)
    assert runner.model.num_logits_rows == 1


def test_a_step_of_a_long_context_ends_at_the_last_position() -> None:
    config = make_config(max_model_len=16)
    job = Job("a", [3] * 12, SamplingParams(temperature=0), 0, max_tokens=4)
    driver = Driver(make_runner(config), GROUPS)
    assert len(driver.run_alone(job).output) == 4
