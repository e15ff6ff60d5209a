"""Models and oracle answers, made once a session."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers

from jubako.utils.cpu import num_cores
from tests.exactness import oracle

Case = tuple[Path, list[list[int]], list[oracle.Answer]]


@pytest.fixture(scope="session")
def tiny_case(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Case]:
    """Name → (folder, 20 prompts of 5 to 1,500 tokens, transformers' greedy answers)."""
    cases: dict[str, Case] = {}

    def make(name: str) -> Case:
        if name not in cases:
            folder = oracle.make_model(name, tmp_path_factory.mktemp(name))
            model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            prompts = oracle.make_prompts(20, 5, 1500, oracle.VOCAB, seed=7)
            answers = [oracle.greedy(model.eval(), prompt, 16) for prompt in prompts]
            cases[name] = (folder, prompts, answers)
        return cases[name]

    return make


@pytest.fixture(scope="session")
def default_case() -> Case:
    """The default model in float32, read by transformers from the same GGUF."""
    from jubako.checkpoint.info import open_checkpoint

    path = Path(open_checkpoint(None).path)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    # The engines of tiny models leave PyTorch with one thread.
    torch.set_num_threads(num_cores())
    prompts = oracle.make_prompts(20, 5, 1500, 200_000, seed=11)
    prompts = [[2, *prompt[1:]] for prompt in prompts]
    answers = [oracle.greedy(model.eval(), prompt, 12) for prompt in prompts]
    return path, prompts, answers
