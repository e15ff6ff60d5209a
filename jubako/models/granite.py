"""Granite 3 (IBM 2024): Llama with multipliers.

Embeddings, scores, what each half of a block adds, and logits are multiplied by constants.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.kernels.cpu.recording import NativeRotation, Program, record
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import RopeParameters, RotaryEmbedding, Rotation
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import DecoderForCausalLM, DecoderModel
from jubako.models.hf_config import kv_heads, rope_parameters, value


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
    attention_bias: bool
    mlp_bias: bool
    embedding_multiplier: float
    attention_multiplier: float
    residual_multiplier: float
    logits_scaling: float
    """Logits are divided by it."""
    rope: RopeParameters
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, c: Mapping[str, Any]) -> ModelArgs:
        """Of a Granite model."""
        hidden_size = value(c, "hidden_size", 4096)
        heads = value(c, "num_attention_heads", 32)
        return cls(
            vocab_size=value(c, "vocab_size", 32_000),
            hidden_size=hidden_size,
            intermediate_size=value(c, "intermediate_size", 11_008),
            num_hidden_layers=value(c, "num_hidden_layers", 32),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, heads),
            head_dim=value(c, "head_dim", hidden_size // heads),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6),
            attention_bias=value(c, "attention_bias", False),
            mlp_bias=value(c, "mlp_bias", False),
            embedding_multiplier=value(c, "embedding_multiplier", 1.0),
            attention_multiplier=value(c, "attention_multiplier", 1.0),
            residual_multiplier=value(c, "residual_multiplier", 1.0),
            logits_scaling=value(c, "logits_scaling", 1.0),
            rope=rope_parameters(c, value(c, "max_position_embeddings", 2048)),
            tie_word_embeddings=value(c, "tie_word_embeddings", False),
        )


class GraniteDecoderLayer(nn.Module):
    """Attention and MLP, each after a norm, and a multiple of each added."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        super().__init__()
        self.self_attn = SelfAttention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            scale=args.attention_multiplier,
            bias=args.attention_bias,
        )
        self.mlp = GatedMLP(
            args.hidden_size, args.intermediate_size, args.hidden_act, args.mlp_bias
        )
        self.input_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(args.hidden_size, args.rms_norm_eps)
        self.residual_multiplier = args.residual_multiplier

    def forward(self, x: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        multiplier = self.residual_multiplier
        x = x.add(self.self_attn(self.input_layernorm(x), rotation), alpha=multiplier)
        return x.add(self.mlp(self.post_attention_layernorm(x)), alpha=multiplier)

    def record(self, program: Program, rotation: NativeRotation | None) -> None:
        """As `forward` of the stream, in a program."""
        attended = record(
            self.self_attn, program, program.normed(self.input_layernorm.weights), rotation
        )
        program.add(attended, scale=self.residual_multiplier)
        out = record(self.mlp, program, program.normed(self.post_attention_layernorm.weights))
        program.add(out, scale=self.residual_multiplier)


class GraniteForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        model = DecoderModel(
            embed_tokens,
            [
                GraniteDecoderLayer(args, config, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length),
            embed_scale=args.embedding_multiplier,
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(
            model,
            LMHead(args.vocab_size, args.hidden_size, tied_to, scale=1 / args.logits_scaling),
        )
