"""How does a decoder attend to what the encoder made of its request's input?"""

from __future__ import annotations

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.paged_kv import PagedKV
from jubako.kernels.registry import get_kernels
from jubako.kv_cache.specs import CrossAttentionSpec
from jubako.layers.cache import model_kv_dtype
from jubako.layers.forward_context import get_forward_context


class CrossAttention(nn.Module):
    """Attention of every token to all encoder outputs of its request, over a paged KV cache.

    Keys and values are written in the step that runs the request's encoder, and only read later.
    `scale` multiplies q·k. `layer_name` is unique in the model: the KV cache and the step's
    metadata know the layer by it. Of that metadata `seq_lens` are lengths of encoder outputs, and
    `slot_mapping` says where those go that are new in the step.
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
        self.kv_dtype = model_kv_dtype(config, "attention to an encoder's output")
        self.kernels = get_kernels()
        self.kv: PagedKV | None = None

    def get_kv_cache_spec(self, block_size: int) -> CrossAttentionSpec:
        """What the layer keeps in blocks of `block_size` tokens."""
        return CrossAttentionSpec(
            block_size=block_size,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.kv_dtype,
        )

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int) -> None:
        """Use `raw`, [blocks, page bytes] int8, as this layer's pages of `block_size` tokens."""
        self.kv = PagedKV.from_raw(
            raw,
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_size=self.head_size,
            dtype=getattr(torch, self.kv_dtype),
        )

    def forward(
        self, q: torch.Tensor, k: torch.Tensor | None = None, v: torch.Tensor | None = None
    ) -> torch.Tensor:
        """q [T, Hq, D] → [T, Hq · D]; k and v [E, Hkv, D] of the step's new encoder outputs.

        None of them is new where these are None.
        """
        attn_metadata = get_forward_context().attn_metadata
        if attn_metadata is None:
            return q.new_zeros(q.shape[0], self.num_heads * self.head_size)
        assert self.kv is not None, "bind_kv_cache() comes before the first step"
        metadata = attn_metadata[self.layer_name]
        if k is not None and v is not None:
            self.kernels.reshape_and_cache(k, v, self.kv, metadata)
        out = self.kernels.paged_attention(q, q, q, self.kv, metadata, scale=self.scale)
        return out.flatten(1)
