"""Every family gives transformers' logits and greedy tokens, however the tokens are scheduled."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from .harness import PagedRunner, from_transformers
from .tiny import CONFIGS, VOCAB, WINDOW, reference_model

TOLERANCE = 2e-4
"""Most that a logit may differ: two right answers in float32 do, at a model's touchiest position.

Bamba's is 15 of the prompt of 75. Where a float64 model has half a unit of float32's last place,
either way at random, on what its modules give, logits there move by up to 1.2e-4 (Llama's anywhere
by 0.3e-4), most of it by what comes before the first layer's input projection. From float64,
transformers' float32 is 0.4e-4 away there and ours 1.1e-4, whichever single op is exchanged for the
reference's: no op is at fault.
"""

MEAN_TOLERANCE = 2e-5
"""Most that logits may differ on average, where no single position counts; 0.8e-5 is the worst."""

WINDOWED = [
    "gemma3",
    "gemma3 tied, one KV head, capped",
    "mistral",
    "qwen2 windows, yarn rope",
    "qwen3 windows",
    "gemma2",
    "gemma2 tied, without caps",
    "ministral",
    "phi3",
    "olmo3",
    "smollm3 windows, yarn rope",
    "cohere2",
    "gpt-oss",
    "mixtral, window, three of four",
]

every_model = pytest.mark.parametrize("name", CONFIGS)


@cache
def pair(name: str) -> tuple[Any, Any]:
    reference = reference_model(name)
    return reference, from_transformers(reference)


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


@torch.no_grad()
def logits_of(reference: Any, tokens: list[int]) -> torch.Tensor:
    return reference(torch.tensor([tokens])).logits[0]


def check(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.shape == want.shape
    difference = (got - want).abs()
    assert difference.max().item() < TOLERANCE
    assert difference.mean().item() < MEAN_TOLERANCE


@every_model
def test_prefill(name: str) -> None:
    reference, model = pair(name)
    for length in (1, WINDOW, WINDOW + 1, 75):
        tokens = prompt(length)
        check(PagedRunner(model).step({0: tokens})[0], logits_of(reference, tokens))


@pytest.mark.parametrize("name", WINDOWED)
def test_the_window_matters(name: str) -> None:
    """A guard of this test file: the tiny models would show a window that is off by one."""
    reference, _ = pair(name)
    config = reference.config
    tokens = prompt(40)
    want = logits_of(reference, tokens)
    config.sliding_window += 1
    for layer in reference.model.layers:
        if getattr(layer.self_attn, "sliding_window", None) is not None:
            layer.self_attn.sliding_window += 1
    try:
        assert (logits_of(reference, tokens) - want).abs().max() > 100 * TOLERANCE
    finally:
        config.sliding_window -= 1
        for layer in reference.model.layers:
            if getattr(layer.self_attn, "sliding_window", None) is not None:
                layer.self_attn.sliding_window -= 1


@every_model
@pytest.mark.parametrize("chunks", [[1] * 40, [64, 11], [5, 1, 1, 30, 3, 1, 20, 14], [17, 1, 57]])
def test_any_chunking(name: str, chunks: list[int]) -> None:
    reference, model = pair(name)
    tokens = prompt(sum(chunks))
    runner = PagedRunner(model, block_size=8)
    parts = []
    for size in chunks:
        start = runner.lengths[0]
        parts.append(runner.step({0: tokens[start : start + size]})[0])
    check(torch.cat(parts), logits_of(reference, tokens))


@every_model
def test_mixed_batches(name: str) -> None:
    """Prefills, chunks, decodes and verified drafts of several requests share steps."""
    reference, model = pair(name)
    tokens = {r: prompt(length, seed=r) for r, length in enumerate((60, 33, 48, 70, 9))}
    schedule = [
        {0: 30},
        {0: 1, 1: 20, 4: 5},
        {3: 40, 0: 1, 1: 1, 2: 1},
        {4: 4, 2: 25, 0: 4, 1: 4, 3: 4},
        {0: 1, 1: 1, 2: 1, 3: 1},
        {1: 7, 0: 23, 2: 21, 3: 25},
    ]
    runner = PagedRunner(model, block_size=4)
    got: dict[int, list[torch.Tensor]] = {r: [] for r in tokens}
    for step in schedule:
        chunks = {}
        for r, size in step.items():
            start = runner.lengths[r]
            chunks[r] = tokens[r][start : start + size]
        for r, logits in runner.step(chunks).items():
            got[r].append(logits)
    for r, parts in got.items():
        assert runner.lengths[r] == len(tokens[r])
        check(torch.cat(parts), logits_of(reference, tokens[r]))


@every_model
def test_greedy_tokens(name: str) -> None:
    reference, model = pair(name)
    prompts = {r: prompt(length, seed=7) for r, length in enumerate((3, 12, 30, 41))}
    count = 24
    want = {}
    for r, tokens in prompts.items():
        out = reference.generate(
            torch.tensor([tokens]), max_new_tokens=count, do_sample=False, use_cache=True
        )
        want[r] = out[0, len(tokens) :].tolist()
    assert PagedRunner(model).generate(prompts, count) == want
    for r, tokens in prompts.items():
        assert PagedRunner(model).generate({0: tokens}, count) == {0: want[r]}


@every_model
def test_bfloat16_is_as_close_as_transformers(name: str) -> None:
    """At the median token: rounding may flip the choice of an expert for any single one."""
    reference, _ = pair(name)
    tokens = prompt(60)
    exact = logits_of(reference, tokens)
    rounded = reference_model(name).to(torch.bfloat16)
    theirs = (logits_of(rounded, tokens).float() - exact).square().mean(-1).sqrt().median()
    model = from_transformers(reference, "bfloat16")
    runner = PagedRunner(model)
    logits = torch.cat([runner.step({0: part})[0] for part in (tokens[:40], tokens[40:])])
    ours = (logits.float() - exact).square().mean(-1).sqrt().median()
    assert ours <= 1.3 * theirs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gemma_scales_embeddings_by_a_rounded_root(dtype: str) -> None:
    reference = reference_model("gemma3").to(getattr(torch, dtype))
    tokens = torch.tensor(prompt(20))
    want = reference.model.embed_tokens(tokens)
    assert torch.equal(from_transformers(reference, dtype).embed_input_ids(tokens), want)


@every_model
def test_embeddings_may_replace_ids(name: str) -> None:
    _, model = pair(name)
    tokens = prompt(20)
    want = PagedRunner(model).step({0: tokens})[0]
    runner = PagedRunner(model)
    embedding = model.embed_input_ids(torch.tensor(tokens))
    before = embedding.clone()
    runner.model = lambda ids, positions: model(None, positions, inputs_embeds=embedding)
    runner.model.compute_logits = model.compute_logits
    assert torch.equal(runner.step({0: tokens})[0], want)
    assert torch.equal(embedding, before)
