"""The native choice of the best token equals the largest of written logits, at every level."""

from __future__ import annotations

import pytest
import torch

from jubako.kernels.cpu.library import Pool
from jubako.kernels.cpu.packed_matrix import PackedMatrix
from tests.kernels.cpu.products import greedy, product


@pytest.mark.parametrize("kind", ["F32", "BF16", "INT8", "Q8_0", "Q4_0"])
def test_the_best_of_the_logits_of_a_product(native_pool: Pool, kind: str) -> None:
    torch.manual_seed(0)
    dtype = torch.float32 if kind == "F32" else torch.bfloat16
    for n in (1, 70, 1000):
        packed = PackedMatrix.from_tensor(torch.randn(n, 64), native_pool, kind=kind)
        for rows in (1, 3, 8, 33, 300):
            x = torch.randn(rows, 64).to(dtype)
            logits = product(native_pool, x, packed, dtype=dtype).float()
            ids, values = greedy(native_pool, x, packed, dtype)
            assert torch.equal(ids, logits.argmax(dim=1)), (n, rows)
            assert torch.equal(values, logits.amax(dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_lowest_id_wins_among_equals(native_pool: Pool, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Few different rows: each largest logit occurs in every panel, in a lane and in others.
    weight = torch.randn(4, 64).to(dtype).repeat(50, 1)
    packed = PackedMatrix.from_tensor(weight, native_pool)
    x = torch.randn(20, 64).to(dtype)
    ids, _ = greedy(native_pool, x, packed, dtype)
    logits = product(native_pool, x, packed, dtype=dtype).float()
    best = logits == logits.amax(dim=1, keepdim=True)
    assert torch.equal(ids, best.int().argmax(dim=1))
    assert (ids < 4).all()


def test_logits_that_rounding_makes_equal_are_equal(native_pool: Pool) -> None:
    weight = torch.zeros(64, 32)
    weight[10, 0], weight[50, 0] = 1.0, 1.0 + 2**-12
    packed = PackedMatrix.from_tensor(weight, native_pool)
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    assert greedy(native_pool, x, packed, torch.bfloat16)[0].tolist() == [10]
    assert greedy(native_pool, x, packed, torch.float32)[0].tolist() == [50]


def test_bias_counts_and_padding_does_not(native_pool: Pool) -> None:
    packed = PackedMatrix.from_tensor(torch.zeros(70, 32), native_pool)
    bias = torch.full((70,), -3.0)
    x = torch.zeros(2, 32)
    ids, values = greedy(native_pool, x, packed, torch.float32, bias)
    assert ids.tolist() == [0, 0]
    assert values.tolist() == [-3.0, -3.0]
    bias[69] = -1.0
    assert greedy(native_pool, x, packed, torch.float32, bias)[0].tolist() == [69, 69]


def test_a_row_without_numbers_has_no_best(native_pool: Pool) -> None:
    torch.manual_seed(0)
    packed = PackedMatrix.from_tensor(torch.randn(70, 32), native_pool)
    x = torch.randn(3, 32)
    x[1] = torch.nan
    ids, _ = greedy(native_pool, x, packed, torch.float32)
    expected = product(native_pool, x, packed).argmax(dim=1)
    assert ids[1] == -1
    assert ids[0] == expected[0]
    assert ids[2] == expected[2]
