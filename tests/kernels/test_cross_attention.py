"""Attention to keys that others wrote equals a plain softmax over all of them."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.reference.attention import paged_attention
from jubako.kernels.reference.kv_write import reshape_and_cache

from .paging import make_metadata, scrambled_tables
from .test_encoder_attention import HEAD

BLOCK = 4


def cross_metadata(
    query_lens: list[int], encoder_lens: list[int], tables: list[list[int]], new: list[int]
) -> AttentionMetadata:
    """A step of these queries, in which the encoder outputs of the rows `new` are written."""
    metadata = make_metadata(encoder_lens, encoder_lens, tables, BLOCK)
    slots = [
        tables[row][p // BLOCK] * BLOCK + p % BLOCK for row in new for p in range(encoder_lens[row])
    ]
    starts = np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32)
    return dataclasses.replace(
        metadata,
        query_start_loc=torch.from_numpy(starts),
        query_start_loc_cpu=starts,
        num_actual_tokens=int(starts[-1]),
        max_query_len=max(query_lens),
        slot_mapping=torch.tensor(slots, dtype=torch.int64),
        causal=False,
        plans={},
    )


def dense(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, cap: float | None
) -> torch.Tensor:
    """One request: q [m, Hq, D], k and v [n, Hkv, D], in float64."""
    groups = q.shape[1] // k.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.repeat_interleave(groups, 0).mT * scale
    if cap is not None:
        scores = (scores / cap).tanh() * cap
    return (scores.softmax(-1) @ v.repeat_interleave(groups, 0)).transpose(0, 1)


@settings(max_examples=60, deadline=None)
@example(
    rows=[(1, 1), (2, 5)], kv_heads=2, cap=None, seed=0
)  # as many new keys as a group has rows
@given(
    rows=st.lists(
        st.tuples(
            st.sampled_from([1, 1, 1, 2, 3, 16, 17, 40]), st.sampled_from([1, 3, 4, 5, 20, 33])
        ),
        min_size=1,
        max_size=6,
    ),
    kv_heads=st.sampled_from([1, 2, 4]),
    cap=st.sampled_from([None, None, 2.0]),
    seed=st.integers(0, 1000),
)
def test_every_query_sees_every_key(
    rows: list[tuple[int, int]], kv_heads: int, cap: float | None, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    query_lens, encoder_lens = [q for q, _ in rows], [e for _, e in rows]
    tables, num_blocks = scrambled_tables(encoder_lens, BLOCK, np.random.default_rng(seed))
    kv = PagedKV.from_raw(
        torch.zeros(num_blocks, 2 * kv_heads * BLOCK * HEAD * 4, dtype=torch.int8),
        num_kv_heads=kv_heads,
        block_size=BLOCK,
        head_size=HEAD,
        dtype=torch.float32,
    )
    kv.slabs.fill_(math.nan)
    keys = [torch.randn(e, kv_heads, HEAD, generator=generator) for e in encoder_lens]
    values = [torch.randn(e, kv_heads, HEAD, generator=generator) for e in encoder_lens]
    order = list(range(len(rows)))
    # Half of the outputs were written by an earlier step, and nothing of the others is there yet.
    for new in (order[::2], order[1::2]):
        if new:
            metadata = cross_metadata(query_lens, encoder_lens, tables, new)
            written = [torch.cat([x[row] for row in new]) for x in (keys, values)]
            reshape_and_cache(*written, kv, metadata)
    q = torch.randn(sum(query_lens), 4, HEAD, generator=generator)
    want = torch.cat([dense(*parts, 0.4, cap) for parts in zip(q.split(query_lens), keys, values)])
    for new in ([], order[::2], order[1::2]):
        metadata = cross_metadata(query_lens, encoder_lens, tables, new)
        out = paged_attention(q, q, q, kv, metadata, scale=0.4, logits_soft_cap=cap)
        assert (out - want).abs().max() < 2e-5


def test_windows_count_from_a_position_that_queries_have_not() -> None:
    metadata = cross_metadata([1], [3], [[0]], [])
    kv = PagedKV.from_raw(
        torch.zeros(1, 2 * BLOCK * HEAD * 4, dtype=torch.int8),
        num_kv_heads=1,
        block_size=BLOCK,
        head_size=HEAD,
        dtype=torch.float32,
    )
    q = torch.zeros(1, 1, HEAD)
    for option in ({"sliding_window": 2}, {"attention_chunk_size": BLOCK}):
        with pytest.raises(AssertionError):
            paged_attention(q, q, q, kv, metadata, scale=1.0, **option)
