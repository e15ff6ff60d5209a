"""The noise is a fixed function of seed, output index and token, and it is random."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jubako.sampling.draw import draw_from_candidates, draw_from_vocabulary
from jubako.sampling.noise import gumbel_noise, noise_bits, noise_keys, philox_4x32
from tests.sampling.goodness import fits_cdf, fits_counts

MASK = 0xFFFFFFFF


def words(*values: int) -> tuple[np.ndarray, ...]:
    return tuple(np.array([v], dtype=np.uint64) for v in values)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [
        ((0,) * 4, (0,) * 2, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((MASK,) * 4, (MASK,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_gives_the_published_answers(
    counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    assert [int(w[0]) for w in philox_4x32(words(*counter), words(*key))] == list(expected)


def plain_bits(key: list[int], token: int) -> int:
    """The token hash in Python's own integers."""
    k0, k1, k2 = (k & MASK for k in key)
    x = token ^ k0
    x = (((x ^ (x >> 16)) * 0x21F0AAAD) & MASK) ^ k1
    x = (((x ^ (x >> 15)) * 0xD35A2D97) & MASK) ^ k2
    return x ^ (x >> 15)


def test_bits_are_the_same_whatever_is_computed_beside_them() -> None:
    keys = noise_keys(np.array([1, 2**64 - 1, 77], dtype=np.uint64), np.array([0, 5, 2**33]))
    ids = torch.arange(1003).unsqueeze(0)
    together = noise_bits(keys, ids)
    for row in range(3):
        for token in (0, 1, 500, 1001, 1002):
            alone = noise_bits(keys[row : row + 1], torch.tensor([[token]]))
            assert alone.item() == together[row, token]
            assert alone.item() & MASK == plain_bits(keys[row].tolist(), token)


def test_signed_and_unsigned_seeds_with_the_same_bits_agree() -> None:
    signed = noise_keys(np.array([-3], dtype=np.int64), np.array([1]))
    unsigned = noise_keys(np.array([2**64 - 3], dtype=np.uint64), np.array([1]))
    assert torch.equal(signed, unsigned)


def test_seed_index_and_stream_change_the_key() -> None:
    seen = set()
    for seed in (0, 1, 2**32, 2**63):
        for index in (0, 1, 2**32):
            for stream in (0, 1):
                key = noise_keys(np.array([seed], dtype=np.uint64), np.array([index]), stream)
                seen.add(tuple(key[0].tolist()))
    assert len(seen) == 24


@pytest.mark.parametrize("axis", ["seeds", "indices", "tokens"])
def test_noise_is_gumbel_along_each_axis(axis: str) -> None:
    count = 20000
    many = np.arange(count, dtype=np.uint64)
    if axis == "tokens":
        keys = noise_keys(np.array([7], dtype=np.uint64), np.array([3]))
        noise = gumbel_noise(keys, torch.arange(count).unsqueeze(0))[0]
    else:
        seeds = many if axis == "seeds" else np.full(count, 7, dtype=np.uint64)
        indices = many if axis == "indices" else np.full(count, 3)
        noise = gumbel_noise(noise_keys(seeds, indices), torch.full((count, 1), 11))[:, 0]
    values = noise.numpy()
    assert fits_cdf(values, lambda x: np.exp(-np.exp(-x)))
    # Neighbours know nothing of each other.
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.03


def test_neighbouring_tokens_are_independent_over_seeds() -> None:
    keys = noise_keys(np.arange(40000, dtype=np.uint64), np.zeros(40000, dtype=int))
    noise = gumbel_noise(keys, torch.tensor([[0, 1, 2, 4, 1024, 65536]]))
    uniform = np.exp(-np.exp(-noise.numpy()))
    for i in range(6):
        for j in range(i):
            table, _, _ = np.histogram2d(uniform[:, i], uniform[:, j], bins=8, range=[[0, 1]] * 2)
            assert fits_counts(table.ravel(), np.full(64, table.sum() / 64)), (i, j)


def test_every_bit_is_fair() -> None:
    keys = noise_keys(np.arange(300, dtype=np.uint64), np.zeros(300, dtype=int))
    bits = noise_bits(keys, torch.arange(300).unsqueeze(0)).numpy().view(np.uint32)
    for bit in range(32):
        share = ((bits >> bit) & 1).mean()
        assert abs(share - 0.5) < 5 * 0.5 / 300


def test_noise_is_finite() -> None:
    keys = noise_keys(np.arange(50, dtype=np.uint64), np.zeros(50, dtype=int))
    for dtype in (torch.float32, torch.float64):
        assert torch.isfinite(gumbel_noise(keys, torch.arange(2000).unsqueeze(0), dtype)).all()


@pytest.mark.parametrize("scale", [0.0, 0.3, 3.0, 30.0])
def test_drawing_from_the_vocabulary_equals_drawing_from_all_its_tokens(scale: float) -> None:
    torch.manual_seed(int(scale * 10))
    rows, size = 40, 30001
    logits = torch.randn(rows, size) * scale
    logits[:, :100] = -torch.inf
    keys = noise_keys(np.arange(rows, dtype=np.uint64), np.arange(rows))
    ids = torch.arange(size).expand(rows, -1)
    assert torch.equal(draw_from_vocabulary(logits, keys), draw_from_candidates(logits, ids, keys))


def test_draws_follow_the_distribution() -> None:
    probabilities = np.array([0.5, 0.25, 0.125, 0.1, 0.02, 0.005])
    count = 20000
    logits = torch.tensor(np.log(probabilities), dtype=torch.float32).expand(count, -1)
    keys = noise_keys(np.full(count, 5, dtype=np.uint64), np.arange(count))
    drawn = draw_from_candidates(logits, torch.arange(6).expand(count, -1), keys)
    seen = np.bincount(drawn.numpy(), minlength=6)
    assert fits_counts(seen, probabilities * count)
