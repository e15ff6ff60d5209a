"""The default model's greedy tokens equal transformers', on its own weights and sizes.

What only a real model has is checked here: quantised weights, a large vocabulary, long windows.
The modes of the engine have the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jubako import LLM, RequestOutput, SamplingParams
from jubako.utils.cpu import num_cores
from tests.exactness.oracle import Oracle, make_prompts
from tests.exactness.sizes import EVERYTHING
from tests.exactness.subject import blocks_of_one_request

# One is longer than the windows of 512 tokens.
LENGTHS = [5 + 78 * i for i in range(20)] if EVERYTHING else [600, 5, 40, 170]
MAX_TOKENS = 64 if EVERYTHING else 8
BOS = 2


@dataclass
class Case:
    """The model's file, prompts, and transformers on the same file."""

    path: Path
    prompts: list[list[int]]
    oracle: Oracle


@pytest.fixture(scope="module")
def case() -> Case:
    from jubako.checkpoint.info import open_checkpoint

    path = Path(open_checkpoint(None).path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    # The engines of tiny models leave PyTorch with one thread.
    torch.set_num_threads(num_cores())
    prompts = [[BOS, *ids[1:]] for ids in make_prompts(LENGTHS, 200_000, seed=11)]
    return Case(path, prompts, Oracle(model.eval()))


def engine(case: Case, **options: Any) -> LLM:
    options = {"dtype": "float32", "max_model_len": 2048} | options
    return LLM(model=str(case.path), **options)


def run(case: Case, llm: LLM, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    for ids, output in zip(prompts, outputs, strict=True):
        assert len(output.outputs[0].token_ids) == MAX_TOKENS
        case.oracle.judge(ids, output.outputs[0].token_ids, f"{output.num_cached_tokens} cached")
    return outputs


@pytest.mark.timeout(0 if EVERYTHING else 300)
def test_alone_in_chunks_and_from_the_cache(case: Case) -> None:
    with engine(case, max_num_batched_tokens=256) as llm:
        for ids in case.prompts:
            run(case, llm, [ids])
        block = llm.llm_engine.ready.block_sizes[0]
        for output in run(case, llm, case.prompts):
            assert output.num_cached_tokens == (len(output.prompt_token_ids) - 1) // block * block


@pytest.mark.timeout(0 if EVERYTHING else 300)
def test_batched(case: Case) -> None:
    with engine(case, enable_prefix_caching=False) as llm:
        run(case, llm, case.prompts)


@pytest.mark.skipif(not EVERYTHING, reason="the matrix has it; at full size only")
@pytest.mark.timeout(0)
def test_preempted(case: Case) -> None:
    options = {"block_size": 8, "max_num_batched_tokens": 64, "max_model_len": 1600}
    with engine(case, **options) as llm:
        blocks = blocks_of_one_request(llm)
    options |= {"num_gpu_blocks_override": blocks, "scheduler_reserve_full_isl": False}
    with engine(case, **options) as llm:
        outputs = run(case, llm, case.prompts)
        assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
        assert llm.reset_prefix_cache(), "every block is free again"
