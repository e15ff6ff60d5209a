"""The best tokens are found without a sort, ties included."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jubako.sampling.best_tokens import argmax_tokens, best_tokens, lower_bounds


@given(
    seed=st.integers(0, 2**32),
    size=st.sampled_from([1, 5, 64, 65, 700, 4097]),
    decimals=st.sampled_from([0, 1, 5]),
    masked=st.booleans(),
)
@settings(max_examples=80, deadline=None)
def test_all_tokens_down_to_the_kth_are_found(
    seed: int, size: int, decimals: int, masked: bool
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2, (5, size)).round(decimals).astype(np.float32)
    if masked:
        logits[rng.random(logits.shape) < 0.9] = -np.inf
    counts = rng.integers(1, size + 1, 5)
    found = best_tokens(torch.from_numpy(logits), counts)
    for row in range(5):
        values, ids = found.values[row].numpy(), found.token_ids[row].numpy()
        real = values > -np.inf
        finite = np.isfinite(logits[row]).sum()
        assert real.sum() >= min(counts[row], finite)
        assert (logits[row, ids[real]] == values[real]).all()
        # They are the beginning of a stable sort.
        order = np.argsort(-logits[row], kind="stable")[: real.sum()]
        assert ids[real].tolist() == order.tolist()
        if 0 < real.sum() < finite:
            assert np.sort(logits[row])[::-1][real.sum()] < values[real][-1]


def test_bounds_do_not_depend_on_other_rows() -> None:
    logits = torch.randn(3, 6400)
    together = lower_bounds(logits, np.array([5, 6000, 60]))
    for row, count in enumerate((5, 6000, 60)):
        assert lower_bounds(logits[row : row + 1], np.array([count])) == together[row]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_takes_the_lowest_of_equals(dtype: torch.dtype) -> None:
    logits = (torch.randn(9, 3000) * 2).round().to(dtype)
    assert (logits == logits.amax(dim=1, keepdim=True)).sum(dim=1).max() > 1
    expected = logits.float().numpy().argmax(axis=1)
    assert argmax_tokens(logits).tolist() == expected.tolist()


def test_a_row_without_numbers_gives_a_column() -> None:
    found = best_tokens(torch.full((2, 200), torch.nan), np.array([3, 3]))
    assert found.values.shape[1] >= 1
    assert found.token_ids.max() < 200
