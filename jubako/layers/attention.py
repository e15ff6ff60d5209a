"""How does a layer attend to the tokens of its request?"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import ConfigError
from jubako.kernels.cpu.recording import AttentionShape
from jubako.kernels.paged_kv import PagedKV, scale_bytes
from jubako.kernels.registry import get_kernels
from jubako.kv_cache.specs import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)
from jubako.layers.cache import kv_dtype, model_kv_dtype
from jubako.layers.forward_context import get_forward_context
from jubako.layers.weights import WeightTarget, parameter, whole_parameter


class Attention(nn.Module):
    """Causal attention with grouped query heads over a paged KV cache.

    `scale` multiplies q·k. `sliding_window` is how many keys a query sees, itself included; with
    `attention_chunk_size` it sees those of its own chunk of positions. With `sink_logits` each head
    has a learned addition to its softmax's denominator, the checkpoint's tensor `sinks` [Hq] beside
    the layer. With `sink_len` that many learned keys and values, `sink_key` and `sink_value`
    [sink_len, Hkv, D] beside the layer, stand before position 0 of every request; keys are used as
    they are, without a rotation.
    `layer_name` is unique in the model: the KV cache and the step's metadata know the layer by it.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int,
        *,
        config: JubakoConfig,
        layer_name: str,
        sliding_window: int | None = None,
        logits_soft_cap: float | None = None,
        attention_chunk_size: int | None = None,
        sink_logits: bool = False,
        sink_len: int = 0,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ConfigError(
                f"{num_heads} query heads cannot be divided among {num_kv_heads} KV heads."
            )
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = scale
        self.num_kv_heads = num_kv_heads
        self.layer_name = layer_name
        self.sliding_window = sliding_window
        self.logits_soft_cap = logits_soft_cap
        self.attention_chunk_size = attention_chunk_size
        self.sinks = parameter(num_heads) if sink_logits else None
        self.sink_len = sink_len
        if sink_len:
            if sliding_window is not None or attention_chunk_size is not None:
                raise ConfigError("Only layers that see everything can have sink tokens.")
            self.sink_key = parameter(sink_len, num_kv_heads, head_size)
            self.sink_value = parameter(sink_len, num_kv_heads, head_size)
        self.kv_dtype = (
            model_kv_dtype(config, "layers with sink tokens") if sink_len else kv_dtype(config)
        )
        self.kernels = get_kernels()
        self.kv: PagedKV | None = None

    def get_kv_cache_spec(self, block_size: int) -> KVCacheSpec:
        """What the layer keeps in blocks of `block_size` tokens."""
        shape: dict[str, Any] = {
            "block_size": block_size,
            "num_kv_heads": self.num_kv_heads,
            "head_size": self.head_size,
            "dtype": self.kv_dtype,
            "scale_bytes": scale_bytes(getattr(torch, self.kv_dtype)),
        }
        if self.sliding_window is not None:
            return SlidingWindowSpec(**shape, sliding_window=self.sliding_window)
        if self.attention_chunk_size is not None:
            return ChunkedLocalAttentionSpec(
                **shape, attention_chunk_size=self.attention_chunk_size
            )
        if self.sink_len:
            return SinkFullAttentionSpec(**shape, sink_len=self.sink_len)
        return FullAttentionSpec(**shape)

    def bind_kv_cache(self, raw: torch.Tensor, block_size: int | None = None) -> None:
        """Use `raw`, [blocks, page bytes] int8, as this layer's pages.

        `block_size` is in tokens; it is needed only where pages are padded.
        """
        dtype: torch.dtype = getattr(torch, self.kv_dtype)
        if block_size is None:
            row = self.head_size * dtype.itemsize + scale_bytes(dtype)
            block_size = raw.shape[1] // (2 * self.num_kv_heads * row)
        self.kv = PagedKV.from_raw(
            raw,
            num_kv_heads=self.num_kv_heads,
            block_size=block_size,
            head_size=self.head_size,
            dtype=dtype,
        )

    @property
    def shape(self) -> AttentionShape:
        """What a program needs to attend."""
        return AttentionShape(
            self.layer_name,
            self.num_heads,
            self.num_kv_heads,
            self.head_size,
            self.scale,
            self.sliding_window,
            self.logits_soft_cap,
            self.attention_chunk_size,
            self.sinks,
        )

    def write_sinks(self, block_ids: torch.Tensor) -> None:
        """Write the sink tokens into pages `block_ids`, [sink_len / block size] int64."""
        assert self.kv is not None, "bind_kv_cache() comes first"
        for kind, sink in enumerate((self.sink_key, self.sink_value)):
            blocks = sink.unflatten(0, (len(block_ids), self.kv.block_size)).transpose(1, 2)
            self.kv.pages[block_ids.to(sink.device), :, kind] = blocks

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """q [T, Hq, D], k and v [T, Hkv, D] → [T, Hq · D]; k and v go into the cache first."""
        attn_metadata = get_forward_context().attn_metadata
        if attn_metadata is None:
            return q.new_zeros(q.shape[0], self.num_heads * self.head_size)
        assert self.kv is not None, "bind_kv_cache() comes before the first step"
        metadata = attn_metadata[self.layer_name]
        self.kernels.reshape_and_cache(k, v, self.kv, metadata)
        out = self.kernels.paged_attention(
            q,
            k,
            v,
            self.kv,
            metadata,
            scale=self.scale,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            attention_chunk_size=self.attention_chunk_size,
            sinks=self.sinks,
        )
        return out.flatten(1)

    def weight_targets(self, name: str) -> Iterator[tuple[str, WeightTarget]]:
        """`sinks`, `sink_key` and `sink_value`, if it has them."""
        del name
        if self.sinks is not None:
            yield "sinks", whole_parameter(self.sinks)
        if self.sink_len:
            yield "sink_key", whole_parameter(self.sink_key)
            yield "sink_value", whole_parameter(self.sink_value)
