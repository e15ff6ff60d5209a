"""Ministral 3 (Mistral AI 2025), and the text part of Mistral 3.

Mistral whose queries grow with the logarithm of their position, once it is beyond what the model
was first trained for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from jubako.config import JubakoConfig
from jubako.errors import UnsupportedModelError
from jubako.kernels.cpu.recording import NativeRotation, Program, Rows, require_kind
from jubako.layers.attention import Attention
from jubako.layers.embedding import LMHead, VocabEmbedding
from jubako.layers.mlp import GatedMLP
from jubako.layers.norm import RMSNorm
from jubako.layers.rotary import QKRope, RopeParameters, RotaryEmbedding, Rotation
from jubako.layers.self_attention import SelfAttention
from jubako.models.decoder import EVERY, DecoderForCausalLM, DecoderModel, PreNormLayer
from jubako.models.hf_config import (
    integer_or_none,
    kv_heads,
    mapping,
    number_or_none,
    rope_parameters,
    value,
)
from jubako.models.weights import text_part

DEFAULT_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    "llama_4_scaling_beta": 0.1,
}
"""Of a configuration without rotary parameters."""


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
    rope: RopeParameters
    query_growth: float | None
    """What a query gains with each e-fold of its position."""
    tie_word_embeddings: bool

    @classmethod
    def from_config(cls, hf_config: Mapping[str, Any]) -> ModelArgs:
        """Of a text model, or of the text part of a multimodal one."""
        tied = value(hf_config, "tie_word_embeddings", False)
        c = mapping(hf_config, "text_config") or hf_config
        kind = value(c, "model_type", "ministral3")
        if kind not in ("ministral3", "mistral"):
            raise UnsupportedModelError(
                f"The text part of the model has model_type {kind!r}; "
                "known here are ministral3 and mistral."
            )
        older = kind == "mistral"
        heads = value(c, "num_attention_heads", 32)
        length = value(c, "max_position_embeddings", 131_072 if older else 262_144)
        if not older and not mapping(c, "rope_parameters") and not mapping(c, "rope_scaling"):
            c = {**c, "rope_parameters": {**DEFAULT_ROPE, "max_position_embeddings": length}}
        rope = rope_parameters(c, length)
        window = integer_or_none({"sliding_window": 4096, **c} if older else c, "sliding_window")
        return cls(
            vocab_size=value(c, "vocab_size", 32_000 if older else 131_072),
            hidden_size=value(c, "hidden_size", 4096),
            intermediate_size=value(c, "intermediate_size", 14_336),
            num_hidden_layers=value(c, "num_hidden_layers", 32 if older else 34),
            num_attention_heads=heads,
            num_key_value_heads=kv_heads(c, heads, 8),
            head_dim=value(c, "head_dim", 128),
            hidden_act=value(c, "hidden_act", "silu"),
            rms_norm_eps=value(c, "rms_norm_eps", 1e-6 if older else 1e-5),
            sliding_window=window,
            rope=rope,
            query_growth=None if older else number_or_none(rope.scaling, "llama_4_scaling_beta"),
            tie_word_embeddings=value(c, "tie_word_embeddings", tied),
        )


class Positions(nn.Module):
    """The rotation of a step, and what its queries are multiplied by, `1 + growth · log(1 + ⌊p /
    length⌋)` [T, 1, 1] float32.
    """

    def __init__(self, rotary: RotaryEmbedding, growth: float, length: float) -> None:
        super().__init__()
        self.rotary = rotary
        self.growth = growth
        self.length = length

    def forward(self, positions: torch.Tensor) -> tuple[Rotation, torch.Tensor]:
        """Positions [T] → rotation and factors."""
        turns = positions.to(torch.float32).div_(self.length).floor_()
        factors = turns.log1p_().mul_(self.growth).add_(1)
        return self.rotary(positions), factors[:, None, None]

    def record(self, program: Program) -> tuple[NativeRotation, Rows]:
        """As `forward` of the step's positions, in a program."""
        factors = program.position_scale(self.growth, 0.0, self.length)
        return self.rotary.record(program), factors


class Ministral3Attention(SelfAttention):
    """Attention whose rotation comes with a factor for each query."""

    def forward(self, x: torch.Tensor, rotation: Any = None) -> torch.Tensor:
        """x [T, hidden] → [T, hidden]."""
        turn, factors = rotation
        qk, v = self.qkv_proj(x)
        qk = self.qk_norm_rope(qk, turn)
        q, k = qk.split((self.attn.num_heads, self.attn.num_kv_heads), dim=1)
        return self.o_proj(self.attn(q.mul_(factors), k, v))

    def record(self, program: Program, x: Rows, rotation: Any, *, to_stream: bool = False) -> Rows:
        """As `forward`, in a program; `to_stream` adds the result to the residual stream."""
        turn, factors = rotation
        qkv = self.qkv_proj.record(program, x, "qkv")
        attended = program.attention(
            qkv,
            require_kind(self.attn, Attention).shape,
            turn,
            interleaved=require_kind(self.qk_norm_rope, QKRope).interleaved,
            query_scale=factors,
        )
        return self.o_proj.record(program, attended, "delta", to_stream=to_stream)


class Ministral3DecoderLayer(PreNormLayer):
    """Attention and MLP, each after a norm."""

    def __init__(self, args: ModelArgs, config: JubakoConfig, prefix: str) -> None:
        attention = SelfAttention if args.query_growth is None else Ministral3Attention
        self_attn = attention(
            args.hidden_size,
            args.num_attention_heads,
            args.num_key_value_heads,
            args.head_dim,
            config=config,
            prefix=f"{prefix}.self_attn",
            sliding_window=args.sliding_window,
        )
        mlp = GatedMLP(args.hidden_size, args.intermediate_size, args.hidden_act)
        super().__init__(self_attn, mlp, args.hidden_size, args.rms_norm_eps)


class Ministral3ForCausalLM(DecoderForCausalLM):
    """The model and its head."""

    def __init__(self, config: JubakoConfig, *, prefix: str = "") -> None:
        args = ModelArgs.from_config(config.model_config.hf_config)
        embed_tokens = VocabEmbedding(args.vocab_size, args.hidden_size)
        rotary = RotaryEmbedding(args.head_dim, args.rope, config.model_config.context_length)
        growth, length = args.query_growth, args.rope.original_length
        model = DecoderModel(
            embed_tokens,
            [
                Ministral3DecoderLayer(args, config, f"{prefix}model.layers.{i}")
                for i in range(args.num_hidden_layers)
            ],
            RMSNorm(args.hidden_size, args.rms_norm_eps),
            {EVERY: rotary if growth is None else Positions(rotary, growth, length)},
        )
        tied_to = embed_tokens if args.tie_word_embeddings else None
        super().__init__(model, LMHead(args.vocab_size, args.hidden_size, tied_to))

    def sanitize(self, name: str) -> str | None:
        """The text part's name of a tensor; None for the image part and a tied head."""
        own = text_part(name)
        return None if own is None else super().sanitize(own)
