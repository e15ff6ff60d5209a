"""How is each column of the matrix checked?

A check raises AssertionError where our answer differs, and returns how many tokens tie.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from jubako import LLM, SamplingParams
from jubako.errors import ConfigError
from jubako.kv_cache import MambaSpec
from tests.exactness.hits import chunk_ends, expected_hit, unit
from tests.exactness.oracle import is_recurrent
from tests.exactness.sizes import VOCAB
from tests.exactness.subject import Prompt, Subject, blocks_of_one_request, kv_groups

LOGIT_TOLERANCE = 1e-3

BF16_SLACK = 1.05
"""Our mean error in bfloat16 may be this many times transformers': other roundings, same size."""


class DoesNotApply(Exception):
    """A cell that has no meaning, and why."""


# -- greedy tokens ----------------------------------------------------------------------------


def alone(subject: Subject) -> int:
    """One request after the other, with nothing cached."""
    llm = subject.engine()
    found = any(isinstance(spec, MambaSpec) for spec in kv_groups(llm))
    assert found == is_recurrent(subject.name), "see oracle.is_recurrent"
    ties = 0
    answers = set()
    for ids in subject.prompts:
        assert llm.reset_prefix_cache()
        outputs, more = subject.generate(llm, [Prompt(ids)], "alone")
        assert outputs[0].num_cached_tokens == expected_hit(kv_groups(llm), 0, (), len(ids) - 1)
        answers.add(tuple(outputs[0].outputs[0].token_ids[:8]))
        ties += more
    assert len(answers) > len(subject.prompts) // 2, "this random model hardly reads its prompt"
    return ties


def batched(subject: Subject, **options: Any) -> int:
    """All prompts at once."""
    llm = subject.engine(**options)
    _, ties = subject.generate(llm, prompts_of(subject), "batched")
    # Now each finds what it or another has left in the cache.
    return ties + subject.generate(llm, prompts_of(subject)[::-1], "batched again")[1]


def prompts_of(subject: Subject) -> list[Prompt]:
    return [Prompt(ids) for ids in subject.prompts]


def budget(subject: Subject, tokens: int) -> int:
    """Prompts are computed in chunks: a step has so many tokens for all requests."""
    prompts = prompts_of(subject)
    if tokens < 16:
        # A step for each few tokens: what is longer than every window is long enough.
        prompts = [prompt for prompt in prompts if len(prompt.ids) <= 130]
    llm = subject.engine(max_num_batched_tokens=tokens)
    return subject.generate(llm, prompts, f"budget {tokens}")[1]


def hits(subject: Subject, **options: Any) -> int:
    """A prompt finds its first k blocks, for every k, and computes only the rest."""
    llm = subject.engine(**options)
    groups = kv_groups(llm)
    _needs_cache(llm)
    step = unit(groups)
    count = min(subject.size.hit_blocks, 500 // step)
    ids = (subject.prompts[-1] * 3)[: count * step + step // 2 + 1]
    prompts = []
    ties = 0
    for blocks in range(count + 1):
        prompt = Prompt(ids, salt=f"prefix of {blocks} blocks")
        known = blocks * step
        if known:
            first = Prompt(ids[: known + 1], prompt.salt)
            ties += subject.generate(llm, [first], f"{blocks} blocks", max_tokens=1)[1]
        outputs, more = subject.generate(llm, [prompt], f"{blocks} blocks found")
        want = expected_hit(groups, known, chunk_ends(groups, known + 1), len(ids) - 1)
        assert outputs[0].num_cached_tokens == want, f"{outputs[0].num_cached_tokens} not {want}"
        prompts.append(prompt)
        ties += more
    # Sent again, a prompt computes only what follows its last border, also beside others.
    ends = chunk_ends(groups, len(ids))
    want = expected_hit(groups, len(ids), ends, len(ids) - 1)
    for sent in (prompts[:1], prompts):
        outputs, more = subject.generate(llm, sent, "sent again")
        assert {output.num_cached_tokens for output in outputs} == {want}
        ties += more
    return ties


def _needs_cache(llm: LLM) -> None:
    config = llm.llm_engine.config
    if not config.cache_config.enable_prefix_caching:
        raise DoesNotApply("the engine keeps no prefixes of this model")


def preempted(subject: Subject, **options: Any) -> int:
    """Requests push each other out of a pool with room for one long request, and start over."""
    options = {"scheduler_reserve_full_isl": False} | options
    if not subject.has_encoder:
        options = {"max_num_batched_tokens": 64} | options
    # States take no more blocks as a request grows.
    growing = [g for g in kv_groups(subject.engine(**options)) if not isinstance(g, MambaSpec)]
    if not growing:
        raise DoesNotApply("a request never needs another block")
    size = unit(growing)
    rest = -(-subject.size.max_tokens // size)
    longest = (9 + rest) * size
    options["max_model_len"] = longest
    blocks = blocks_of_one_request(subject.engine(**options))
    llm = subject.engine(**options, num_gpu_blocks_override=blocks)
    ids = subject.prompts[-1] * 3
    # All but the last soon need another block.
    lengths = [*(size * (1 + i % 3) - 2 for i in range(8)), longest - subject.size.max_tokens]
    prompts = [Prompt(ids[i : i + length]) for i, length in enumerate(lengths)]
    outputs, ties = subject.generate(llm, prompts, "preempted")
    assert sum(o.metrics.num_preemptions for o in outputs if o.metrics) > 0
    assert llm.reset_prefix_cache(), "every block is free again"
    return ties


def overlapping(subject: Subject) -> int:
    """The next step is planned before this one's tokens are known."""
    ties = batched(subject, async_scheduling=True)
    if not subject.has_encoder:
        ties += batched(subject, async_scheduling=True, max_num_batched_tokens=64)
    with suppress(DoesNotApply):
        ties += preempted(subject, async_scheduling=True)
    return ties


def several(subject: Subject) -> int:
    """Four answers to each prompt, which share its blocks."""
    return subject.generate(subject.engine(), prompts_of(subject), "n = 4", n=4)[1]


def recurrent_states(subject: Subject, mode: str) -> int:
    """Everything that recurrent states can be wrong for, in one way of keeping them."""
    options: dict[str, Any] = {"enable_prefix_caching": mode != "none", "mamba_cache_mode": mode}
    try:
        groups = kv_groups(subject.engine(**options))
    except ConfigError as error:
        if "mamba_cache_mode" not in str(error):
            raise
        raise DoesNotApply(f"the engine refuses it: {error}") from error
    modes = {spec.mamba_cache_mode for spec in groups if isinstance(spec, MambaSpec)}
    assert modes == {mode}
    ties = batched(subject, **options)
    ties += batched(subject, **options, max_num_batched_tokens=unit(groups) + 5)
    if not all(isinstance(spec, MambaSpec) for spec in groups):
        ties += preempted(subject, **options)
    if mode != "none":
        ties += hits(subject, **options)
        ties += sharing(subject, **options)
    return ties


def sharing(subject: Subject, **options: Any) -> int:
    """Prompts that part in the middle of what was computed in one step, again and again."""
    llm = subject.engine(**options)
    groups = kv_groups(llm)
    step = unit(groups)
    ids = (subject.prompts[-1] * 3)[: 3 * step + 1]
    other = [*ids[: 2 * step + 3], *subject.prompts[-2][:step]]
    _, ties = subject.generate(llm, [Prompt(ids)], "first")
    # A state at the parting is known only if every border has one.
    outputs, more = subject.generate(llm, [Prompt(other)], "second")
    want = expected_hit(groups, 2 * step, chunk_ends(groups, len(ids)), 2 * step)
    assert outputs[0].num_cached_tokens == want
    ties += more
    third = [*ids[: 2 * step], *subject.prompts[-2][-step:]]
    outputs, more = subject.generate(llm, [Prompt(third)], "third")
    # The second ended a chunk where it left the first: attention's blocks show where that is.
    if not all(isinstance(spec, MambaSpec) for spec in groups):
        assert outputs[0].num_cached_tokens == 2 * step
    return ties + more


# -- logits -----------------------------------------------------------------------------------


def logits(subject: Subject) -> int:
    """Log-probabilities of the whole vocabulary at all positions of prompts."""
    prompts = [ids for ids in subject.prompts if len(ids) > 1]
    for tokens in (4096,) if subject.has_encoder else (4096, 64):
        llm = subject.engine(max_num_batched_tokens=tokens)
        for ids, ours in zip(prompts, prompt_logprobs(subject, llm, prompts), strict=True):
            given = subject.given(Prompt(ids))
            worst = (ours - subject.oracle.logprobs(given)[:-1]).abs().max().item()
            assert worst < LOGIT_TOLERANCE, (
                f"a logprob of a prompt of {len(ids)} differs by {worst:.1e} (budget {tokens})"
            )
    return 0


def bfloat16(subject: Subject) -> int:
    """In bfloat16, log-probabilities are as near to float32's as transformers' own."""
    ours, theirs = bfloat16_errors(subject)
    assert ours <= BF16_SLACK * theirs, f"mean error {ours:.2e}, transformers has {theirs:.2e}"
    return 0


def bfloat16_errors(subject: Subject) -> tuple[float, float]:
    """The mean absolute error of our and of transformers' log-probabilities in bfloat16."""
    source = subject.prompts[-1] * 3
    prompts = [source[i : i + n] for i, n in enumerate(subject.size.bf16_lengths)]
    rounded = subject.rounded_oracle()
    ours = prompt_logprobs(subject, subject.engine(dtype="bfloat16"), prompts)
    given = [subject.given(Prompt(ids)) for ids in prompts]
    exact = [subject.oracle.logprobs(ids)[:-1] for ids in given]
    theirs = [rounded.logprobs(ids)[:-1] for ids in given]
    return mean_error(ours, exact), mean_error(theirs, exact)


def mean_error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    return float(torch.cat([(a - b).abs() for a, b in zip(got, want, strict=True)]).mean())


def prompt_logprobs(subject: Subject, llm: LLM, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Log-probabilities [P - 1, V] after each token but the last of each prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1)
    inputs = [subject.as_input(Prompt(ids)) for ids in prompts]
    found = []
    for output in llm.generate(inputs, params, use_tqdm=False):
        assert output.prompt_logprobs is not None
        positions = [position for position in output.prompt_logprobs[1:] if position is not None]
        assert len(positions) == len(output.prompt_token_ids) - 1
        found.append(
            torch.tensor([[at[token].logprob for token in range(VOCAB)] for at in positions])
        )
    return found


# -- all of them ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """A column: what is done, and for which rows."""

    name: str
    meaning: str
    check: Callable[[Subject], int]
    recurrent_only: bool = False


def _recurrent(mode: str, meaning: str) -> Column:
    return Column(
        f"mamba-{mode}", meaning, partial(recurrent_states, mode=mode), recurrent_only=True
    )


COLUMNS: dict[str, Column] = {
    column.name: column
    for column in [
        Column("alone", "One request at a time, nothing cached.", alone),
        Column("batched", "All prompts together, then again from the cache.", batched),
        Column(
            "hits",
            "A prompt whose first k blocks are cached, for each k, computes only what the "
            "definition of a hit leaves, and so does a prompt that is sent again.",
            hits,
        ),
        Column(
            "budget-1",
            "Chunked prefill, one token a step; prompts of up to 130 tokens.",
            partial(budget, tokens=1),
        ),
        Column(
            "budget-7", "Chunked prefill, 7 tokens a step; the same.", partial(budget, tokens=7)
        ),
        Column("budget-64", "Chunked prefill, 64 tokens a step.", partial(budget, tokens=64)),
        Column(
            "preempted",
            "Requests push each other out of a pool that holds one long request, and resume.",
            preempted,
        ),
        Column(
            "async",
            "Steps overlap: batched, with a budget of 64 where prompts may be split, and "
            "preempted.",
            overlapping,
        ),
        Column("n-4", "Four answers to each prompt.", several),
        _recurrent("none", "Recurrent states are not kept: batched, chunked, preempted."),
        _recurrent(
            "align",
            "Recurrent states are kept where a step ends on a block border: batched, chunked, "
            "preempted, hits, and prompts that part inside what was computed in one step.",
        ),
        _recurrent("all", "Recurrent states are kept at every block border: the same."),
        Column(
            "logits",
            f"Log-probabilities of the whole vocabulary at every prompt position within "
            f"{LOGIT_TOLERANCE:g} of transformers', in one chunk and, where it may be split, in "
            "chunks of 64.",
            logits,
        ),
        Column(
            "bf16",
            "In bfloat16, the mean absolute error of log-probabilities at prompt positions "
            "against float32 is at most "
            f"{BF16_SLACK:g} times that of transformers in bfloat16.",
            bfloat16,
        ),
    ]
}
