"""Command R7B and A (Cohere 2025, arXiv 2504.00698), and Aya of the same architecture.

Attention and MLP read the same norm and are added together. Layers with a window turn neighbouring
elements of a head; the others see everything and use no positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.kernels.cpu.recording import NativeRotation, Program, record
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import LayerNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding, Rotation
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel
from jubako.models.hf_config import (
    FULL,
    SLIDING,
    kv_heads,
    layer_types,
    rope_parameters,
    value,
)

_ONLY = {
    "use_qk_norm": False,
    "use_parallel_block": True,
    "use_gated_activation": True,
    "rotary_pct": 1.0,
}
"""Entries of checkpoints' config.json that have one value in all of them."""


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
    layer_norm_eps: float
    attention_bias: bool
    sliding_window: int
    layer_types: list[str]
    rope: RopeParameters
    logit_scale: float
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Cohere 2 model."""
        for name, only in _ONLY.items():
            if value(c, name, only) != only:
                raise UnsupportedModelError(
                    f"The model's config.json has {name} = {c[name]}; only {only} is supported."
                )
        hidden_size = value(c, "hidden_size", 8192)
        heads = value(c, "num_attention_heads", 64)
        num_layers = value(c, "num_hidden_layers", 40)
        pattern = value(c, "sliding_window_pattern", 4)
        default_types = [FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers)]
        return cls(
            vocab_size=value(c, "vocab_size", 256_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 22_528),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, heads),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            layer_norm_eps=value(c, "layer_norm_eps", 1e-5),
            attention_bias=value(c, "attention_bias", False),
            sliding_window=value(c, "sliding_window", 4096),
            layer_types=layer_types(c, num_layers, default_types),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 8192)),
            logit_scale=value(c, "logit_scale", 0.0625),
            tie_word_embeddings=value(c, "tie_word_embeddings", True),
        )


class Cohere2DecoderLayer(nn.Module):
    """Attention and MLP side by side, after one norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, layer: int, prefix: str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            bias=args.attention_bias,
            interleaved=True,
            sliding_window=args.sliding_window if args.layer_types[layer] == SLIDING else None,
        )
        self.mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        self.input_layernorm = LayerNorm(args.hidden_size, args.layer_norm_eps, bias=False)

    def forward(self, x: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        y = self.input_layernorm(x)
        return self.self_attn(y, rotation).add_(x).add_(self.mlp(y))

    def record(self, program: Program, rotation: NativeRotation | None) -> None:
        """As `forward` of the stream, in a program."""
        y = program.normed(self.input_layernorm.weights)
        record(self.self_attn, program, y, rotation, to_stream=True)
        record(self.mlp, program, y, to_stream=True)


class Cohere2ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                Cohere2DecoderLayer(args, config, i, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            LayerNorm(args.hidden_size, args.layer_norm_eps, bias=False),
            {
                SLIDING: RotaryEmbedding(
                    args.head_dim, args.rope, config.model_config.context_length
                )
            },
            args.layer_types,
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(
            model, LMHead(args.vocab_size, args.hidden_size, tied_to, scale=args.logit_scale)
        )
