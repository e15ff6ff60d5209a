"""Chunks and sink tokens are whole numbers of KV blocks, which is checked before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from jubako import LLM, SamplingParams
from jubako.engine.client import InprocClient
from jubako.errors import ConfigError
from tests.exactness import oracle

OPTIONS = {"dtype": "float32", "max_model_len": 256, "num_threads": 1}


def test_a_chunk_that_ends_inside_a_block(tmp_path: Path) -> None:
    oracle.make_model("llama4", tmp_path)
    with pytest.raises(ConfigError, match=r"attention_chunk_size 96.*block size 64"):
        LLM(model=str(tmp_path), block_size=64, **OPTIONS)


def test_sink_tokens_that_end_inside_a_block(tmp_path: Path) -> None:
    oracle.make_model("llama-sink", tmp_path)
    with pytest.raises(ConfigError, match=r"sink_len is 48.*block size 32"):
        LLM(model=str(tmp_path), block_size=32, **OPTIONS)


def test_sink_blocks_are_set_aside_and_never_handed_out(tmp_path: Path) -> None:
    """With room for one longest request, the null block and the sinks, it runs; with less, not."""
    model = oracle.make_model("llama-sink", tmp_path)
    sinks, own = 48 // 16, 256 // 16
    options = {**OPTIONS, "block_size": 16}
    with pytest.raises(ConfigError, match="max_model_len 256"):
        LLM(model=str(tmp_path), num_gpu_blocks_override=own + sinks, **options)
    prompts = oracle.make_prompts([200, 60, 180], oracle.VOCAB, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    with LLM(model=str(tmp_path), num_gpu_blocks_override=own + sinks + 1, **options) as llm:
        # Time and again: every block that is not a sink's is used.
        for _ in range(3):
            outputs = llm.generate(list(prompts), params, use_tqdm=False)
            for prompt, output in zip(prompts, outputs, strict=True):
                oracle.Oracle(model).judge(prompt, output.outputs[0].token_ids)
        client = llm.llm_engine.client
        assert isinstance(client, InprocClient)
        assert client.core.scheduler.kv_cache_manager.usage == 0
        assert llm.reset_prefix_cache()
