"""How does the reference compute multi-head latent attention (DeepSeek-AI 2024, arXiv 2405.04434)?

Keys and values of all heads are linear in a token's latent. A row with few queries is attended in
latent space: its queries go through the key matrix, the weighted latents through the value matrix,
and no key or value ever exists. For a row with many queries that is more work than making keys and
values, so they are made, for a bounded chunk of the context at a time. A chunk's attention is
merged into that of the chunks before by its log-sum-exp.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_latent import PagedLatent
from jubako.kernels.reference.attention_parts import MergedParts, attend_part
from jubako.kernels.reference.batched_rows import (
    GROUP_BYTES,
    MAX_BATCHED_QUERIES,
    similar_rows,
)

EXPANDED_BYTES = 32 << 20
"""Keys and values that exist at one time."""
SCORE_BYTES = 16 << 20
"""Scores that may exist at one time."""
MAX_CHUNK = 512
"""Keys of a chunk; larger ones gain nothing and waste more of the causal triangle."""


def concat_and_cache_mla(
    latent: torch.Tensor, key_rope: torch.Tensor, kv: PagedLatent, metadata: AttentionMetadata
) -> None:
    """Write latent [T, L] and key_rope [T, R]; see `Kernels.concat_and_cache_mla`."""
    geometry = ("write latent", kv.block_size)
    plan: _WritePlan | None = metadata.plans.get(geometry)
    if plan is None:
        plan = metadata.plans[geometry] = _plan_write(kv.block_size, metadata, latent.device)
    for source, columns in (
        (latent, kv.pages[..., : kv.latent_size]),
        (key_rope, kv.pages[..., kv.latent_size :]),
    ):
        chosen = source[: plan.num_tokens] if plan.tokens is None else source[plan.tokens]
        columns[plan.blocks, plan.offsets] = chosen.to(columns.dtype)


class _WritePlan(NamedTuple):
    tokens: torch.Tensor | None
    """[N] int64, the tokens to write; None: the first `num_tokens`."""
    num_tokens: int
    blocks: torch.Tensor
    """[N] int64."""
    offsets: torch.Tensor


def _plan_write(block_size: int, metadata: AttentionMetadata, device: torch.device) -> _WritePlan:
    slots = metadata.slot_mapping_cpu
    if slots is None:
        slots = metadata.slot_mapping.cpu().numpy()
    num_tokens = len(slots)
    tokens = None
    if num_tokens and slots.min() < 0:
        written = np.flatnonzero(slots >= 0)
        tokens = torch.from_numpy(written).to(device)
        slots = slots[written]
    blocks, offsets = np.divmod(slots.astype(np.int64), block_size)
    return _WritePlan(
        tokens,
        num_tokens,
        torch.from_numpy(blocks).to(device),
        torch.from_numpy(offsets).to(device),
    )


def mla_attention(
    query: torch.Tensor,
    kv: PagedLatent,
    up: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> torch.Tensor:
    """Attention of query [T, H, P + R] → [T, H, V]; see `Kernels.mla_attention`."""
    assert metadata.causal, "bidirectional attention has no KV pages"
    shape = ("latent rows", kv.block_size, kv.row_size, query.dtype)
    plan: _RowPlan | None = metadata.plans.get(shape)
    if plan is None:
        plan = metadata.plans[shape] = _plan_rows(metadata, kv, query.dtype, query.device)
    rope_size = kv.row_size - kv.latent_size
    nope_size = query.shape[2] - rope_size
    step = _Step(query, kv, up[:, :nope_size], up[:, nope_size:], scale)
    if len(plan.groups) == 1 and plan.groups[0].all_tokens:
        return step.absorbed(plan.groups[0])
    out = query.new_empty(*query.shape[:2], step.value_up.shape[1])
    for group in plan.groups:
        out[group.tokens] = step.absorbed(group)
    for row in plan.long_rows:
        start, end = metadata.query_start_loc_cpu[row : row + 2].tolist()
        context = int(metadata.seq_lens_cpu[row]) - (end - start)
        step.expanded(query[start:end], context, metadata.block_table_tensor[row], out[start:end])
    return out


class _Group(NamedTuple):
    """Rows of equal query length m and similar context length."""

    tokens: torch.Tensor
    """[n · m] int64, the query tokens in row order."""
    all_tokens: bool
    """Whether they are simply all tokens of the step."""
    num_rows: int
    table: torch.Tensor
    """[n · b] int64, the blocks of each row."""
    num_keys: int
    """Gathered positions that any row needs."""
    cleared: torch.Tensor | None
    """Which of the [n · b · B] gathered rows no query may see: they may hold anything."""
    mask: torch.Tensor | None
    """[n, 1, m, num_keys], 0 or -inf; None if every query sees every key."""


class _RowPlan(NamedTuple):
    groups: list[_Group]
    long_rows: list[int]


def _plan_rows(
    metadata: AttentionMetadata, kv: PagedLatent, dtype: torch.dtype, device: torch.device
) -> _RowPlan:
    n, B = metadata.num_reqs, kv.block_size
    query_lens = np.diff(metadata.query_start_loc_cpu[: n + 1]).astype(np.int64)
    num_blocks = -(-metadata.seq_lens_cpu[:n].astype(np.int64) // B)
    group_blocks = max(1, GROUP_BYTES // (B * kv.row_size * dtype.itemsize))
    groups = []
    for m in np.unique(query_lens[(query_lens > 0) & (query_lens <= MAX_BATCHED_QUERIES)]):
        rows = np.flatnonzero(query_lens == m)
        groups += [
            _group(metadata, chosen, int(m), num_blocks[chosen], B, dtype, device)
            for chosen in similar_rows(rows, num_blocks[rows], group_blocks)
        ]
    return _RowPlan(groups, np.flatnonzero(query_lens > MAX_BATCHED_QUERIES).tolist())


def _group(
    metadata: AttentionMetadata,
    rows: np.ndarray,
    query_len: int,
    num_blocks: np.ndarray,
    block_size: int,
    dtype: torch.dtype,
    device: torch.device,
) -> _Group:
    starts = metadata.query_start_loc_cpu[rows].astype(np.int64)
    tokens = (starts[:, None] + np.arange(query_len)).ravel()
    T = metadata.slot_mapping.shape[0]
    all_tokens = len(tokens) == T and bool((tokens == np.arange(T)).all())

    # A row shorter than the group repeats its last block, which is then cleared.
    columns = np.minimum(np.arange(int(num_blocks.max())), num_blocks[:, None] - 1)
    table = metadata.block_table_cpu[rows[:, None], columns].astype(np.int64).ravel()

    ends = metadata.seq_lens_cpu[rows].astype(np.int64)
    num_keys = int(ends.max())
    position = np.arange(columns.shape[1] * block_size)
    unseen = np.flatnonzero((position >= ends[:, None]) & (position < num_keys))
    # The last query stands at the last key.
    at = ends[:, None] - query_len + np.arange(query_len)
    visible = position[:num_keys] <= at[..., None]
    mask = None
    if not visible.all():
        bias = np.where(visible, np.float32(0), np.float32(-math.inf))
        mask = torch.from_numpy(bias)[:, None].to(dtype=dtype, device=device)
    return _Group(
        tokens=torch.from_numpy(tokens).to(device),
        all_tokens=all_tokens,
        num_rows=len(rows),
        table=torch.from_numpy(table).to(device),
        num_keys=num_keys,
        cleared=torch.from_numpy(unseen).to(device) if len(unseen) else None,
        mask=mask,
    )


class _Step(NamedTuple):
    """What all rows of one call share."""

    query: torch.Tensor
    kv: PagedLatent
    key_up: torch.Tensor
    """[H, P, L]"""
    value_up: torch.Tensor
    """[H, V, L]"""
    scale: float

    def absorbed(self, group: _Group) -> torch.Tensor:
        """Attention in latent space: the tokens of `group` [n · m] → [n · m, H, V]."""
        H, P, L = self.key_up.shape
        n = group.num_rows
        q = self.query if group.all_tokens else self.query[group.tokens]
        in_latent = torch.bmm(q[..., :P].transpose(0, 1), self.key_up).transpose(0, 1)
        rows = self.kv.pages.index_select(0, group.table).view(n, -1, self.kv.row_size)
        if group.cleared is not None:
            rows.view(-1, self.kv.row_size).index_fill_(0, group.cleared, 0)
        rows = rows[:, None, : group.num_keys].to(q.dtype)
        heads = torch.cat((in_latent, q[..., P:]), dim=-1).view(n, -1, H, self.kv.row_size)
        m = heads.shape[1]
        # All heads share the one row of a key. A single query's become the rows of one head, so
        # that keys are read once.
        heads = heads.transpose(1, 2) if m > 1 else heads
        # Values are whole rows, as attention is faster with keys and values of one size.
        weighted = F.scaled_dot_product_attention(
            heads, rows, rows, attn_mask=group.mask, scale=self.scale, enable_gqa=m > 1
        )[..., :L]
        if m > 1:
            weighted = weighted.transpose(1, 2)
        by_head = weighted.reshape(n * m, H, L).transpose(0, 1)
        return torch.bmm(by_head, self.value_up.transpose(1, 2)).transpose(0, 1)

    def expanded(
        self, query: torch.Tensor, context: int, blocks: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attention of one request's many tokens [m, H, P + R] into `out` [m, H, V].

        `context` tokens came before them; `blocks` is the request's row of the block table.
        """
        H = query.shape[1]
        m, seq_len = len(query), context + len(query)
        q = query.transpose(0, 1)
        merged = MergedParts(H, m, out.shape[2], query.device)
        size = self._chunk_size(query.dtype)
        for first in range(0, seq_len, size):
            end = min(first + size, seq_len)
            k, v = self._keys_and_values(blocks, first, end, query.dtype)
            # Queries before the chunk see none of it, those within it a triangle.
            start = max(first - context, 0)
            piece = max(16, SCORE_BYTES // (4 * H * (end - first)))
            for a in range(start, m, piece):
                b = min(a + piece, m)
                position = context + a - first
                part = attend_part(q[:, a:b], k, v, scale=self.scale, position=position)
                merged.add(a, b, *part)
        out.copy_(merged.out.transpose(0, 1))

    def _chunk_size(self, dtype: torch.dtype) -> int:
        """Tokens whose keys and values fit into EXPANDED_BYTES."""
        H, P, _ = self.key_up.shape
        key_size = P + self.kv.row_size - self.kv.latent_size
        per_token = H * (key_size + P + 2 * self.value_up.shape[1]) * dtype.itemsize
        return min(max(EXPANDED_BYTES // per_token, 16), MAX_CHUNK)

    def _keys_and_values(
        self, blocks: torch.Tensor, first: int, end: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys [H, C, P + R] and values [H, C, V] of positions `first` up to `end`."""
        H, B, L = self.key_up.shape[0], self.kv.block_size, self.kv.latent_size
        first_block = first // B
        table = blocks[first_block : -(-end // B)].long()
        rows = self.kv.pages.index_select(0, table).view(-1, self.kv.row_size)
        rows = rows[first - first_block * B : end - first_block * B].to(dtype)
        latent = rows[:, :L].expand(H, -1, -1)
        shared = rows[:, L:].expand(H, -1, -1)
        keys = torch.cat((torch.bmm(latent, self.key_up.transpose(1, 2)), shared), dim=-1)
        return keys, torch.bmm(latent, self.value_up.transpose(1, 2))
