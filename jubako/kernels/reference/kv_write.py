"""How does the reference write keys and values into the pages?"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from jubako.kernels.metadata import AttentionMetadata
from jubako.kernels.paged_kv import LARGEST, PagedKV


class _WritePlan(NamedTuple):
    tokens: torch.Tensor | None
    """[N] int64, the tokens to write; None: the first `num_tokens`."""
    num_tokens: int
    slabs: torch.Tensor
    """[N · Hkv] int64, of keys; those of values follow them."""
    offsets: torch.Tensor
    """[N · Hkv] int64 within a slab."""


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
    offsets = np.repeat(offset, kv.num_kv_heads)
    return _WritePlan(
        tokens,
        num_tokens,
        torch.from_numpy(slab.ravel()).to(device),
        torch.from_numpy(offsets).to(device),
    )


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, kv: PagedKV, metadata: AttentionMetadata
) -> None:
    """Write key and value [T, Hkv, D] at the step's slots; see `Kernels.reshape_and_cache`."""
    geometry = ("write", kv.num_kv_heads, kv.block_size, kv.slabs_per_block)
    plan: _WritePlan | None = metadata.plans.get(geometry)
    if plan is None:
        plan = metadata.plans[geometry] = _plan(kv, metadata, key.device)
    into = kv.rows
    for source, slabs in ((key, plan.slabs), (value, plan.slabs + 1)):
        chosen = source[: plan.num_tokens] if plan.tokens is None else source[plan.tokens]
        chosen = chosen.reshape(-1, kv.head_size)
        if kv.scales is not None:
            chosen, scales = _scaled(chosen, into.dtype)
            kv.scales[slabs, plan.offsets] = scales
        if into.dtype == torch.float8_e4m3fn:
            # Not all that PyTorch does takes this dtype.
            into.view(torch.int8)[slabs, plan.offsets] = chosen.to(into.dtype).view(torch.int8)
        else:
            into[slabs, plan.offsets] = chosen.to(into.dtype)


def _scaled(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows [N, D] as numbers that `dtype` rounds to its own, and their scales [N] float32."""
    x = x.float()
    largest = x.abs().amax(-1)
    # A number over a tensor would be rounded twice.
    inverse = torch.where(largest > 0, largest.new_tensor(LARGEST[dtype]) / largest, 0.0)
    scaled = x * inverse[:, None]
    return scaled.round() if dtype == torch.int8 else scaled, largest / LARGEST[dtype]
