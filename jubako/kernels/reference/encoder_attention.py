"""How do the tokens of a prompt attend to each other in both directions, without a cache?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from jubako.kernels.metadata import AttentionMetadata

PADDING_SHARE = 4
"""Rows are attended together whose lengths, rounded up to a quarter of a power of two, are equal:
at most a fifth of the work is for padding, and there are few groups."""

GROUP_TOKENS = 1 << 14
"""Most tokens of a group, padding included, so that its copies stay small beside the model."""

_PLAN = "encoder_attention"


@dataclass(frozen=True)
class _Group:
    """Rows of similar length."""

    num_rows: int
    tokens: torch.Tensor
    """[n · L] int64: the step's tokens, each row padded with its last one."""
    real: torch.Tensor | None
    """[n · L] bool: what is no padding; None if nothing is."""

    def mask(self) -> torch.Tensor | None:
        """[n, 1, 1, L] bool: keys to look at."""
        return None if self.real is None else self.real.view(self.num_rows, 1, 1, -1)


def encoder_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
) -> torch.Tensor:
    """Every token attends to all tokens of its request in this step → [T, Hq, D]."""
    groups = metadata.plans.get(_PLAN)
    if groups is None:
        groups = metadata.plans[_PLAN] = _groups(metadata.query_start_loc_cpu, query.device)
    out = torch.empty_like(query, memory_format=torch.contiguous_format)
    for group in groups:
        attended = F.scaled_dot_product_attention(
            _rows(query, group),
            _rows(key, group),
            _rows(value, group),
            attn_mask=group.mask(),
            scale=scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        flat = attended.transpose(1, 2).flatten(0, 1)
        if group.real is None:
            out[group.tokens] = flat
        else:
            out[group.tokens[group.real]] = flat[group.real]
    return out


def _rows(x: torch.Tensor, group: _Group) -> torch.Tensor:
    """x [T, H, D] → [n, H, L, D]."""
    return x[group.tokens].unflatten(0, (group.num_rows, -1)).transpose(1, 2)


def _groups(query_start_loc: np.ndarray, device: torch.device) -> list[_Group]:
    starts, lengths = query_start_loc[:-1].astype(np.int64), np.diff(query_start_loc)
    alike: dict[int, list[int]] = {}
    for row in np.argsort(lengths, kind="stable").tolist():
        if lengths[row]:
            alike.setdefault(_rounded_up(int(lengths[row])), []).append(row)
    groups = []
    for rounded, rows in alike.items():
        most = max(1, GROUP_TOKENS // rounded)
        for first in range(0, len(rows), most):
            part = np.array(rows[first : first + most])
            groups.append(_group(starts[part], lengths[part], device))
    return groups


def _rounded_up(length: int) -> int:
    step = max(1, (1 << (length.bit_length() - 1)) // PADDING_SHARE)
    return -(-length // step) * step


def _group(starts: np.ndarray, lengths: np.ndarray, device: torch.device) -> _Group:
    offsets = np.arange(int(lengths.max()))
    tokens = starts[:, None] + np.minimum(offsets, lengths[:, None] - 1)
    real = offsets < lengths[:, None]
    return _Group(
        len(starts),
        torch.from_numpy(tokens.ravel()).to(device),
        None if real.all() else torch.from_numpy(real.ravel()).to(device),
    )
