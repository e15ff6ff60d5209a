"""How does one layer's share of the KV cache lie in memory?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jubako.errors import ConfigError

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Dtypes that keep a scale for each key and value, and what they store for its largest element."""


def scale_bytes(dtype: torch.dtype) -> int:
    """Bytes of the scale beside each key and value of `dtype`."""
    return 4 if dtype in LARGEST else 0


@dataclass(frozen=True)
class PagedKV:
    """Typed views of one layer's pages.

    A page holds, for each KV head, a slab of B keys and then a slab of B values, each row D long:
    blocks, Hkv, {K, V}, B, D. A slab is contiguous, so that a kernel streams it. With a dtype of
    `LARGEST`, B float32 follow the rows of a slab: what the elements of each are multiplied by.
    """

    pages: torch.Tensor
    """[blocks, Hkv, 2, B, D]; the stride of the blocks may exceed the page's own size."""
    slabs: torch.Tensor
    """[all slabs, B · D] over the same memory, padding between pages included; with scales
    [all slabs, B · D + 4 · B] int8."""
    scales: torch.Tensor | None
    """[all slabs, B] float32 over the same memory; None where there are none."""
    slabs_per_block: int
    """Distance of two blocks in `slabs`; at least 2 · Hkv."""

    @property
    def num_kv_heads(self) -> int:
        """KV heads on this rank, Hkv."""
        return self.pages.shape[1]

    @property
    def block_size(self) -> int:
        """Tokens per block, B."""
        return self.pages.shape[3]

    @property
    def head_size(self) -> int:
        """Length of a key and of a value, D."""
        return self.pages.shape[4]

    @classmethod
    def from_raw(
        cls,
        raw: torch.Tensor,
        *,
        num_kv_heads: int,
        block_size: int,
        head_size: int,
        dtype: torch.dtype,
    ) -> PagedKV:
        """View `raw`, [blocks, page bytes] int8 and contiguous, as pages of `dtype`.

        Raises ConfigError when a page is too small, or not a whole number of slabs.
        """
        num_blocks, page_bytes = raw.shape
        data_bytes = block_size * head_size * dtype.itemsize
        slab_bytes = data_bytes + block_size * scale_bytes(dtype)
        if dtype in LARGEST and data_bytes % 4:
            raise ConfigError(
                f"KV of {head_size} elements a head and {block_size} tokens a block leaves no "
                f"aligned place for scales; use kv_cache_dtype=auto, or a block size of whole 4."
            )
        slabs_per_block, rest = divmod(page_bytes, slab_bytes)
        if rest or slabs_per_block < 2 * num_kv_heads:
            raise ConfigError(
                f"A KV page of {page_bytes} bytes does not fit {num_kv_heads} KV heads of "
                f"{block_size} tokens with {slab_bytes} bytes for the keys of one head; it needs a "
                f"multiple of those, at least {2 * num_kv_heads * slab_bytes}."
            )
        whole = raw.view(num_blocks * slabs_per_block, slab_bytes)
        rows = whole[:, :data_bytes].view(dtype).unflatten(1, (block_size, head_size))
        pages = rows.unflatten(0, (num_blocks, slabs_per_block))
        return cls(
            pages=pages[:, : 2 * num_kv_heads].unflatten(1, (num_kv_heads, 2)),
            slabs=whole if dtype in LARGEST else whole.view(dtype),
            scales=whole[:, data_bytes:].view(torch.float32) if dtype in LARGEST else None,
            slabs_per_block=slabs_per_block,
        )

    @property
    def rows(self) -> torch.Tensor:
        """[all slabs, B, D] over the same memory."""
        shape = (len(self.slabs), self.block_size, self.head_size)
        stride = (self.slabs.stride(0) * self.slabs.itemsize // self.pages.itemsize,)
        return self.pages.as_strided(shape, (*stride, self.head_size, 1))
