"""Which rows of a step does the reference attend together, and over which blocks?"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.reference.gather import slab_indices

MAX_BATCHED_QUERIES = 16
"""Rows with more queries are attended one at a time."""
GROUP_BYTES = 8 << 20
"""Aim for the keys and values of a group, so that they stay in the processor's cache."""
MIN_FILL = 0.7
"""A row joins a group only if it has at least this share of the group's blocks per row."""


@dataclass(frozen=True)
class RowGroup:
    """Rows of equal query length and similar context length."""

    tokens: torch.Tensor
    """[n · m] int64, the query tokens in row order."""
    all_tokens: bool
    """Whether they are simply all tokens of the step."""
    num_rows: int
    query_len: int
    slabs: torch.Tensor
    """[2 · n · Hkv · b] int64, see `gather.slab_indices`."""
    cleared: torch.Tensor | None
    """Gathered rows of positions that no query may see, as for `gather.gather_slabs`."""
    first_key: int
    end_key: int
    """The gathered positions that any row needs."""
    mask: torch.Tensor | None
    """[n, 1, m, end_key - first_key], 0 or -inf; None if every query sees every key."""


@dataclass(frozen=True)
class RowPlan:
    """How the rows of a step are divided."""

    groups: list[RowGroup]
    long_rows: list[int]
    whole_step: RowGroup | None
    """The only group, if it covers the step's tokens in order."""


def plan_rows(
    metadata: AttentionMetadata,
    kv: PagedKV,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> RowPlan:
    """The plan for layers of this shape, made once a step."""
    shape = ("rows", kv.num_kv_heads, kv.block_size, kv.slabs_per_block, window, dtype)
    plan: RowPlan | None = metadata.plans.get(shape)
    if plan is None:
        plan = metadata.plans[shape] = _plan_rows(metadata, kv, window, dtype, device)
    return plan


def _plan_rows(
    metadata: AttentionMetadata,
    kv: PagedKV,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
) -> RowPlan:
    n, B = metadata.num_reqs, kv.block_size
    query_lens = np.diff(metadata.query_start_loc_cpu[: n + 1]).astype(np.int64)
    seq_lens = metadata.seq_lens_cpu[:n].astype(np.int64)
    first_keys = np.zeros(n, np.int64)
    if window is not None:
        first_keys = np.maximum(seq_lens - query_lens - window + 1, 0)
    first_blocks = first_keys // B
    num_blocks = -(-seq_lens // B) - first_blocks
    group_blocks = max(1, GROUP_BYTES // (2 * kv.num_kv_heads * B * kv.head_size * dtype.itemsize))

    groups = []
    batched = query_lens[(query_lens > 0) & (query_lens <= MAX_BATCHED_QUERIES)]
    for m in np.unique(batched):
        rows = np.flatnonzero(query_lens == m)
        for chosen in similar_rows(rows, num_blocks[rows], group_blocks):
            groups.append(
                _group(
                    metadata,
                    kv,
                    window,
                    dtype,
                    device,
                    rows=chosen,
                    query_len=int(m),
                    first_keys=first_keys[chosen],
                    first_blocks=first_blocks[chosen],
                    num_blocks=num_blocks[chosen],
                )
            )
    long_rows = np.flatnonzero(query_lens > MAX_BATCHED_QUERIES).tolist()
    whole = groups[0] if len(groups) == 1 and not long_rows and groups[0].all_tokens else None
    return RowPlan(groups, long_rows, whole)


def similar_rows(rows: np.ndarray, num_blocks: np.ndarray, group_blocks: int) -> list[np.ndarray]:
    """Divide `rows` into groups of about `group_blocks` blocks; one group keeps the order."""
    if num_blocks.min() >= MIN_FILL * num_blocks.max() and (
        num_blocks.max() * len(rows) <= group_blocks
    ):
        return [rows]
    order = np.argsort(-num_blocks, kind="stable")
    rows, num_blocks = rows[order], num_blocks[order]
    parts = []
    start = 0
    while start < len(rows):
        longest = int(num_blocks[start])
        limit = start + max(1, group_blocks // longest)
        similar = start + int(np.sum(num_blocks[start:] >= MIN_FILL * longest))
        end = min(limit, similar)
        parts.append(rows[start:end])
        start = end
    return parts


def _group(
    metadata: AttentionMetadata,
    kv: PagedKV,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    rows: np.ndarray,
    query_len: int,
    first_keys: np.ndarray,
    first_blocks: np.ndarray,
    num_blocks: np.ndarray,
) -> RowGroup:
    B = kv.block_size
    n, width = len(rows), int(num_blocks.max())
    starts = metadata.query_start_loc_cpu[rows].astype(np.int64)
    tokens = (starts[:, None] + np.arange(query_len)).ravel()
    # Slots are those of queries, but for cross attention, whose keys come from elsewhere.
    T = metadata.slot_mapping.shape[0] if metadata.causal else metadata.num_actual_tokens
    all_tokens = len(tokens) == T and bool((tokens == np.arange(T)).all())

    # A row shorter than the group repeats its last block, which is then cleared.
    columns = first_blocks[:, None] + np.minimum(np.arange(width), num_blocks[:, None] - 1)
    table = metadata.block_table_cpu[rows[:, None], columns].astype(np.int64)

    ends = metadata.seq_lens_cpu[rows].astype(np.int64) - first_blocks * B
    firsts = first_keys - first_blocks * B
    first_key, end_key = int(firsts.min()), int(ends.max())
    cleared = mask = None
    if n > 1 or query_len > 1:
        position = np.arange(width * B)
        unseen = (position < firsts[:, None]) | (position >= ends[:, None])
        unseen &= (position >= first_key) & (position < end_key)
        cleared = _cleared_rows(unseen[:, None], kv.num_kv_heads, device)
        # Position of each query, counted like `position`: the last one is the last key.
        at = ends[:, None] - query_len + np.arange(query_len)
        if not metadata.causal:
            at[:] = ends[:, None] - 1
        visible = position <= at[..., None]
        if window is not None:
            visible &= position > at[..., None] - window
        visible = visible[:, :, first_key:end_key]
        if not visible.all():
            bias = np.where(visible, np.float32(0), np.float32(-math.inf))
            mask = torch.from_numpy(bias)[:, None].to(dtype=dtype, device=device)
    return RowGroup(
        tokens=torch.from_numpy(tokens).to(device),
        all_tokens=all_tokens,
        num_rows=n,
        query_len=query_len,
        slabs=slab_indices(torch.from_numpy(table).to(device), kv),
        cleared=cleared,
        first_key=first_key,
        end_key=end_key,
        mask=mask,
    )


def _cleared_rows(
    unseen: np.ndarray, num_kv_heads: int, device: torch.device
) -> torch.Tensor | None:
    """Indices of `unseen` [n, 1, L] within [2, n, Hkv, L]; None if there are none."""
    if not unseen.any():
        return None
    n, _, length = unseen.shape
    full = np.broadcast_to(unseen, (2, n, num_kv_heads, length))
    return torch.from_numpy(np.flatnonzero(full)).to(device)
