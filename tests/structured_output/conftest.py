"""The default model, and a tiny one whose tokens are nearly random."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from jubako import LLM
from tests.frontend.vocabularies import trained_byte_level

OPTIONS: dict[str, Any] = {"device": "cpu", "max_model_len": 1024, "num_gpu_blocks_override": 400}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """More rows than tokens in its embedding, and two tokens that end an answer."""
    folder = tmp_path_factory.mktemp("structured") / "tiny-llama"
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=448,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=[0, 1],
        dtype="float32",
    )
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    trained_byte_level().save(str(folder / "tokenizer.json"))
    names = {"eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    return folder


@pytest.fixture(scope="module")
def gemma() -> Iterator[LLM]:
    llm = LLM(**OPTIONS)
    yield llm
    llm.shutdown()


@pytest.fixture
def make_llm(tiny: Path) -> Iterator[Callable[..., LLM]]:
    made: list[LLM] = []

    def make(**options: Any) -> LLM:
        options = {
            "model": str(tiny),
            "dtype": "float32",
            **OPTIONS,
            "max_model_len": 512,
        } | options
        made.append(LLM(**options))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()
