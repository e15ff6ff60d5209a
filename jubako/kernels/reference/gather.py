"""How does the reference bring the blocks of a few rows together?"""

from __future__ import annotations

import threading

import torch

from jubako.kernels.paged_kv import PagedKV

WORKSPACE_BYTES = 16 << 20
"""Gathers up to this size share one buffer, whose pages are touched already."""


class _Workspaces(threading.local):
    # Two engines in one process may step at the same time, each in its own thread.
    def __init__(self) -> None:
        self.by_place: dict[tuple[torch.device, torch.dtype], torch.Tensor] = {}


_workspaces = _Workspaces()


def slab_indices(table: torch.Tensor, kv: PagedKV) -> torch.Tensor:
    """Indices into `kv.slabs` of the blocks in `table` [n, b] int64 → [2 · n · Hkv · b].

    Keys of all rows come first, then values; within a row the blocks of a head are adjacent.
    """
    heads = torch.arange(kv.num_kv_heads, device=table.device).mul_(2)
    keys = table[:, None, :] * kv.slabs_per_block + heads[:, None]
    return torch.stack((keys, keys + 1)).flatten()


def gather_slabs(
    kv: PagedKV,
    slabs: torch.Tensor,
    num_rows: int,
    cleared: torch.Tensor | None,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, Hkv, b · B, D] of `dtype` of the slabs that `slab_indices` named.

    `cleared` are rows of the result, keys and values counted through, that become zero. The result
    is only good until the thread's next call.
    """
    count, width = len(slabs), kv.slabs.shape[1]
    if count * width * kv.slabs.itemsize <= WORKSPACE_BYTES:
        out = _workspace(kv)[: count * width].view(count, width)
        torch.index_select(kv.slabs, 0, slabs, out=out)
    else:
        out = kv.slabs.index_select(0, slabs)
    if kv.scales is not None:
        out = _unscaled(kv, out)
    if out.dtype != dtype:
        out = out.to(dtype)
    if cleared is not None:
        out.view(-1, kv.head_size).index_fill_(0, cleared, 0)
    both = out.view(2, num_rows, kv.num_kv_heads, -1, kv.head_size)
    return both[0], both[1]


def _unscaled(kv: PagedKV, slabs: torch.Tensor) -> torch.Tensor:
    """Slabs with scales [s, B · D + 4 · B] int8 → [s, B · D] float32."""
    size = kv.block_size * kv.head_size
    elements = slabs[:, :size].contiguous().view(kv.pages.dtype).float()
    scales = slabs[:, size:].contiguous().view(torch.float32)
    return (elements.unflatten(1, (kv.block_size, -1)) * scales[..., None]).flatten(1)


def _workspace(kv: PagedKV) -> torch.Tensor:
    place = (kv.slabs.device, kv.slabs.dtype)
    workspaces = _workspaces.by_place
    if place not in workspaces:
        size = WORKSPACE_BYTES // kv.slabs.itemsize
        # A tensor made in inference mode could not be written to outside of it.
        with torch.inference_mode(False):
            workspaces[place] = torch.empty(size, dtype=kv.slabs.dtype, device=kv.slabs.device)
    return workspaces[place]
