"""How does a layer attend through latents (multi-head latent attention, DeepSeek-AI 2024)?"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.paged_latent import PagedLatent
from jubako.kernels.registry import get_kernels
from jubako.kv_cache.specs import KVCacheSpec, MLAAttentionSpec
from jubako.layers.cache import model_kv_dtype
from jubako.layers.forward_context import get_forward_context
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


class MLAAttention(nn.Module):
    """Causal attention of which the paged cache keeps one latent and one rotated key a token.

    It owns `kv_b_proj`, which makes the heads' keys and values of a latent, because attention may
    absorb it. Sizes: `nope_size` (P) of keys without position, `rope_size` (R) of the rotated key
    that all heads share, `value_size` (V), `latent_size` (L). `scale` multiplies q·k. `layer_name`
    is unique in the model.
    """

    def __init__(
        self,
        num_heads: int,
        *,
        nope_size: int,
        rope_size: int,
        value_size: int,
        latent_size: int,
        scale: float,
        config: JubakoConfig,
        layer_name: str,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.nope_size = nope_size
        self.rope_size = rope_size
        self.value_size = value_size
        self.latent_size = latent_size
        self.scale = scale
        self.layer_name = layer_name
        self.kv_dtype = model_kv_dtype(config, "latent attention")
        self.up = parameter(num_heads * (nope_size + value_size), latent_size)
        self.kernels = get_kernels()
        self.kv: PagedLatent | None = None

    def get_kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What the layer keeps in blocks of `block_size` tokens."""
        return MLAAttentionSpec(
            block_size=block_size,
            num_kv_heads=1,
            head_size=self.latent_size + self.rope_size,
            dtype=self.kv_dtype,
        )

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int | None = None) -> None:
        """Use `raw`, [blocks, page bytes] int8, as this layer's pages.

        `block_size` is in tokens; it is needed only where pages are padded.
        """
        dtype: torch.dtype = getattr(torch, self.kv_dtype)
        if block_size is None:
            row_bytes = (self.latent_size + self.rope_size) * dtype.itemsize
            block_size = raw.shape[1] // row_bytes
        self.kv = PagedLatent.from_raw(
            raw,
            block_size=block_size,
            latent_size=self.latent_size,
            rope_size=self.rope_size,
            dtype=dtype,
        )

    def forward(
        self, query: torch.Tensor, latent: torch.Tensor, key_rope: torch.Tensor
    ) -> torch.Tensor:
        """query [T, H, P + R], normalised latent [T, L], key_rope [T, R] → [T, H · V].

        The last R of query and key_rope are rotated. Latent and key go into the cache first.
        """
        attn_metadata = get_forward_context().attn_metadata
        if attn_metadata is None:
            return query.new_zeros(query.shape[0], self.num_heads * self.value_size)
        assert self.kv is not None, "bind_kv_cache() comes before the first step"
        metadata = attn_metadata[self.layer_name]
        self.kernels.concat_and_cache_mla(latent, key_rope, self.kv, metadata)
        up = self.up.unflatten(0, (self.num_heads, -1))
        out = self.kernels.mla_attention(query, self.kv, up, metadata, scale=self.scale)
        return out.flatten(1)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`kv_b_proj.weight`."""
        del name
        yield "kv_b_proj.weight", whole_parameter(self.up)
