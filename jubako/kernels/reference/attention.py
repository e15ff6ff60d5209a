"""How does the reference attend through block tables?

Rows with few queries (decodes, and drafts to verify) are batched: rows of similar length share one
gather of their blocks and one attention call. Rows with many queries are taken one at a time; a
window layer cuts them into pieces that each see no more than piece + window keys. No mask is larger
than a piece: where a piece's mask is a band, it is a view of a vector.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.reference.batched_rows import RowGroup, plan_rows
from jubako.kernels.reference.chunked_local import cut_at_chunks
from jubako.kernels.reference.gather import gather_slabs, slab_indices

PIECE = 256
"""Queries that share one mask; a window layer wastes up to this many keys on each."""


def paged_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kv: PagedKV,
    metadata: AttentionMetadata,
    *,
    scale: float,
    sliding_window: int | None = None,
    logits_soft_cap: float | None = None,
    attention_chunk_size: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of query [T, Hq, D] → [T, Hq, D]; see `Kernels.paged_attention`."""
    if not metadata.causal:
        assert sliding_window is None, "a window is counted back from a query's own position"
        assert attention_chunk_size is None, "as is a chunk"
    if attention_chunk_size is not None:
        assert sliding_window is None, "a window and a chunk size exclude each other"
        metadata = cut_at_chunks(metadata, kv.block_size, attention_chunk_size)
    step = _Step(query, kv, scale, sliding_window, logits_soft_cap, sinks)
    plan = plan_rows(metadata, kv, sliding_window, query.dtype, query.device)
    if plan.whole_step is not None:
        return step.batched(plan.whole_step)
    out = torch.empty_like(query)
    for group in plan.groups:
        out[group.tokens] = step.batched(group)
    for row in plan.long_rows:
        start, end = metadata.query_start_loc_cpu[row : row + 2].tolist()
        seq_len = int(metadata.seq_lens_cpu[row])
        blocks = metadata.block_table_tensor[row]
        tokens = slice(start, end)
        if metadata.causal:
            out[tokens] = step.long(tokens, key, value, seq_len, blocks)
        else:
            out[tokens] = step.long_seeing_all(tokens, seq_len, blocks)
    return out


class _Step(NamedTuple):
    """What all rows of one call share."""

    query: torch.Tensor
    kv: PagedKV
    scale: float
    window: int | None
    soft_cap: float | None
    sinks: torch.Tensor | None

    @property
    def has_scores(self) -> bool:
        """Whether scores exist in full, since an operator cannot do what is asked for."""
        return self.soft_cap is not None or self.sinks is not None

    def batched(self, group: RowGroup) -> torch.Tensor:
        """Attention of the tokens of `group` [n · m] → [n · m, Hq, D]."""
        Hq, D = self.query.shape[1:]
        n, m = group.num_rows, group.query_len
        q = self.query if group.all_tokens else self.query[group.tokens]
        k, v = gather_slabs(self.kv, group.slabs, n, group.cleared, q.dtype)
        k, v = k[:, :, group.first_key : group.end_key], v[:, :, group.first_key : group.end_key]
        if m == 1:
            # The query heads of a KV head become its query rows: keys and values are read once.
            q = q.view(n, self.kv.num_kv_heads, -1, D)
            return self._attend(q, k, v, group.mask).reshape(n, Hq, D)
        q = q.view(n, m, Hq, D).transpose(1, 2)
        return self._attend(q, k, v, group.mask).transpose(1, 2).reshape(n * m, Hq, D)

    def long(
        self,
        tokens: slice,
        key: torch.Tensor,
        value: torch.Tensor,
        seq_len: int,
        blocks: torch.Tensor,
    ) -> torch.Tensor:
        """Attention of one request's many tokens → [m, Hq, D]; `blocks` is its table row."""
        q = self.query[tokens].transpose(0, 1)[None]
        m = q.shape[2]
        context = seq_len - m
        if context == 0 and self.kv.pages.dtype == q.dtype:
            # Others would not be what a later chunk or step reads.
            first = 0
            k = key[tokens].transpose(0, 1)[None].to(q.dtype)
            v = value[tokens].transpose(0, 1)[None].to(q.dtype)
        else:
            first = 0 if self.window is None else max(0, context - self.window + 1)
            k, v = self._gather_row(blocks, first, seq_len)
        unbanded = self.window is None or self.window >= seq_len
        if context == 0 and unbanded and not self.has_scores:
            return self._attend(q, k, v, causal=True)[0].transpose(0, 1)
        out = torch.empty_like(self.query[tokens])
        piece = self._piece(seq_len)
        band = _Band(None if unbanded else self.window, piece, seq_len, q.dtype, q.device)
        for a in range(0, m, piece):
            b = min(a + piece, m)
            lo = first if unbanded else max(first, context + a - band.window + 1)
            hi = context + b
            # Queries run backwards here, which turns the band mask into a view of a vector.
            reversed_q = q[:, :, a:b].flip(2)
            keys = slice(lo - first, hi - first)
            part = self._attend(
                reversed_q, k[:, :, keys], v[:, :, keys], band.mask(context + a - lo, b - a)
            )
            out[a:b] = part[0].flip(1).transpose(0, 1)
        return out

    def long_seeing_all(self, tokens: slice, seq_len: int, blocks: torch.Tensor) -> torch.Tensor:
        """As `long`, for queries that each see all `seq_len` keys of the table row."""
        q = self.query[tokens].transpose(0, 1)[None]
        k, v = self._gather_row(blocks, 0, seq_len)
        out = torch.empty_like(self.query[tokens])
        piece = self._piece(seq_len) if self.has_scores else len(out)
        for a in range(0, len(out), piece):
            part = self._attend(q[:, :, a : a + piece], k, v)
            out[a : a + piece] = part[0].transpose(0, 1)
        return out

    def _piece(self, seq_len: int) -> int:
        if self.window is not None and self.window < PIECE:
            return PIECE // 2
        if not self.has_scores:
            return PIECE
        # Scores exist in full: keep those of a piece to some 16 MiB.
        return max(16, min(PIECE, (4 << 20) // (self.query.shape[1] * seq_len)))

    def _gather_row(
        self, blocks: torch.Tensor, first: int, seq_len: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values [1, Hkv, seq_len - first, D] of positions `first` up to `seq_len`."""
        B = self.kv.block_size
        first_block = first // B
        table = blocks[None, first_block : -(-seq_len // B)].long()
        k, v = gather_slabs(self.kv, slab_indices(table, self.kv), 1, None, self.query.dtype)
        keys = slice(first - first_block * B, seq_len - first_block * B)
        return k[:, :, keys], v[:, :, keys]

    def _attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        """q [N, H, M, D] against k, v [N, Hkv, L, D] → [N, H, M, D].

        `mask` broadcasts to [N, 1, M, L] and is added to the scores.
        """
        if self.has_scores:
            return _with_scores(q, k, v, mask, self.scale, self.soft_cap, self.sinks)
        return F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=causal,
            scale=self.scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )


def _with_scores(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    cap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attention by its definition.

    Scores may be `cap · tanh(score / cap)` (Gemma 2, arXiv 2408.00118, section 2); `sinks` [Hq] add
    to the softmax's denominator (Xiao et al. 2023, arXiv 2309.17453, in the form of gpt-oss).
    """
    grouped = q.float().unflatten(1, (k.shape[1], -1))
    scores = grouped @ k.float().unsqueeze(2).mT
    if cap is None:
        scores.mul_(scale)
    else:
        scores.mul_(scale / cap).tanh_().mul_(cap)
    if mask is not None:
        scores += mask if mask.dim() == 2 else mask.unsqueeze(2)
    values = v.float().unsqueeze(2)
    if sinks is None:
        out = scores.softmax(-1) @ values
    else:
        # Query heads of a KV head are a dimension of their own, or its query rows.
        sink = sinks.float().view(grouped.shape[1], grouped.shape[2], -1, 1)
        top = torch.maximum(scores.amax(-1, keepdim=True), sink)
        weights = scores.sub_(top).exp_()
        total = weights.sum(-1, keepdim=True).add_((sink - top).exp_())
        out = (weights @ values).div_(total)
    return out.flatten(1, 2).to(q.dtype)


class _Band:
    """Masks of consecutive queries, last query first, against consecutive keys.

    Query i of m, counted from the last, stands at `offset + m - 1 - i` keys after key 0 of its
    keys, of which the piece has `offset + m`. The mask depends on i + j only, so it is a view with
    strides (1, 1) of a vector that is 0 over the window and -inf on either side of it.
    """

    def __init__(
        self,
        window: int | None,
        piece: int,
        max_keys: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.window = max_keys if window is None else window
        self.piece = piece
        self.vector = torch.full((self.window + 2 * piece,), -math.inf, dtype=dtype, device=device)
        self.vector[piece : piece + self.window] = 0

    def mask(self, offset: int, m: int) -> torch.Tensor:
        """[m, offset + m] for queries of which the first stands at key `offset`."""
        start = self.piece + self.window - (offset + m)
        mask = self.vector.as_strided((m, offset + m), (1, 1), start)
        return mask if mask.device.type == "cpu" else mask.contiguous()
