"""How does one layer's share of the KV cache lie in memory?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jubako.errors import ConfigError


@dataclass(frozen=True)
class PagedKV:
    """Typed views of one layer's pages.

    A page holds, for each KV head, a slab of B keys and then a slab of B values, each row D long:
    blocks, Hkv, {K, V}, B, D. A slab is contiguous, so that a kernel streams it.
    """

    pages: torch.Tensor
    """[blocks, Hkv, 2, B, D]; the stride of the blocks may exceed the page's own size."""
    slabs: torch.Tensor
    """[all slabs, B · D] over the same memory, padding between pages included."""
    rows: torch.Tensor
    """[all slabs · B, D] over the same memory."""
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
        slab_bytes = block_size * head_size * dtype.itemsize
        slabs_per_block, rest = divmod(page_bytes, slab_bytes)
        if rest or slabs_per_block < 2 * num_kv_heads:
            raise ConfigError(
                f"A KV page of {page_bytes} bytes does not fit {num_kv_heads} KV heads of "
                f"{block_size} tokens with {slab_bytes} bytes for the keys of one head; it needs a "
                f"multiple of those, at least {2 * num_kv_heads * slab_bytes}."
            )
        slabs = raw.view(dtype).view(num_blocks * slabs_per_block, block_size * head_size)
        pages = slabs.view(num_blocks, slabs_per_block, block_size, head_size)
        return cls(
            pages=pages[:, : 2 * num_kv_heads].unflatten(1, (num_kv_heads, 2)),
            slabs=slabs,
            rows=slabs.view(-1, head_size),
            slabs_per_block=slabs_per_block,
        )
