"""Whose code computes a model does not show: not in tokens, nor in what the cache finds."""

from __future__ import annotations

import pytest

from jubako.errors import UnsupportedModelError
from jubako.models.transformers_fallback import TransformersForCausalLM
from tests.exactness.sizes import SAMPLE
from tests.exactness.subject import Prompt, Subject


@pytest.mark.parametrize("row", ["llama", "gemma3"])
def test_a_native_architecture_answers_alike_both_ways(row: str) -> None:
    with Subject(row, SAMPLE) as subject:
        prompts = [Prompt(ids) for ids in subject.prompts]
        answers = {}
        for implementation in ("native", "transformers"):
            llm = subject.engine(model_impl=implementation, max_num_batched_tokens=64)
            runner = llm.llm_engine.client.core.executor.worker.model_runner
            through_transformers = isinstance(runner.model, TransformersForCausalLM)
            assert through_transformers == (implementation == "transformers")
            found = []
            for what in ("cold", "warm"):
                outputs, _ = subject.generate(llm, prompts, f"{implementation}, {what}")
                found += [(o.outputs[0].token_ids, o.num_cached_tokens) for o in outputs]
            answers[implementation] = found
        assert answers["native"] == answers["transformers"]


def test_native_is_held_to_its_word() -> None:
    with (
        Subject("gpt2", SAMPLE) as subject,
        pytest.raises(UnsupportedModelError, match="model_impl=auto"),
    ):
        subject.engine(model_impl="native")
