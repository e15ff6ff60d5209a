"""The runner drives recurrent layers: a state is that of its request's tokens, however they came.

Hybrids with attention, in each way of keeping states. Memory is NaN wherever nothing was written,
so that a state that is read before it was written, or of another request, shows.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch

from jubako.config import JubakoConfig
from jubako.kv_cache import MambaSpec
from jubako.kv_cache.sizing import get_kv_cache_configs
from jubako.layers.recurrent import RecurrentLayer
from jubako.models.load import build_model, cache_layers
from jubako.sampling_params import SamplingParams
from jubako.worker.model_runner import ModelRunner
from tests.models.harness import hf_config_of
from tests.models.tiny import VOCAB, reference_model
from tests.worker.driver import Driver, Job
from tests.worker.stub_model import make_config
from tests.worker.test_random_steps import run_mixed

MODELS = ["bamba", "jamba", "qwen3 next"]
MODES = ["none", "align", "all"]
NUM_BLOCKS = 150
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)

every_way = pytest.mark.parametrize(("name", "mode"), [(n, m) for n in MODELS for m in MODES])


class StateDriver(Driver):
    """Prefixes are shared only if every block border has a state."""

    def __init__(self, runner: ModelRunner, groups: Any, mode: str, seed: int = 0) -> None:
        super().__init__(runner, groups, NUM_BLOCKS, seed)
        self.mode = mode
        self.group_of: dict[str, int] = {}
        self.shared = 0

    def _share_prefix(self, job: Job) -> None:
        if self.mode == "all":
            super()._share_prefix(job)
            self.shared += job.computed > 0


@cache
def pair(name: str, mode: str) -> tuple[JubakoConfig, Any]:
    """Configuration and model, whose blocks are as small as its states allow."""
    reference = reference_model(name)
    hf_config = hf_config_of(reference)
    config = make_config(vocab_size=VOCAB).replace(
        model_config={"hf_config": hf_config, "architecture": hf_config["architectures"][0]},
        cache_config={
            "num_gpu_blocks_override": NUM_BLOCKS,
            "mamba_cache_mode": mode,
            "enable_prefix_caching": mode != "none",
        },
    )
    model: Any = build_model(config, torch.device("cpu"))
    model.load_weights(reference.state_dict().items())
    return config, model


def make_driver(name: str, mode: str, seed: int = 0, fill: float = torch.nan) -> StateDriver:
    config, model = pair(name, mode)
    runner = ModelRunner(config, torch.device("cpu"))
    runner.use_model(model, cache_layers(model))
    [kv_config] = get_kv_cache_configs(config, [runner.get_kv_cache_spec()], [1 << 26])
    runner.initialize_kv_cache(kv_config)
    for buffer in runner.kv_buffers:
        buffer.view(torch.float32).fill_(fill)
    specs = [group.kv_cache_spec for group in kv_config.kv_cache_groups]
    assert {isinstance(spec, MambaSpec) for spec in specs} == {True, False}
    groups = [
        (group.kv_cache_spec.block_size, None, len(group.layer_names))
        for group in kv_config.kv_cache_groups
    ]
    driver = StateDriver(runner, groups, mode, seed)
    driver.group_of = {
        layer: index
        for index, group in enumerate(kv_config.kv_cache_groups)
        for layer in group.layer_names
    }
    return driver


def states_of(driver: StateDriver, name: str, job: Job, tokens: int) -> dict[str, torch.Tensor]:
    """The states of all layers after the first `tokens` tokens of a job that is running."""
    model = pair(name, driver.mode)[1]
    found = {}
    for path, layer in model.named_modules():
        if isinstance(layer, RecurrentLayer):
            group = driver.group_of[layer.layer_name]
            block = job.blocks[group][(tokens - 1) // driver.groups[group][0]]
            for kind, state in layer.states.items():
                found[f"{path}.{kind}"] = state[block].float().clone()
    return found


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCAB) for _ in range(length)]


def borders(driver: Driver, length: int, mode: str) -> list[int]:
    """Numbers of tokens after which a state is kept, the last one last."""
    if mode != "all":
        return [length]
    size = driver.groups[0][0]
    return [*range(size, length, size), length]


@every_way
@pytest.mark.parametrize("seed", range(3))
def test_states_after_any_chunking_are_those_of_one_step(name: str, mode: str, seed: int) -> None:
    rng = random.Random(seed)
    tokens = prompt(57, seed)
    whole = make_driver(name, mode, seed)
    one = Job("a", tokens, GREEDY, 0, max_tokens=3)
    whole.step([one], calm=True)
    kept = borders(whole, len(tokens), mode)
    want = [states_of(whole, name, one, count) for count in kept]

    driver = make_driver(name, mode, seed + 1)
    job = Job("b", tokens, GREEDY, 0, max_tokens=3)
    mates = [Job(f"m{i}", prompt(20, 100 + i), GREEDY, 0, max_tokens=30) for i in range(2)]
    driver.step([job, *mates], {"b": rng.randint(1, 9), "m0": 3, "m1": 7}, calm=True)
    while job.computed < len(tokens):
        chunk = min(rng.choice([1, 2, 7, 16, 30]), len(tokens) - job.computed)
        driver.step(chunks={"b": chunk, "m0": 2, "m1": 5}, calm=True)
    got = [states_of(driver, name, job, count) for count in kept]
    for ours, theirs in zip(got, want, strict=True):
        assert ours.keys() == theirs.keys()
        for path in ours:
            torch.testing.assert_close(ours[path], theirs[path], atol=2e-4, rtol=2e-4, msg=path)
    assert job.output[:1] == one.output[:1]


@every_way
def test_a_block_that_is_used_again_leaks_nothing(name: str, mode: str) -> None:
    """Requests come, leave, are preempted and come back, on memory of ever new owners."""
    rng = random.Random(3)
    stem = prompt(40, 9)
    jobs = [
        Job(
            f"r{i}",
            stem[: rng.choice([0, 13, 38, 40])] + prompt(rng.randint(1, 9), i),
            GREEDY,
            seed=i,
            max_tokens=rng.randint(2, 8),
        )
        for i in range(12)
    ]
    mixed = make_driver(name, mode, seed=3)
    run_mixed(mixed, jobs, rng)
    assert bool(mixed.shared) == (mode == "all")
    alone = make_driver(name, mode)
    for job in jobs:
        assert job.output == alone.run_alone(job).output
    assert len({tuple(job.output[:2]) for job in jobs}) > 6


@every_way
def test_what_lay_in_a_block_before_makes_no_difference(name: str, mode: str) -> None:
    answers = []
    for fill in (torch.nan, 0.0, 1e30):
        driver = make_driver(name, mode, fill=fill)
        job = Job("a", prompt(40, 1), GREEDY, 0, max_tokens=8)
        driver.step([job], {"a": 17}, calm=True)
        while not job.done:
            driver.step(calm=True)
        answers.append(job.output)
    assert answers[0] == answers[1] == answers[2]
