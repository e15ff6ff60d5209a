"""How does the reference write keys and values into the pages?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import PagedKV


class _WritePlan(NamedTuple):
    tokens: torch.Tensor | None
    """[N] int64, the tokens to write; None: the first `num_tokens`."""
    num_tokens: int
    key_rows: torch.Tensor
    """[N · Hkv] int64 into `PagedKV.rows`."""
    value_rows: torch.Tensor


def _plan(kv: PagedKV, metadata: AttentionMetadata, device: torch.device) -> _WritePlan:
    slots = metadata.slot_mapping_cpu
    if slots is None:
        slots = metadata.slot_mapping.cpu().numpy()
    num_tokens = len(slots)
    tokens = None
    if num_tokens and slots.min() < 0:
        written = np.flatnonzero(slots >= 0)
        tokens = torch.from_numpy(written).to(device)
        slots = slots[written]
    B = kv.block_size
    block, offset = np.divmod(slots.astype(np.int64), B)
    slab = block[:, None] * kv.slabs_per_block + 2 * np.arange(kv.num_kv_heads)
    key_rows = (slab * B + offset[:, None]).ravel()
    return _WritePlan(
        tokens,
        num_tokens,
        torch.from_numpy(key_rows).to(device),
        torch.from_numpy(key_rows + B).to(device),
    )


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv: PagedKV, metadata: AttentionMetadata
) -> None:
    """Write key and value [T, Hkv, D] at the step's slots; see `Kernels.reshape_and_cache`."""
    geometry = ("write", kv.num_kv_heads, kv.block_size, kv.slabs_per_block)
    plan: _WritePlan | None = metadata.plans.get(geometry)
    if plan is None:
        plan = metadata.plans[geometry] = _plan(kv, metadata, key.device)
    for source, rows in ((key, plan.key_rows), (value, plan.value_rows)):
        chosen = source[: plan.num_tokens] if plan.tokens is None else source[plan.tokens]
        kv.rows.index_copy_(0, rows, chosen.reshape(-1, kv.head_size).to(kv.rows.dtype))
