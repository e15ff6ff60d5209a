"""A request whose logits are no numbers, or that forbids every token, ends with an error alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jubako import LLM, SamplingParams
from tests.frontend.vocabularies import trained_byte_level

BROKEN = 300
"""A token whose vector is not a number."""


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    folder: Path = tmp_path_factory.mktemp("no-token") / "tiny-llama"
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=448,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
        bos_token_id=None,
        eos_token_id=0,
        dtype="float32",
    )
    model = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        model.model.embed_tokens.weight[BROKEN] = torch.nan
        model.lm_head.weight.mul_(30)
    model.save_pretrained(folder)
    trained_byte_level().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    llm = LLM(str(folder), dtype="float32", num_gpu_blocks_override=40, log_level="error")
    yield llm
    llm.shutdown()


RANDOM = {"temperature": 1.0, "seed": 3}
WAYS = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2},
    {"temperature": 0.0, "logit_bias": {5: 1.0}},
    RANDOM,
    RANDOM | {"top_k": 5},
    RANDOM | {"top_p": 0.5},
    RANDOM | {"min_p": 0.1},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: " ".join(sorted(way)))
def test_logits_that_are_not_numbers(llm: LLM, way: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, **way)
    good = [[10, 20, 30], [40, 50, 60, 70]]
    alone = [output.outputs[0].token_ids for output in llm.generate(good, params)]
    for _ in range(2):
        # The second time blocks are used again that held what is no number.
        outputs = llm.generate([good[0], [10, BROKEN, 30], good[1]], params, use_tqdm=False)
        first, broken, last = (output.outputs[0] for output in outputs)
        assert broken.finish_reason == "error"
        assert not broken.token_ids
        assert [first.token_ids, last.token_ids] == alone
        assert first.finish_reason == last.finish_reason == "length"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_forbids_every_token(llm: LLM, temperature: float) -> None:
    good = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    bad = SamplingParams(
        max_tokens=4,
        temperature=temperature,
        allowed_token_ids=[7, 9],
        # Neither of them before two tokens are out.
        stop_token_ids=[7, 9],
        min_tokens=2,
    )
    prompts = [[10, 20, 30], [40, 50]]
    alone = llm.generate(prompts[:1], good, use_tqdm=False)[0].outputs[0].token_ids
    outputs = llm.generate(prompts, [good, bad], use_tqdm=False)
    assert outputs[0].outputs[0].token_ids == alone
    assert outputs[1].outputs[0].finish_reason == "error"
