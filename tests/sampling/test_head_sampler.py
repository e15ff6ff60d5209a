"""A token that is chosen without logits is the one that the sampler takes from logits."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from jubako.kernels.cpu.library import Pool, library
from jubako.sampling.sampler import NO_NUMBERS, NOTHING_ALLOWED, Sampler, SamplerOutput
from tests.sampling.oracle import Row, metadata_of

if library() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

from jubako.kernels.cpu.head_candidates import CandidateHead
from jubako.kernels.cpu.packed_matrix import PackedMatrix
from jubako.sampling.head_sampler import HeadSampler
from tests.kernels.cpu.products import product

K = 32
POOL = Pool(2)

PARAMETERS = [
    {},
    {"logprobs": 0},
    {"logprobs": 5},
    {"temperature": 1.0},
    {"temperature": 0.3},
    {"temperature": 1.0, "top_k": 1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    {"temperature": 1.5, "top_k": 64, "min_p": 0.05, "logprobs": 3},
    {"temperature": 1.0, "top_k": 5, "logprobs": 20},
    {"temperature": 0.2, "top_p": 0.9},
    {"temperature": 1.0, "top_p": 0.3, "logprobs": 2},
    # These need logits.
    {"temperature": 1.0, "min_p": 0.1},
    {"temperature": 1.0, "logprobs": 2},
    {"temperature": 1.0, "top_k": 600},
    {"temperature": 1.0, "top_k": 600, "top_p": 0.5},
    {"temperature": 0.0, "logit_bias": {3: 5.0}},
    {"temperature": 1.0, "top_k": 4, "bad_words_token_ids": [[2]]},
    {"logprobs": -1},
]


class Case:
    """A head of random weights, hidden states, and rows of requests on them."""

    def __init__(self, rows: list[Row], vocab_size: int, dtype: torch.dtype, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        # Logits with a spread of a few units, as models have.
        weight = torch.randn(vocab_size, K, generator=random) / 2
        self.matrix = PackedMatrix.from_tensor(weight.to(dtype), POOL)
        self.hidden = torch.randn(len(rows), K, generator=random).to(dtype)
        self.rows = rows
        self.vocab_size = vocab_size
        self.with_logits: list[int] = []
        self.masks: np.ndarray | None = None
        """[rows, words] int32: the bits of the tokens that each row may choose."""

    def logits(self, places: np.ndarray) -> torch.Tensor:
        self.with_logits += places.tolist()
        logits = product(POOL, self.hidden, self.matrix, dtype=self.hidden.dtype)
        if self.masks is not None:
            bits = np.unpackbits(self.masks.view(np.uint8), axis=1, bitorder="little")
            logits[torch.from_numpy(bits[:, : self.vocab_size] == 0)] = -torch.inf
        return logits[torch.from_numpy(places)]

    def by_head(self) -> SamplerOutput:
        metadata = metadata_of(self.rows, self.vocab_size)
        sampler = HeadSampler(CandidateHead(self.matrix, POOL), Sampler())
        self.with_logits.clear()
        everyone = np.arange(len(self.rows))
        allowed = None
        if self.masks is not None:
            start, size = self.masks.ctypes.data, self.masks.strides[0]
            allowed = (start + size * everyone).astype(np.uint64)
        return sampler(self.hidden, metadata, everyone, self.index, self.logits, allowed)

    def by_logits(self) -> SamplerOutput:
        metadata = metadata_of(self.rows, self.vocab_size)
        everyone = np.arange(len(self.rows))
        return Sampler()(self.logits(everyone), metadata, everyone, self.index)

    @property
    def index(self) -> np.ndarray:
        return np.array([len(row.output) for row in self.rows])


def cases(seeds: int) -> Iterator[Case]:
    for seed in range(seeds):
        for size in (50, 700, 4000):
            for dtype in (torch.float32, torch.bfloat16):
                rows = [
                    Row(seed=100 * seed + i, output=[1] * (i % 3), **parameters)
                    for i, parameters in enumerate(2 * PARAMETERS)
                ]
                yield Case(rows, size, dtype, seed)


def test_tokens_are_those_from_logits() -> None:
    for case in cases(seeds=6):
        assert case.by_head().token_ids.tolist() == case.by_logits().token_ids.tolist()


def test_logprobs_are_those_from_logits() -> None:
    for case in cases(seeds=1):
        ours, exact = case.by_head(), case.by_logits()
        assert ours.logprob_rows.tolist() == exact.logprob_rows.tolist()
        assert ours.logprobs is not None
        assert exact.logprobs is not None
        assert ours.logprobs.row_widths == exact.logprobs.row_widths
        for i, width in enumerate(exact.logprobs.row_widths or []):
            at = (i, slice(width))
            assert np.array_equal(
                ours.logprobs.logprob_token_ids[at], exact.logprobs.logprob_token_ids[at]
            )
            difference = ours.logprobs.logprobs[at] - exact.logprobs.logprobs[at]
            assert np.nanmax(np.abs(difference)) < 1e-5
        assert np.array_equal(ours.logprobs.sampled_token_ranks, exact.logprobs.sampled_token_ranks)


def test_only_rows_that_need_them_get_logits() -> None:
    rows = [Row(seed=i, **parameters) for i, parameters in enumerate(PARAMETERS)]
    case = Case(rows, 4000, torch.float32, seed=0)
    case.by_head()
    undecided = set(case.with_logits) - set(range(11, len(rows)))
    assert set(range(11, len(rows))) <= set(case.with_logits)
    # A flat distribution may not be decided by its best tokens.
    assert undecided <= {9, 10}


@pytest.mark.parametrize("share", [0.9, 0.02])
def test_a_mask_leaves_the_same_tokens_as_in_logits(share: float) -> None:
    random = np.random.default_rng(0)
    for case in cases(seeds=1):
        bits = random.random((len(case.rows), -(-case.vocab_size // 32) * 32)) < share
        bits[3] = False
        case.masks = np.packbits(bits, axis=1, bitorder="little").view(np.int32)
        tokens = case.by_head().token_ids.tolist()
        assert tokens == case.by_logits().token_ids.tolist()
        assert tokens[3] == NOTHING_ALLOWED


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    case = next(cases(seeds=1))
    together = case.by_head().token_ids.tolist()
    for i, row in enumerate(case.rows):
        alone = next(cases(seeds=1))
        alone.rows, alone.hidden = [row], case.hidden[i : i + 1]
        assert alone.by_head().token_ids.tolist() == [together[i]]


def test_equals_at_the_end_of_top_k_may_all_be_drawn() -> None:
    rows = [Row(seed=i, temperature=1.0, top_k=2) for i in range(200)]
    case = Case(rows, 100, torch.float32, seed=0)
    weight = torch.zeros(100, K)
    weight[7], weight[[20, 60, 99]] = 1.0, 0.5
    case.matrix = PackedMatrix.from_tensor(weight, POOL)
    case.hidden = torch.full((200, K), 1 / K)
    assert set(case.by_head().token_ids.tolist()) == {7, 20, 60, 99}
    assert not case.with_logits


def test_more_equals_than_there_is_room_for_need_logits() -> None:
    rows = [Row(), Row(temperature=1.0, top_k=3), Row(temperature=1.0)]
    case = Case(rows, 9000, torch.float32, seed=0)
    case.hidden.zero_()
    assert case.by_head().token_ids.tolist() == case.by_logits().token_ids.tolist()
    case.by_head()
    assert case.with_logits == [0, 1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_not_numbers_say_so_and_harm_nobody(dtype: torch.dtype) -> None:
    rows = [Row(seed=i, **parameters) for i, parameters in enumerate(2 * PARAMETERS)]
    case = Case(rows, 700, dtype, seed=0)
    whole = case.by_head().token_ids.tolist()
    bad = len(PARAMETERS)
    case.hidden[bad:] = torch.nan
    output = case.by_head()
    assert output.token_ids.tolist() == whole[:bad] + [NO_NUMBERS] * bad
    assert case.by_logits().token_ids.tolist() == output.token_ids.tolist()


def test_one_logit_that_is_not_a_number_is_enough() -> None:
    rows = [Row(temperature=1.0, top_k=3), Row(temperature=1.0), Row(temperature=1.0, top_p=0.5)]
    case = Case(rows, 700, torch.float32, seed=0)
    weight = torch.randn(700, K)
    weight[650] = torch.nan
    case.matrix = PackedMatrix.from_tensor(weight, POOL)
    assert case.by_head().token_ids.tolist() == [NO_NUMBERS] * 3
    assert case.by_logits().token_ids.tolist() == [NO_NUMBERS] * 3
