"""How does a layer attend in both directions, when no token comes later?"""

from __future__ import annotations

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.registry import get_kernels
from jubako.kv_cache.specs import EncoderOnlyAttentionSpec
from jubako.layers.forward_context import get_forward_context


class EncoderOnlyAttention(nn.Module):
    """Attention of every token to its whole request. Nothing is kept: a step has whole requests.

    `scale` multiplies q·k. The step's metadata knows the layer by `layer_name`.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        *,
        config: JubakoConfig,
        layer_name: str,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.layer_name = layer_name
        self.dtype = config.model_config.dtype
        self.kernels = get_kernels()

    def get_kv_cache_spec(self, block_size: int) -> EncoderOnlyAttentionSpec:
        """A spec that takes no memory and joins no group."""
        return EncoderOnlyAttentionSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
        )

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int) -> None:
        """Never called: the layer has no pages."""
        raise AssertionError(f"{self.layer_name} keeps no KV")

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] → [T, Hq · D]."""
        attn_metadata = get_forward_context().attn_metadata
        if attn_metadata is None:
            return q.new_zeros(q.shape[0], self.num_heads * self.head_size)
        metadata = attn_metadata[self.layer_name]
        out = self.kernels.encoder_attention(q, k, v, metadata, scale=self.scale)
        return out.flatten(1)
