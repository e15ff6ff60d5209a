"""The stages of the sampler, their order, and that rows never touch one another."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.sampling.candidates import Selection, select_candidates
from jubako.sampling.logits_processors import BatchUpdate, LogitsProcessor
from jubako.sampling.sampler import NO_NUMBERS, NOTHING_ALLOWED
from jubako.sampling_params import SamplingParams
from tests.sampling.goodness import fits_counts
from tests.sampling.oracle import (
    Row,
    changed_logits,
    expected_token,
    filtered_logits,
    sample,
    tokens,
)


def processed(logits: list[float], row: Row) -> list[float]:
    """Logits that the greedy choice is made from: what a recorder at the end of the stages sees."""
    from jubako.sampling.logits_processors import apply_processors
    from tests.sampling.oracle import metadata_of

    tensor = torch.tensor([logits])
    processors = metadata_of([row], tensor.shape[1]).logitsprocs.argmax_changing
    return apply_processors(processors, tensor, [0], 1)[0].tolist()


def kept_of(found: Selection, row: int) -> list[int]:
    """Tokens that top-k and top-p left in a row."""
    if row in found.wide_rows:
        logits = found.wide_logits[found.wide_rows.tolist().index(row)]
        return (logits > -torch.inf).nonzero().squeeze(1).tolist()
    i = found.narrow_rows.tolist().index(row)
    values, ids = found.narrow.values[i], found.narrow.token_ids[i]
    return sorted(ids[values > -torch.inf].tolist())


def kept_tokens(logits: torch.Tensor, top_k: int, top_p: float) -> list[int]:
    found = select_candidates(logits, np.array([top_k]), np.array([top_p], dtype=np.float32))
    return kept_of(found, 0)


# -- stages -----------------------------------------------------------------------------------


def test_penalties_by_example() -> None:
    row = Row(
        prompt=[0],
        output=[1, 1, 3],
        repetition_penalty=2.0,
        frequency_penalty=0.25,
        presence_penalty=0.5,
    )
    assert processed([2.0, -1.0, 0.0, 3.0], row) == [1.0, -3.0, 0.0, 0.75]


def test_penalties_follow_the_growing_output() -> None:
    from jubako.sampling.penalties import OccurringTokens

    output: list[int] = []
    occurring = OccurringTokens(np.array([7, 3]), output)

    def counts() -> dict[int, float]:
        ids, numbers = occurring.counts()
        return dict(zip(ids.tolist(), numbers.tolist()))

    assert counts() == {7: 0, 3: 0}
    output += [5, 3, 5]
    assert counts() == {7: 0, 3: 1, 5: 2}
    output += list(range(100, 300))
    assert counts()[299] == 1
    assert len(counts()) == 203
    del output[2:]
    assert counts() == {7: 0, 3: 1, 5: 1}
    output[1] = 9
    assert counts() == {7: 0, 3: 0, 5: 1, 9: 1}


def test_bad_words_are_forbidden_after_their_beginning() -> None:
    words = [[3], [1, 2], [0, 1, 0]]
    inf = float("-inf")
    for output, expected in [
        ([], [0, 0, 0, inf]),
        ([1], [0, 0, inf, inf]),
        ([0, 1], [inf, 0, inf, inf]),
        ([1, 0], [0, 0, 0, inf]),
    ]:
        # What the prompt ends with does not matter.
        row = Row(prompt=[1], output=output, bad_words_token_ids=words)
        assert processed([0.0] * 4, row) == expected


def test_stop_tokens_are_forbidden_until_min_tokens() -> None:
    row = Row(min_tokens=2, stop_token_ids=[1], eos_token_ids=[2], max_tokens=4, ignore_eos=True)
    assert processed([0.0, 0.0, 0.0], row) == [0.0, float("-inf"), float("-inf")]
    row.output += [0]
    assert processed([0.0, 0.0, 0.0], row) == [0.0, float("-inf"), float("-inf")]
    row.output += [0]
    assert processed([0.0, 0.0, 0.0], row) == [0.0, 0.0, 0.0]


def test_a_bias_is_added_before_penalties_divide() -> None:
    row = Row(prompt=[1], logit_bias={1: 3.0, 2: -1.0}, repetition_penalty=2.0)
    assert processed([0.0, 1.0, 1.0], row) == [0.0, 2.0, 0.0]


def test_masks_come_before_penalties_and_bias() -> None:
    row = Row(
        prompt=[0, 1, 2],
        allowed_token_ids=[0, 1],
        bad_words_token_ids=[[1]],
        logit_bias={1: 100.0, 2: 100.0},
        repetition_penalty=0.5,
    )
    assert processed([1.0, 1.0, 1.0], row) == [2.0, float("-inf"), float("-inf")]


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.75, 2), (0.76, 3), (0.9, 4)])
def test_top_p_by_example(top_p: float, kept: int) -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    for top_k in (4, 100):
        for size in (4, 400):
            wide = torch.full((1, size), -torch.inf)
            wide[:, :4] = logits
            # Of equals the lower id stays.
            assert kept_tokens(wide, top_k, top_p) == [0, 1, 2, 3][:kept]


@pytest.mark.parametrize("top_p", [1e-8, 1e-50])
@pytest.mark.parametrize("size", [400, 5000])
def test_a_top_p_below_what_float32_resolves_keeps_the_best_token(top_p: float, size: int) -> None:
    # More tokens tie than are looked at one by one.
    assert kept_tokens(torch.zeros(1, size), size, top_p) == [0]


def test_top_k_keeps_all_that_tie_with_the_last() -> None:
    logits = torch.tensor([[3.0, 1.0, 1.0, 1.0, 0.0]])
    assert kept_tokens(logits, 2, 1.0) == [0, 1, 2, 3]


def test_min_p_is_relative_to_the_best() -> None:
    probabilities = np.array([0.6, 0.3, 0.06, 0.04])
    logits = torch.tensor(np.log(probabilities), dtype=torch.float32).repeat(400, 1)
    rows = [Row(temperature=1.0, min_p=0.2, seed=i) for i in range(400)]
    assert set(tokens(logits, rows)) == {0, 1}


def test_greedy_ties_go_to_the_lowest_id() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = torch.zeros(3, 5000, dtype=dtype)
        logits[0, [4999, 17, 4000]] = 2.0
        logits[1, [4998, 4999]] = 1.0
        biased = Row(logit_bias={4000: 1.0, 3000: 1.0})
        assert tokens(logits, [Row(), Row(), biased]) == [17, 4998, 3000]
        assert tokens(logits, [Row(), Row(), Row()]) == [17, 4998, 0]


def test_greedy_ignores_the_random_stages() -> None:
    logits = torch.randn(4, 300)
    best = logits.argmax(dim=1).tolist()
    rows = [
        Row(),
        Row(SamplingParams(temperature=0, top_k=1, top_p=0.1, min_p=0.9)),
        Row(SamplingParams(temperature=1e-6)),
        Row(temperature=1.0, top_k=1),
    ]
    assert tokens(logits, rows) == best


def test_a_large_tie_beyond_the_prefix_is_found() -> None:
    """More tokens tie at the boundary than any first guess holds."""
    size = 20000
    logits = torch.zeros(1, size)
    logits[0, 5] = 1.0
    assert kept_tokens(logits, 2, 1.0) == list(range(size))
    kept = kept_tokens(logits, size, 0.5)
    # The lowest ids among equals, and the best token.
    assert kept == list(range(len(kept)))
    mass = logits.softmax(dim=1)[0, kept].sum().item()
    assert mass + 1e-5 >= 0.5
    assert mass < 0.5 + 2 / size
    assert kept_tokens(logits, 1, 0.5) == [5]


@pytest.mark.parametrize("size", [7, 200, 3000, 20000])
@pytest.mark.parametrize("scale", [0.1, 1.0, 6.0])
def test_kept_tokens_are_those_of_a_full_sort(size: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(12, size, generator=generator) * scale).round(decimals=1)
    top_k = np.array([1, 2, 40, 90, 1000, size, size, size, size, 3, 100, 5000])
    top_k = np.minimum(top_k, size)
    top_p = np.array([1, 1, 1, 1, 1, 0.05, 0.5, 0.95, 0.999, 0.6, 0.9, 0.3], dtype=np.float32)
    found = select_candidates(logits, top_k, top_p)
    assert sorted([*found.narrow_rows, *found.wide_rows]) == list(range(12))
    for row in range(12):
        kept = set(kept_of(found, row))
        params = SamplingParams(temperature=1.0, top_k=int(top_k[row]), top_p=float(top_p[row]))
        alone = kept_tokens(logits[row : row + 1], int(top_k[row]), float(top_p[row]))
        assert kept == set(alone), params
        x = logits[row].numpy().astype(np.float64)
        after_k = filtered_logits(x, params.clone(top_p=1.0))
        if params.top_p == 1:
            assert kept == set(np.flatnonzero(after_k > -np.inf)), params
            continue
        order = np.argsort(-after_k, kind="stable")
        assert kept == set(order[: len(kept)]), params
        probabilities = np.exp(after_k[order] - x.max())
        mass = np.concatenate([[0], probabilities.cumsum() / probabilities.sum()])
        assert mass[len(kept)] >= params.top_p - 2e-6
        assert len(kept) == 1 or mass[len(kept) - 1] < params.top_p + 2e-6


def test_rows_that_keep_few_tokens_are_not_handled_whole() -> None:
    logits = torch.linspace(20, -20, 50000).repeat(3, 1)
    top_k, top_p = np.array([50, 40, 50000]), np.array([1, 0.9, 0.2], dtype=np.float32)
    found = select_candidates(logits, top_k, top_p)
    assert found.narrow_rows.tolist() == [0, 1, 2]
    assert found.narrow.values.shape[1] < 1000


def test_forbidden_tokens_are_never_drawn() -> None:
    logits = torch.full((200, 50), -torch.inf)
    logits[:, [3, 40]] = torch.tensor([0.0, -5.0])
    for parameters in ({}, {"top_k": 10}, {"top_p": 0.999}, {"min_p": 0.001}):
        rows = [Row(temperature=2.0, seed=i, **parameters) for i in range(200)]
        assert set(tokens(logits, rows)) == {3, 40}


@pytest.mark.parametrize(
    ("value", "reason"), [(-torch.inf, NOTHING_ALLOWED), (torch.nan, NO_NUMBERS)]
)
def test_a_row_without_a_token_says_why_and_harms_nobody(value: float, reason: int) -> None:
    rows = [
        Row(),
        Row(temperature=1.0),
        Row(temperature=1.0, top_k=3),
        Row(temperature=1.0, top_p=0.5),
        Row(logit_bias={3: 1.0}, logprobs=2),
    ]
    random = torch.Generator().manual_seed(0)
    good = torch.randn(5, 50, generator=random)
    logits = torch.cat([good, torch.full((5, 50), value)])
    assert tokens(logits, 2 * rows) == tokens(good, rows) + [reason] * 5


def test_an_allowed_set_that_other_rules_empty_is_an_empty_set() -> None:
    row = Row(allowed_token_ids=[3], bad_words_token_ids=[[3]])
    assert tokens(torch.zeros(1, 50), [row]) == [NOTHING_ALLOWED]


# -- the whole pipeline -----------------------------------------------------------------------


def random_row(rng: random.Random, size: int) -> Row:
    def some(share: float) -> bool:
        return rng.random() < share

    params = SamplingParams(
        temperature=0.0 if some(0.3) else rng.uniform(0.3, 2),
        top_k=rng.choice([1, 5, size // 2]) if some(0.4) else 0,
        top_p=rng.uniform(0.05, 0.99) if some(0.4) else 1.0,
        min_p=rng.uniform(0.01, 0.5) if some(0.3) else 0.0,
        repetition_penalty=rng.uniform(0.5, 2) if some(0.3) else 1.0,
        frequency_penalty=rng.uniform(-2, 2) if some(0.3) else 0.0,
        presence_penalty=rng.uniform(-2, 2) if some(0.3) else 0.0,
        logit_bias={rng.randrange(size): rng.uniform(-5, 5) for _ in range(4)}
        if some(0.3)
        else None,
        allowed_token_ids=rng.sample(range(size), 10) if some(0.2) else None,
        bad_words_token_ids=[[rng.randrange(size)] for _ in range(8)] if some(0.3) else None,
        min_tokens=5 if some(0.3) else 0,
        stop_token_ids=rng.sample(range(size), 8) if some(0.5) else None,
    )
    prompt = [rng.randrange(size) for _ in range(rng.randint(1, 20))]
    output = [rng.randrange(size) for _ in range(rng.randint(0, 10))]
    return Row(params, prompt, output, rng.getrandbits(64))


@given(seed=st.integers(0, 2**32), size=st.sampled_from([40, 300]))
@settings(max_examples=60, deadline=None, derandomize=True)  # float32 and float64 may part
def test_the_pipeline_equals_its_naive_form(seed: int, size: int) -> None:
    rng = random.Random(seed)
    rows = [random_row(rng, size) for _ in range(rng.randint(1, 6))]
    logits = torch.from_numpy(
        np.random.default_rng(seed).normal(0, 3, (len(rows), size)).astype(np.float32)
    )
    expected = [expected_token(logits[i].numpy(), row) for i, row in enumerate(rows)]
    assert tokens(logits, rows) == expected


@given(seed=st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_a_row_is_sampled_as_if_it_were_alone(seed: int) -> None:
    rng = random.Random(seed)
    size = 150
    rows = [random_row(rng, size) for _ in range(7)]
    logits = torch.from_numpy(
        np.random.default_rng(seed).normal(0, 3, (7, size)).astype(np.float32)
    ).to(rng.choice([torch.float32, torch.bfloat16]))
    together = tokens(logits, rows)
    alone = [tokens(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
    assert together == alone
    some = sorted(rng.sample(range(7), rng.randint(1, 6)))
    assert tokens(logits[some], rows, some) == [alone[i] for i in some]


def test_seeds_hold_beside_greedy_and_unseeded_neighbours() -> None:
    logits = torch.randn(1, 500)
    seeded = Row(temperature=1.0, seed=42)
    alone = tokens(logits, [seeded])
    for neighbours in ([Row()], [Row(temperature=1.0, seed=1)], [Row(temperature=2.0, top_k=3)]):
        rows = [*neighbours, seeded]
        assert tokens(logits.repeat(2, 1), rows)[1:] == alone


@pytest.mark.parametrize(
    "parameters",
    [{}, {"top_k": 6}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.7}, {"min_p": 0.1}],
)
def test_samples_follow_the_filtered_distribution(parameters: dict) -> None:
    size, count = 12, 3000
    logits = torch.linspace(-2, 2, size)[
        torch.randperm(size, generator=torch.Generator().manual_seed(1))
    ]
    row = Row(temperature=0.8, **parameters)
    x = filtered_logits(changed_logits(logits.numpy(), row), row.params)
    expected = np.exp(x - x.max())
    expected /= expected.sum()
    rows = [Row(row.params, output=[0] * (i % 7), seed=i) for i in range(count)]
    drawn = np.bincount(tokens(logits.expand(count, -1), rows), minlength=size)
    kept = expected > 0
    assert not drawn[~kept].any()
    assert fits_counts(drawn[kept], expected[kept] * count)


class AddToFirst(LogitsProcessor):
    """A processor that knows only whole batches: row i's token i becomes the best."""

    def __init__(self, config: object, device: torch.device, is_pin_memory: bool = False) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.batch_size = batch_update.batch_size

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[0] == self.batch_size
        assert logits.dtype == torch.float32
        rows = torch.arange(self.batch_size)
        logits[rows, rows] += 1000
        return logits


def test_custom_processors_see_whole_batches() -> None:
    logits = torch.randn(2, 9, dtype=torch.bfloat16)
    rows = [Row(), Row(), Row(), Row(temperature=1.0)]
    assert sample(logits, rows, [1, 3], [AddToFirst]).token_ids.tolist() == [1, 3]


# -- logprobs ---------------------------------------------------------------------------------


def test_rank_counts_ties_against_the_token() -> None:
    logits = torch.tensor([[2.0, 1.0, 2.0, 0.0, -1.0]])
    row = Row(allowed_token_ids=[2], logprobs=1)
    lists = sample(logits, [row]).logprobs
    assert lists.logprob_token_ids.tolist() == [[2, 0]]
    assert lists.sampled_token_ranks.tolist() == [2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logprobs_are_those_of_the_raw_logits(dtype: torch.dtype) -> None:
    size = 200
    logits = (torch.randn(5, size) * 4).to(dtype)
    raw = logits.double().numpy()
    exact = raw - np.log(np.exp(raw - raw.max(1, keepdims=True)).sum(1, keepdims=True))
    exact -= raw.max(1, keepdims=True)
    rows = [
        Row(logprobs=3),
        Row(),
        Row(temperature=1.0, top_k=5, logprobs=0, logit_bias={3: 50.0}),
        Row(temperature=0.5, logprobs=-1, repetition_penalty=2.0),
        Row(logprobs=3, allowed_token_ids=[9]),
    ]
    output = sample(logits, rows)
    assert output.logprob_rows.tolist() == [0, 2, 3, 4]
    lists = output.logprobs
    assert lists.row_widths == [4, 1, size + 1, 4]
    for i, row in enumerate(output.logprob_rows):
        width = lists.row_widths[i]
        ids = lists.logprob_token_ids[i, :width]
        assert ids[0] == output.token_ids[row]
        np.testing.assert_allclose(lists.logprobs[i, :width], exact[row, ids], atol=1e-3)
        best = np.sort(exact[row])[::-1][: width - 1]
        np.testing.assert_allclose(lists.logprobs[i, 1:width], best, atol=1e-3)
        assert lists.sampled_token_ranks[i] == (raw[row] >= raw[row, ids[0]]).sum()
    assert lists.sampled_token_ranks[0] == 1


def test_the_callers_logits_are_not_needed_afterwards() -> None:
    """Float32 logits may be overwritten, yet logprobs come from what they were."""
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    lists = sample(logits, [Row(logit_bias={0: 10.0}, logprobs=1)]).logprobs
    assert lists.logprob_token_ids.tolist() == [[0, 2]]
    np.testing.assert_allclose(lists.logprobs[0], [-2.4076, -0.4076], atol=1e-3)


def test_wide_batches_are_scored_in_parts() -> None:
    from jubako.sampling import logprobs

    logits = torch.randn(20, 100, generator=torch.Generator().manual_seed(0))
    rows = [Row(logprobs=2)] * 20
    whole = sample(logits, rows)
    saved, logprobs._CHUNK_ENTRIES = logprobs._CHUNK_ENTRIES, 300
    try:
        parts = sample(logits, rows)
    finally:
        logprobs._CHUNK_ENTRIES = saved
    assert np.array_equal(whole.logprobs.logprobs, parts.logprobs.logprobs)
    assert np.array_equal(whole.logprobs.logprob_token_ids, parts.logprobs.logprob_token_ids)


def test_logprobs_where_fewer_tokens_are_possible_than_asked_for() -> None:
    logits = torch.full((1, 400), -torch.inf)
    logits[0, [0, 2]] = torch.tensor([1.0, 3.0])
    lists = sample(logits, [Row(logprobs=4)]).logprobs
    assert lists.logprob_token_ids.tolist() == [[2, 2, 0, 1, 3]]
    assert np.isneginf(lists.logprobs[0, 3:]).all()
    assert np.isfinite(lists.logprobs[0, :3]).all()
