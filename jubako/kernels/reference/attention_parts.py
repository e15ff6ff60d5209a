"""How does the reference attend to a context part by part?

Each part of the keys is attended by itself, with its own softmax. Two results are merged by the
log-sum-exp of their scores: a part weighs as much as its share of the whole softmax's denominator.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F


def attend_part(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, scale: float, position: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """q [H, M, D] over k [H, C, D] and v [H, C, V] → [H, M, V], log-sum-exps [H, M, 1] float32.

    Query i sees the keys up to number `position + i` of the part, of which there must be one.
    """
    M, C = q.shape[1], k.shape[1]
    unseen = None
    if position < C - 1:
        key = torch.arange(C, device=q.device)
        unseen = key > torch.arange(position, position + M, device=q.device)[:, None]
    if q.device.type == "cpu":
        return _streamed(q, k, v, scale, unseen)
    return _in_float32(q, k, v, scale, unseen)


def _streamed(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, unseen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """PyTorch's kernel for CPUs, which wants heads of one size."""
    size = max(q.shape[2], v.shape[2])
    mask = None
    if unseen is not None:
        mask = torch.zeros(unseen.shape, dtype=q.dtype).masked_fill_(unseen, -math.inf)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *(F.pad(x, (0, size - x.shape[2]))[None] for x in (q, k, v)), attn_mask=mask, scale=scale
    )
    return out[0, :, :, : v.shape[2]], lse[0, :, :, None]


def _in_float32(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, unseen: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    scores = torch.bmm(q.float(), k.float().transpose(1, 2)).mul_(scale)
    if unseen is not None:
        scores.masked_fill_(unseen, -math.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return torch.bmm(scores.sub_(lse).exp_(), v.float()), lse


class MergedParts:
    """The attention of `queries` queries of `heads` heads over the parts added so far."""

    def __init__(self, heads: int, queries: int, size: int, device: torch.device) -> None:
        self.out = torch.zeros(heads, queries, size, dtype=torch.float32, device=device)
        """[H, M, V]"""
        self._lse = torch.full((heads, queries, 1), -math.inf, dtype=torch.float32, device=device)

    def add(self, start: int, end: int, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Merge in what queries `start` up to `end` get from a part, as `attend_part` gives it."""
        total = self._lse[:, start:end]
        merged = torch.logaddexp(total, lse)
        self.out[:, start:end].mul_((total - merged).exp_()).addcmul_(out, (lse - merged).exp_())
        total.copy_(merged)
