"""Models on packed weights, and as one native program, must equal transformers as they are."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from jubako.kernels.cpu.library import library
from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.registry import get_kernels, set_kernels
from jubako.models.load import pack_weights
from jubako.worker.native_step import NativeStep
from tests.models.harness import PagedRunner, from_transformers
from tests.models.test_exactness import check, logits_of, prompt
from tests.models.tiny import CONFIGS, VOCAB, WINDOW, reference_model

pytestmark = pytest.mark.skipif(library() is None, reason="the native library is not built")

LAYER_BY_LAYER = dict.fromkeys(("deepseek", "glm4 moe lite", "youtu"), "latent attention")
"""Families that have no native form yet, and what of them it is that has none."""

PROGRAMS = [name for name in CONFIGS if not name.startswith(tuple(LAYER_BY_LAYER))]


class NativeRunner(PagedRunner):
    """Runs a model as one program, on two threads."""

    def __init__(self, model: Any, **options: Any) -> None:
        super().__init__(model, **options)
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        dtype = model.model.embed_tokens.weight.dtype
        native = NativeStep.of(model, dtype, max_num_tokens=128, max_num_reqs=8)
        torch.set_num_threads(before)
        assert native is not None, "the model has no native form"
        native.bind(self.layers, [list(self.layers)], 256)
        self.program = native._program

    def _forward(
        self, ids: torch.Tensor, positions: torch.Tensor, metadata: AttentionMetadata
    ) -> torch.Tensor:
        attention = dict.fromkeys(self.layers, metadata)
        states = [state for layer in self.layers.values() for state in states_of(layer)]
        before = [state.clone() for state in states]
        every, _ = self.program.run(ids.numpy(), positions.numpy(), attention, None)
        every = every.clone()
        # A state that is overwritten must be what it was when the step runs again.
        for state, old in zip(states, before, strict=True):
            state.copy_(old)
        some = np.arange(0, len(ids), 3)
        chosen, best = self.program.run(
            ids.numpy(), positions.numpy(), attention, some, greedy=True
        )
        assert torch.equal(chosen, every[some])
        if self.program.chooses_greedily:
            logits = self.model.compute_logits(chosen)
            assert best.tolist() == logits.argmax(-1).tolist()
        return every


def states_of(layer: Any) -> list[torch.Tensor]:
    """The states of a recurrent layer."""
    return list(getattr(layer, "states", {}).values())


@cache
def packed(name: str, dtype: str = "float32") -> tuple[Any, Any]:
    reference = reference_model(name)
    set_kernels("cpu")
    model = from_transformers(reference, dtype)
    pack_weights(model)
    return reference, model


@pytest.mark.parametrize("name", CONFIGS)
def test_layer_by_layer_on_packed_weights(name: str) -> None:
    reference, model = packed(name)
    tokens = prompt(75)
    check(PagedRunner(model).step({0: tokens})[0], logits_of(reference, tokens))


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_a_program_unless_it_is_known_to_be_none(name: str) -> None:
    _, model = packed(name)
    can = NativeStep.of(model, torch.float32, 16, 4) is not None
    assert can == (name in PROGRAMS)


@pytest.mark.parametrize("name", PROGRAMS)
def test_as_a_program(name: str) -> None:
    reference, model = packed(name)
    for length in (1, WINDOW, WINDOW + 1, 75):
        tokens = prompt(length)
        check(NativeRunner(model).step({0: tokens})[0], logits_of(reference, tokens))


@pytest.mark.parametrize("name", PROGRAMS)
def test_chunks_and_neighbours_change_no_bit(name: str) -> None:
    """In float32 a token's logits depend on its own request alone."""
    _, model = packed(name)
    a, b = prompt(40), prompt(29, seed=1)
    alone = NativeRunner(model).step({0: a})[0]
    runner = NativeRunner(model)
    parts = [runner.step({0: a[:17], 1: b[:1]})[0]]
    parts.append(runner.step({1: b[1:2], 0: a[17:18]})[0])
    parts.append(runner.step({0: a[18:], 1: b[2:]})[0])
    assert torch.equal(torch.cat(parts), alone)


@pytest.mark.parametrize("name", ["gemma3", "llama", "qwen3", "qwen3 moe", "bamba", "qwen3 next"])
def test_bfloat16_errs_no_more_than_transformers(name: str) -> None:
    reference, model = packed(name, "bfloat16")
    rounded = reference_model(name).bfloat16()
    own, theirs = 0.0, 0.0
    for seed in range(4):
        tokens = prompt(60, seed)
        exact = logits_of(reference, tokens)
        own += (NativeRunner(model).step({0: tokens})[0].float() - exact).abs().mean().item()
        theirs += (logits_of(rounded, tokens).float() - exact).abs().mean().item()
    assert own < 1.05 * theirs


def test_a_layer_with_a_forward_of_its_own_is_not_recorded() -> None:
    _, model = packed("llama")
    mlp = model.model.layers[0].mlp
    kind = type(mlp)
    own = type("OwnMLP", (kind,), {"forward": lambda self, x: 2 * kind.forward(self, x)})
    mlp.__class__ = own
    try:
        assert NativeStep.of(model, torch.float32, 16, 4) is None
    finally:
        mlp.__class__ = kind


def test_float16_stays_with_torch() -> None:
    assert get_kernels().pack(torch.zeros(VOCAB, 32, dtype=torch.float16)) is None
    _, model = packed("llama")
    assert NativeStep.of(model, torch.float16, 16, 4) is None
