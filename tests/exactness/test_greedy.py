"""Greedy tokens equal transformers', whatever the batch, the cache, the budget or the pool do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jubako import LLM, RequestOutput, SamplingParams
from jubako.engine.client import InprocClient
from tests.exactness import oracle
from tests.exactness.conftest import Case

TINY = list(oracle.CONFIGS)
OVERLAPPING = ["llama", "gemma3"]


def engine(model: Path, **options: Any) -> LLM:
    """A float32 engine that reads `model`."""
    threads = 1 if "gguf" not in model.suffix else None  # a tiny model gains nothing from two
    options = {"dtype": "float32", "max_model_len": 2048, "num_threads": threads} | options
    return LLM(model=str(model), **options)


def run(llm: LLM, prompts: list[list[int]], answers: list[oracle.Answer]) -> list[RequestOutput]:
    """Generate, compare with the oracle, return the outputs."""
    params = SamplingParams(temperature=0.0, max_tokens=len(answers[0].token_ids), ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    for prompt, output, answer in zip(prompts, outputs, answers, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].finish_reason == "length"
        what = f"prompt of {len(prompt)} ({output.num_cached_tokens} cached)"
        oracle.assert_same(output.outputs[0].token_ids, answer, what)
    return outputs


def check_alone_and_hits(case: Case) -> None:
    model, prompts, answers = case
    with engine(model) as llm:
        for prompt, answer in zip(prompts, answers, strict=True):
            run(llm, [prompt], [answer])
        block = llm.llm_engine.ready.block_sizes[0]
        # All is cached now: a prompt sent again computes only what is left of its last block.
        for prompt, answer in list(zip(prompts, answers, strict=True))[::4]:
            (output,) = run(llm, [prompt], [answer])
            assert output.num_cached_tokens == (len(prompt) - 1) // block * block
        # And so in a batch, where hits of many lengths run side by side.
        for output in run(llm, prompts, answers):
            assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // block * block
        assert llm.reset_prefix_cache()
        assert all(o.num_cached_tokens == 0 for o in run(llm, prompts[:1], answers[:1]))


def check_batched(case: Case) -> None:
    model, prompts, answers = case
    with engine(model, enable_prefix_caching=False) as llm:
        for output in run(llm, prompts, answers):
            assert output.num_cached_tokens == 0


def check_budget(case: Case) -> None:
    model, prompts, answers = case
    with engine(model, max_num_batched_tokens=64) as llm:
        run(llm, prompts, answers)
        run(llm, prompts[::-1], answers[::-1])


def check_preemption(case: Case) -> None:
    model, prompts, answers = case
    options = {"block_size": 8, "max_num_batched_tokens": 64, "max_model_len": 1536}
    with engine(model, **options) as llm:
        blocks = blocks_of_one_request(llm)
    # Room for one longest request, so that running requests push each other out.
    options |= {"num_gpu_blocks_override": blocks, "scheduler_reserve_full_isl": False}
    with engine(model, **options) as llm:
        outputs = run(llm, prompts, answers)
        assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
        assert llm.reset_prefix_cache(), "every block is free again"


def blocks_of_one_request(llm: LLM) -> int:
    """Blocks that a request of the longest length may hold, and the null block."""
    client = llm.llm_engine.client
    assert isinstance(client, InprocClient)
    specs = [g.kv_cache_spec for g in client.core.scheduler.kv_cache_config.kv_cache_groups]
    return 1 + sum(s.max_memory_usage_bytes(client.config) // s.page_size_bytes for s in specs)


def check_overlapping_steps(case: Case) -> None:
    model, prompts, answers = case
    options = {"block_size": 8, "max_num_batched_tokens": 64, "max_model_len": 1536}
    with engine(model, async_scheduling=True, **options) as llm:
        run(llm, prompts[:6], answers[:6])
        blocks = blocks_of_one_request(llm)
    options |= {"num_gpu_blocks_override": blocks, "scheduler_reserve_full_isl": False}
    with engine(model, async_scheduling=True, **options) as llm:
        outputs = run(llm, prompts, answers)
        assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
        assert llm.reset_prefix_cache(), "every block is free again"


CHECKS = [check_alone_and_hits, check_batched, check_budget, check_preemption]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("name", TINY)
def test_tiny_models(name: str, check: Any, tiny_case: Any) -> None:
    check(tiny_case(name))


@pytest.mark.parametrize("name", OVERLAPPING)
def test_overlapping_steps(name: str, tiny_case: Any) -> None:
    check_overlapping_steps(tiny_case(name))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_default_model(check: Any, default_case: Case) -> None:
    check(default_case)
