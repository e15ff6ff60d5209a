"""Attention in both directions equals a plain softmax, whatever runs beside a request."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.reference import encoder_attention as module
from jubako.kernels.reference.encoder_attention import encoder_attention

HEAD = 8


def metadata_of(lengths: list[int]) -> AttentionMetadata:
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return AttentionMetadata.both_ways(
        starts, torch.from_numpy(starts), torch.tensor(lengths, dtype=torch.int32)
    )


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """One request: q [m, Hq, D], k and v [m, Hkv, D], in float64."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    return ((q @ k.mT * scale).softmax(-1) @ v).transpose(0, 1)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    "lengths",
    [[1], [7], [5, 5, 5], [1, 2, 3, 4, 5, 6, 7, 8, 9], [33, 1, 40, 36, 33, 64, 61], [130, 2, 129]],
    ids=str,
)
def test_every_token_sees_its_whole_request(lengths, kv_heads):
    generator = torch.Generator().manual_seed(sum(lengths))
    total = sum(lengths)
    q = torch.randn(total, 4, HEAD, generator=generator)
    # As a model gives them: views of one tensor.
    kv = torch.randn(total, 2 * kv_heads, HEAD, generator=generator)
    k, v = kv.split(kv_heads, dim=1)
    metadata = metadata_of(lengths)
    out = encoder_attention(q, k, v, metadata, scale=0.4)
    again = encoder_attention(q, k, v, metadata, scale=0.4)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        want = plain(q[rows], k[rows], v[rows], 0.4)
        assert (out[rows] - want).abs().max() < 1e-5
        start += length
    assert torch.equal(out, again)


def test_many_requests_are_divided(monkeypatch):
    monkeypatch.setattr(module, "GROUP_TOKENS", 40)
    lengths = [8, 7, 8, 8, 7, 8, 8, 8, 100]
    x = torch.randn(sum(lengths), 2, HEAD)
    out = encoder_attention(x, x, x, metadata_of(lengths), scale=1.0)
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        assert (out[rows] - plain(x[rows], x[rows], x[rows], 1.0)).abs().max() < 1e-5
        start += length
