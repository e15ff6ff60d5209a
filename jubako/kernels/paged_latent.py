"""How do the latents of multi-head latent attention lie in memory?"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from jubako.errors import ConfigError


@dataclass(frozen=True)
class PagedLatent:
    """A typed view of one layer's pages.

    A page holds one row for each of its B tokens: the normalised latent, of which keys and values
    of all heads are made, and then the rotated part of the key that all heads share.
    """

    pages: torch.Tensor
    """[blocks, B, latent size + rope size]; the stride of the blocks may exceed the page's size."""
    latent_size: int
    """Elements of the latent; the rest of a row is the rotated key."""

    @property
    def block_size(self) -> int:
        """Tokens per block, B."""
        return self.pages.shape[1]

    @property
    def row_size(self) -> int:
        """Elements of a row."""
        return self.pages.shape[2]

    @classmethod
    def from_raw(
        cls,
        raw: torch.Tensor,
        *,
        block_size: int,
        latent_size: int,
        rope_size: int,
        dtype: torch.dtype,
    ) -> PagedLatent:
        """View `raw`, [blocks, page bytes] int8 and contiguous, as pages of `dtype`.

        Raises ConfigError when a page is too small, or not a whole number of elements.
        """
        row_size = latent_size + rope_size
        page_bytes, needed = raw.shape[1], block_size * row_size * dtype.itemsize
        if page_bytes < needed or page_bytes % dtype.itemsize:
            raise ConfigError(
                f"A KV page of {page_bytes} bytes does not fit {block_size} tokens with a latent "
                f"of {latent_size} and a rotated key of {rope_size} elements; it needs {needed} "
                f"bytes or more, a multiple of {dtype.itemsize}."
            )
        elements = raw.view(dtype)[:, : block_size * row_size]
        return cls(elements.unflatten(1, (block_size, row_size)), latent_size)
