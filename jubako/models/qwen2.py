"""Qwen2 and Qwen2.5 (Qwen Team 2024, arXiv 2407.10671).

Biases on the projections to queries, keys and values; late layers may have a sliding window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.layers.attention import Attention
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.linear import QKVParallelLinear, RowParallelLinear
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import QKRope, RopeParameters, RotaryEmbedding, Rotation
from jubako.models.decoder import DecoderForCausalLM, DecoderModel
from jubako.models.hf_config import SLIDING, late_window_layer_types, rope_parameters, value


@dataclass(frozen=True)
class ModelArgs:
    """config.json; what it leaves out has transformers' default."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    hidden_act: str
    rms_norm_eps: float
    sliding_window: int | None
    layer_types: list[str]
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Qwen2 model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        num_layers = value(c, "num_hidden_layers", 32)
        # A null for the KV heads means one for each query head.
        kv_heads = value(c, "num_key_value_heads", heads if "num_key_value_heads" in c else 32)
        window = value(c, "sliding_window", 4096) if c.get("use_sliding_window") else None
        return cls(
            vocab_size=value(c, "vocab_size", 151_936),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 22_016),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads,
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6),
            sliding_window=window,
            layer_types=late_window_layer_types(c, num_layers, window),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 32_768)),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class Qwen2Attention(nn.Module):
    """Attention of one layer."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        heads, kv_heads, head_dim = (
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
        )
        self.qkv_proj = QKVParallelLinear(args.hidden_size, head_dim, heads, kv_heads, bias=True)
        self.qk_rope = QKRope()
        self.attn = Attention(
            heads,
            head_dim,
            head_dim**-0.5,
            kv_heads,
            config=config,
            layer_name=f"{prefix}.attn",
            sliding_window=args.sliding_window if args.layer_types[layer] == SLIDING else None,
        )
        self.o_proj = RowParallelLinear(heads * head_dim, args.hidden_size)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        qk, v = self.qkv_proj(x)
        qk = self.qk_rope(qk, rotation)
        q, k = qk.split((self.attn.num_heads, self.attn.num_kv_heads), dim=1)
        return self.o_proj(self.attn(q, k, v))


class Qwen2DecoderLayer(nn.Module):
    """Attention and MLP, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        self.self_attn = Qwen2Attention(args, config, layer, f"{prefix}.self_attn")
        self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        x = self.self_attn(self.input_layernorm(x), rotation).add_(x)
        return self.mlp(self.post_attention_layernorm(x)).add_(x)


class Qwen2ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                Qwen2DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))
